"""The table of known mixer calls: how each is recognised, read, judged and planned.

Recognition is by call target only, never by a pattern of decomposed maths. A call is read into
named arguments, whatever library it was written for; `inspect` says what of them can't be run
exactly on a forest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from prefix_rewrite import seams  # noqa: F401  (defines the leaf ops)
from prefix_rewrite.ops.tree_attention import plan_attention
from prefix_rewrite.ops.tree_conv import plan_conv
from prefix_rewrite.ops.tree_ssd import plan_ssd
from prefix_rewrite.passes.nodes import same_size, shape_of
from prefix_rewrite.plan import Planner

Reason = tuple[str, str]  # what was met, what to do about it
leaf = torch.ops.prefix_rewrite


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

    def read(self, node: Node) -> dict[str, Any]:
        given = dict(zip(self.names, node.args, strict=False))
        given |= {self.keywords.get(name, name): value for name, value in node.kwargs.items()}
        return {name: given.get(name, self.defaults.get(name)) for name in self.names}


@dataclass(frozen=True)
class Target:
    """One kind of mixer.

    Attributes:
        kind: the mixer's name in reports.
        signatures: how each of its call targets is read.
        planner: what its tree op must know of a forest.
        inspect: reasons why a call, given as named arguments and the symbolic token count, can't
            be run exactly on a forest.
    """

    kind: str
    signatures: Mapping[Callable[..., Any], Signature]
    planner: Planner
    inspect: Callable[[dict[str, Any], Any], list[Reason]]


def _leaf_signature(op: Any) -> Signature:
    return Signature(tuple(argument.name for argument in op.default._schema.arguments))


_SDPA = Signature(
    names=("q", "k", "v", "mask", "dropout", "causal", "scale", "enable_gqa"),
    defaults={"dropout": 0.0, "causal": False, "enable_gqa": False},
    keywords={
        "query": "q",
        "key": "k",
        "value": "v",
        "attn_mask": "mask",
        "dropout_p": "dropout",
        "is_causal": "causal",
    },
)


def _unknown(call: dict[str, Any]) -> list[Reason]:
    names = call.get("unknown")
    if not names:
        return []
    return [(f"asks for {names}, which has no meaning defined on a forest", "leave it out")]


def _inspect_attention(call: dict[str, Any], tokens: Any) -> list[Reason]:
    reasons: list[Reason] = []
    if call["mask"] is not None:
        reasons.append(
            ("attention is given a mask", "pass none: the forest says what each token sees")
        )
    if call["dropout"]:
        reasons.append(
            (f"attention dropout is {call['dropout']} in training", "set it to 0 or call eval()")
        )
    if call.get("window"):
        reasons.append(
            (f"attention has a sliding window of {call['window']}", "use full attention layers")
        )
    if call.get("softcap"):
        reasons.append(
            (f"attention scores are soft-capped at {call['softcap']}", "use a model without it")
        )
    if call.get("sinks") is not None:
        reasons.append(("attention has sinks", "use a model without them"))
    if not call["causal"]:
        reasons.append(
            ("attention is not causal", "pass is_causal=True or use a causal language model")
        )
    return reasons + _unknown(call) + _inspect_attention_shapes(call, tokens)


def _inspect_attention_shapes(call: dict[str, Any], tokens: Any) -> list[Reason]:
    q, k, v = (shape_of(call[name]) for name in "qkv")
    if len(q) != 4:
        return [
            (f"attention gets a query of {len(q)} dimensions", "pass [batch, heads, tokens, dim]")
        ]
    reasons: list[Reason] = []
    if not same_size(q[0], 1):
        reasons.append((f"attention runs on a batch of {q[0]}", "keep the batch dimension of 1"))
    for name, shape in zip("qkv", (q, k, v), strict=True):
        if not same_size(shape[2], tokens):
            reasons.append(
                (
                    f"attention's {name} has {shape[2]} positions where the model has {tokens} "
                    "tokens",
                    "only self-attention over the model's own tokens can follow a forest",
                )
            )
    if not same_size(q[1], k[1]) and call.get("enable_gqa") is False:
        reasons.append(("grouped-query attention without enable_gqa", "pass enable_gqa=True"))
    return reasons


def _inspect_conv(call: dict[str, Any], tokens: Any) -> list[Reason]:
    reasons = _unknown(call)
    if call["activation"] not in ("", "silu", "swish"):
        reasons.append((f"causal conv activation is {call['activation']!r}", "use 'silu' or none"))
    shape = shape_of(call["x"])
    if not (len(shape) == 3 and same_size(shape[0], 1) and same_size(shape[2], tokens)):
        reasons.append((f"causal conv runs on {shape}", "pass [1, channels, tokens]"))
    return reasons


def _inspect_ssd(call: dict[str, Any], tokens: Any) -> list[Reason]:
    reasons = _unknown(call)
    shape = shape_of(call["x"])
    if not (len(shape) == 4 and same_size(shape[0], 1) and same_size(shape[1], tokens)):
        reasons.append((f"Mamba-2 scan runs on {shape}", "pass [1, tokens, heads, dim]"))
    return reasons


TARGETS: tuple[Target, ...] = (
    Target(
        "attention",
        {
            leaf.leaf_attention: _leaf_signature(leaf.leaf_attention),
            F.scaled_dot_product_attention: _SDPA,
        },
        plan_attention,
        _inspect_attention,
    ),
    Target("conv", {leaf.leaf_conv: _leaf_signature(leaf.leaf_conv)}, plan_conv, _inspect_conv),
    Target("ssd", {leaf.leaf_ssd: _leaf_signature(leaf.leaf_ssd)}, plan_ssd, _inspect_ssd),
)


def find_target(node: Node) -> tuple[Target, Signature] | None:
    """Look a call up in the table."""
    if node.op != "call_function":
        return None
    for target in TARGETS:
        signature = target.signatures.get(node.target)  # type: ignore[arg-type]
        if signature is not None:
            return target, signature
    return None
