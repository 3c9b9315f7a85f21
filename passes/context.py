"""What passes share: the census they are checked against, and the report each returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from prefix_rewrite.errors import Finding
from prefix_rewrite.mixers.base import RankForm, Target
from prefix_rewrite.passes.head import Head


@dataclass(frozen=True)
class MixerCall:
    """One known mixer call met in the captured graph."""

    target: Target
    node: Node
    arguments: dict[str, Any]
    module: str
    source: str


@dataclass
class Census:
    """What the captured graph holds, counted before anything is changed.

    Attributes:
        tokens: symbolic number of physical tokens.
        vocab_size: columns of the logits.
        num_embeddings: rows of the token embedding.
        mixers: known mixer calls, in order, those in checkpointed sub-graphs included.
        project: the node at which the model's logits leave it.
        head: what makes the logits.
    """

    tokens: Any
    vocab_size: int
    num_embeddings: int
    project: Node
    head: Head
    mixers: list[MixerCall] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        return Counter(call.target.kind for call in self.mixers)


@dataclass(frozen=True)
class PassReport:
    """What one pass did: how many calls of each kind it changed."""

    name: str
    counts: Counter[str]


@dataclass
class PassContext:
    """Options of the rewrite and what earlier passes found.

    Attributes:
        backend: backend the rewritten graph goes to.
        mtp: what to do with a head that looks further ahead.
        findings: reasons against the rewrite that the modules themselves gave.
        group: name of the context-parallel group, None without one.
        gathers: the graph's inputs stand in for sharded parameters, which it gathers itself.
        plans: plan placeholders of each graph that holds a mixer: see `Layout.plan`.
    """

    backend: str
    mtp: str
    findings: list[Finding] = field(default_factory=list)
    group: str | None = None
    gathers: bool = False
    census: Census | None = None
    plans: dict[GraphModule, tuple[Node, ...]] = field(default_factory=dict)
    reports: list[PassReport] = field(default_factory=list)

    @property
    def checked_census(self) -> Census:
        assert self.census is not None, "graph_census must run first"
        return self.census

    def plan_of(self, node: Node) -> tuple[Any, ...]:
        """Plan placeholders of the graph that a node is in, and the group's name if any."""
        owner = node.graph.owning_module
        assert owner in self.plans, f"bind_layout gave no plan to the graph of {node}"
        return self.plans[owner] if self.group is None else (*self.plans[owner], self.group)

    def form_of(self, target: Target) -> Target | RankForm:
        """What plans and writes a mixer's tree op: its context-parallel form in a group."""
        if self.group is None:
            return target
        assert target.rank_form is not None, "reject_unsupported must run first"
        return target.rank_form

    def replaced(self, kind: str) -> int:
        return sum(report.counts[kind] for report in self.reports)
