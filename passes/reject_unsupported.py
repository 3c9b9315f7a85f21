"""Refuse what can't be run exactly, with every reason at once, before anything is changed."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from prefix_rewrite.errors import Finding, UnsupportedModelError
from prefix_rewrite.mixers.base import Reason
from prefix_rewrite.passes.context import MixerCall, PassContext, PassReport
from prefix_rewrite.passes.head import other_heads
from prefix_rewrite.passes.nodes import module_path, source_line, walk


def reject_unsupported(graph_module: GraphModule, context: PassContext) -> PassReport:
    """Raise one error with all findings.

    Raises:
        UnsupportedModelError: there is at least one.
    """
    findings = [
        *context.findings,
        *_mixer_findings(context),
        *context.checked_census.head.findings,
        *_other_head_findings(graph_module, context),
    ]
    if findings:
        raise UnsupportedModelError(findings)
    return PassReport("reject_unsupported", Counter())


def _mixer_findings(context: PassContext) -> Iterator[Finding]:
    census = context.checked_census
    for call in census.mixers:
        reasons = call.target.inspect(call.arguments, census.tokens)
        if context.group is not None:
            reasons = reasons + _rank_reasons(call)
        for what, remedy in reasons:
            yield Finding(what, remedy, call.module, call.source)


def _rank_reasons(call: MixerCall) -> list[Reason]:
    form = call.target.rank_form
    if form is None:
        return [(f"{call.target.kind} has no context-parallel form", "pass cp_mesh=None")]
    return form.inspect(call.arguments)


def _other_head_findings(graph_module: GraphModule, context: PassContext) -> Iterator[Finding]:
    census = context.checked_census
    nodes = (node for _, node in walk(graph_module))
    for node in other_heads(census.project, nodes, census.tokens, census.vocab_size):
        what = "a second vocabulary projection (a head that predicts further ahead?)"
        if context.mtp == "bypass":
            where = module_path(node) or "the model"
            warnings.warn(f"{where}: {what} is bypassed and gets no gradient", stacklevel=2)
        else:
            yield _at(node, what, "remove it, or pass mtp='bypass' to train without it")


def _at(node: Node, what: str, remedy: str) -> Finding:
    return Finding(what, remedy, module_path(node), source_line(node))
