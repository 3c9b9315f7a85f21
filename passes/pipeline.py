"""The rewrite: its passes, in order."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node

from prefix_rewrite.passes.bind_layout import bind_layout
from prefix_rewrite.passes.context import PassContext, PassReport
from prefix_rewrite.passes.gather_late import gather_late
from prefix_rewrite.passes.graph_census import graph_census
from prefix_rewrite.passes.head_moves import MODES
from prefix_rewrite.passes.honour_checkpoints import honour_checkpoints
from prefix_rewrite.passes.locality_call import read_op
from prefix_rewrite.passes.nodes import copy_graph, walk
from prefix_rewrite.passes.project_edges import project_edges
from prefix_rewrite.passes.reject_unsupported import reject_unsupported
from prefix_rewrite.passes.replace_mixers import replace_mixers
from prefix_rewrite.passes.token_locality import token_locality
from prefix_rewrite.passes.verify_rewrite import verify_rewrite

Pass = Callable[[GraphModule, PassContext], PassReport]

PASSES: tuple[Pass, ...] = (
    graph_census,
    token_locality,
    reject_unsupported,
    bind_layout,
    replace_mixers,
    project_edges,
    honour_checkpoints,
    gather_late,
    verify_rewrite,
)


def rewrite(graph_module: GraphModule, context: PassContext) -> GraphModule:
    """Return a rewritten copy of a captured graph; the graph given is left as it was.

    Raises:
        UnsupportedModelError: the graph holds what can't be run exactly on a forest.
    """
    copy = copy_graph(graph_module)
    for run_pass in PASSES:
        context.reports.append(run_pass(copy, context))
    for owner in {owner for owner, _ in walk(copy)}:
        owner.graph.eliminate_dead_code(_is_impure)
        owner.graph.lint()
        owner.recompile()
    return copy


def _is_impure(node: Node) -> bool:
    """Keep what changes a tensor in place, which may be read through another name, and modes."""
    if node.op in ("placeholder", "output"):
        return True
    return node.op.startswith("call") and (node.target in MODES or read_op(node)[1])
