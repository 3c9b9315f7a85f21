"""Say what `prefix_compile` would do to a model: mixers, proof, refusals, guards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from prefix_rewrite.capture import CapturedModel
from prefix_rewrite.errors import Finding, UnsupportedModelError
from prefix_rewrite.passes.context import PassContext


@dataclass(frozen=True)
class MixerLine:
    """One mixer call: what it is, where it is, and the tree op that replaces it."""

    kind: str
    module: str
    source: str
    replaced_by: str


@dataclass(frozen=True)
class ModelReport:
    """What was found in a model's captured graph.

    Attributes:
        model: the model's class.
        mixers: its mixer calls, in order.
        proven: how many calls of each op were proven token-local.
        findings: every reason against a rewrite; empty if there is none.
        head: how the logits are made at the sampled edges.
        guards: what makes Dynamo capture again, counted by kind.
    """

    model: str
    mixers: list[MixerLine]
    proven: Counter[str]
    findings: tuple[Finding, ...]
    head: str
    guards: Counter[str]

    @property
    def supported(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        lines = [f"{self.model}: {self._verdict()}"]
        lines += [
            f"  {mixer.kind:<16}{mixer.module or '(model)'} -> {mixer.replaced_by}"
            for mixer in self.mixers
        ]
        lines += [f"  {name:<16}{value}" for name, value in self._summary()]
        lines += [f"  refused: {finding}" for finding in self.findings]
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        mixers = Table("mixer", "module", "replaced by", "called at", title_justify="left")
        mixers.title = f"{self.model}: {self._verdict()}"
        for mixer in self.mixers:
            mixers.add_row(mixer.kind, mixer.module, mixer.replaced_by, mixer.source)
        summary = Table(show_header=False)
        for name, value in self._summary():
            summary.add_row(name, value)
        refused = Table("module", "refused", "what to do", "called at")
        for finding in self.findings:
            refused.add_row(finding.module, finding.what, finding.remedy, finding.source)
        return Group(mixers, summary, *([refused] if self.findings else []))

    def _verdict(self) -> str:
        if self.supported:
            return "runs exactly on a forest"
        return f"can't be run exactly on a forest, {len(self.findings)} reason(s)"

    def _summary(self) -> list[tuple[str, str]]:
        proven = ", ".join(f"{name} {count}" for name, count in self.proven.most_common())
        guards = ", ".join(f"{name} {count}" for name, count in self.guards.most_common(8))
        return [
            ("head", self.head or "not reached"),
            ("token-local", f"{self.proven.total()} calls proven: {proven}" if proven else "none"),
            ("guards", f"{self.guards.total()}: {guards}" if guards else "none installed"),
        ]


def explain(model: nn.Module, *, mtp: str = "reject") -> ModelReport:
    """Capture a model in its present mode, without running it, and report on it.

    Works on the meta device too, so a model's config is enough.

    Args:
        model: as for `prefix_compile`.
        mtp: as for `prefix_compile`.
    """
    captured = CapturedModel(model, backend="eager", mtp=mtp)
    findings: tuple[Finding, ...] = ()
    try:
        captured.capture()
    except UnsupportedModelError as error:
        findings = error.findings
    context = captured.context
    return ModelReport(
        model=type(model).__name__,
        mixers=_mixers(context),
        proven=_proven(context),
        findings=findings,
        head=_head(context),
        guards=captured.guards,
    )


def _mixers(context: PassContext | None) -> list[MixerLine]:
    if context is None or context.census is None:
        return []
    return [
        MixerLine(call.target.kind, call.module, call.source, f"tree {call.target.kind}")
        for call in context.census.mixers
    ]


def _proven(context: PassContext | None) -> Counter[str]:
    reports = context.reports if context is not None else []
    return sum((r.counts for r in reports if r.name == "token_locality"), Counter())


def _head(context: PassContext | None) -> str:
    if context is None or context.census is None:
        return ""
    head = context.census.head
    if head.findings:
        return "refused"
    if head.fused is not None:
        steps = ", ".join(head.fused.steps)
        return "fused with the log-softmax" + (f", after {steps}" if steps else "")
    return f"{len(head.nodes)} ops run on the edges' rows"
