"""Compare what was done with what the census found; nothing may be left over."""

from __future__ import annotations

from collections import Counter

from torch.fx import GraphModule, Node

from prefix_rewrite.passes.context import PassContext, PassReport
from prefix_rewrite.passes.nodes import walk
from prefix_rewrite.targets import find_target


def verify_rewrite(graph_module: GraphModule, context: PassContext) -> PassReport:
    """A pass that matched nothing must not pass unseen."""
    for kind, found in context.checked_census.counts.items():
        replaced = context.replaced(kind)
        assert replaced == found, f"census found {found} {kind} calls, {replaced} were replaced"
    assert context.replaced("head") == 1, "the head was not projected at the edges"
    for _, node in walk(graph_module):
        assert find_target(node) is None, f"{node} was not replaced"
        assert not _is_leaf(node), f"{node.target} is left in the graph"
    return PassReport("verify_rewrite", Counter())


def _is_leaf(node: Node) -> bool:
    return "prefix_rewrite.leaf_" in str(node.target)
