"""What every mixer's file is made of: a leaf op, signatures, and a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from prefix_rewrite.distributed.share import SharePlanner
from prefix_rewrite.errors import PrefixRewriteError
from prefix_rewrite.plan import Planner

Reason = tuple[str, str]  # what was met, what to do about it
Call = dict[str, Any]  # a call's arguments by our names: nodes and constants
Seams = Mapping[str, Callable[..., Any]]  # what stands in for a function, by the function's name

# What transformers' models pass down to every layer and that asks nothing of a mixer.
_PASSED_DOWN = frozenset(
    {"cache", "cache_position", "labels", "output_attentions", "output_hidden_states"}
    | {"output_router_logits", "past_key_values", "position_embeddings", "position_ids"}
    | {"return_dict", "use_cache"}
)


@dataclass(frozen=True)
class Signature:
    """How a call target's arguments are read.

    Attributes:
        names: our names of its arguments, in order.
        defaults: values of those that may be left out, None where absent.
        keywords: its own keyword names, where they differ from ours.
    """

    names: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keywords: Mapping[str, str] = field(default_factory=dict)

    def read(self, node: Node) -> Call:
        given = dict(zip(self.names, node.args, strict=False))
        given |= {self.keywords.get(name, name): value for name, value in node.kwargs.items()}
        return {name: given.get(name, self.defaults.get(name)) for name in self.names}


Emit = Callable[[Graph, Node, Call, tuple[Any, ...]], Node]


@dataclass(frozen=True)
class RankForm:
    """A mixer's context-parallel form: on one rank's rows, with collectives inside.

    Attributes:
        planner: what it must know of a rank's share of a forest.
        emit: as the target's; the plan ends with the group's name.
        inspect: further reasons why a call can't be run exactly.
        planner_for: as the target's.
    """

    planner: SharePlanner
    emit: Emit
    inspect: Callable[[Call], list[Reason]] = lambda call: []
    planner_for: Callable[[Call], SharePlanner] | None = None

    def planner_of(self, call: Call) -> SharePlanner:
        return self.planner if self.planner_for is None else self.planner_for(call)


@dataclass(frozen=True)
class Target:
    """One kind of mixer.

    Attributes:
        kind: the mixer's name in reports.
        signatures: how each of its call targets is read.
        planner: what its tree op must know of a forest.
        inspect: reasons why a call can't be run exactly on a forest, given the symbolic number
            of tokens.
        emit: writes the tree op's call into the graph, given the node replaced, its arguments and
            the plan's placeholders; returns what stands for the node's result.
        seams: functions to stand in, while a graph is captured, for those that modeling files
            call by these names; `package.module:function` names a function wherever it is called.
        method_seams: the same for methods that a model calls on itself, which have no name in its
            file, by `Class.method` or `Class.child.method`; called with the module first.
        rank_form: its context-parallel form, None where it has none.
        planner_for: the planner of one call, where it depends on the call's constants; the same
            object for the same constants.
        is_total: its result is one of the forest as a whole, which the model may only return.
    """

    kind: str
    signatures: Mapping[Callable[..., Any], Signature]
    planner: Planner
    inspect: Callable[[Call, Any], list[Reason]]
    emit: Emit
    seams: Seams = field(default_factory=dict)
    method_seams: Seams = field(default_factory=dict)
    rank_form: RankForm | None = None
    planner_for: Callable[[Call], Planner] | None = None
    is_total: bool = False

    def planner_of(self, call: Call) -> Planner:
        return self.planner if self.planner_for is None else self.planner_for(call)


def define_leaf(name: str, schema: str, fake: Callable[..., Any]) -> Any:
    """Define an op that exists in captured graphs only: it has a shape; run, it raises."""
    qualified = f"prefix_rewrite::{name}"
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "CompositeExplicitAutograd")(_run_uncaptured)
    torch.library.register_fake(qualified, fake)
    # Without an autograd rule Dynamo would see outputs that need no gradient.
    torch.library.register_autograd(qualified, lambda ctx, *grads: None)
    return getattr(torch.ops.prefix_rewrite, name)


def _run_uncaptured(*arguments: Any) -> Any:
    raise PrefixRewriteError(
        "a forest must run through the captured graph, but Dynamo did not capture the model; "
        "leave torch.compiler.set_stance('force_eager') and TORCHDYNAMO_DISABLE off"
    )


def leaf_signature(op: Any) -> Signature:
    """Read a leaf op's call by its schema's own names."""
    return Signature(tuple(argument.name for argument in op.default._schema.arguments))


def asked_for(arguments: dict[str, Any]) -> str:
    """Name the arguments that ask something of the mixer: neither absent nor False."""
    return ",".join(
        sorted(
            name
            for name, value in arguments.items()
            if name not in _PASSED_DOWN and value is not None and value is not False
        )
    )


def unknown_reasons(call: Call) -> list[Reason]:
    """Refuse what a seam was asked for beyond the plain mixer."""
    names = call.get("unknown")
    if not names:
        return []
    return [(f"asks for {names}, which has no meaning defined on a forest", "leave it out")]
