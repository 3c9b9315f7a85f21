"""Replace every known mixer call by its tree op."""

from __future__ import annotations

from collections import Counter

from torch.fx import GraphModule

from prefix_rewrite.passes.context import PassContext, PassReport


def replace_mixers(graph_module: GraphModule, context: PassContext) -> PassReport:
    """A tree op returns what the call it replaces returned, so nothing else changes."""
    counts: Counter[str] = Counter()
    for call in context.checked_census.mixers:
        node, graph = call.node, call.node.graph
        with graph.inserting_before(node):
            emit = context.form_of(call.target).emit
            # Read again: an argument may be what an earlier call of this loop was replaced by.
            arguments = call.target.signatures[node.target].read(node)
            out = emit(graph, node, arguments, context.plan_of(node))
        out.meta = dict(node.meta)
        node.replace_all_uses_with(out)
        graph.erase_node(node)
        counts[call.target.kind] += 1
    return PassReport("replace_mixers", counts)
