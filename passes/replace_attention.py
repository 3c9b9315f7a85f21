"""Replace attention calls by tree attention."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import GraphModule

from prefix_rewrite.ops.tree_attention import tree_attention
from prefix_rewrite.passes.context import MixerCall, PassContext, PassReport
from prefix_rewrite.passes.nodes import shape_of

leaf_attention = torch.ops.prefix_rewrite.leaf_attention


def replace_attention(graph_module: GraphModule, context: PassContext) -> PassReport:
    """A leaf call returns [1,T,H,D], as tree attention does; SDPA returns [1,H,T,D]."""
    counts: Counter[str] = Counter()
    for call in context.checked_census.mixers:
        if call.target.kind == "attention":
            _replace(call, context)
            counts["attention"] += 1
    return PassReport("replace_attention", counts)


def _replace(call: MixerCall, context: PassContext) -> None:
    node, arguments = call.node, call.arguments
    graph = node.graph
    q, k, v = (arguments[name] for name in "qkv")
    plan = context.plan_of(node)
    scale: Any = arguments["scale"]
    if scale is None:
        scale = int(shape_of(q)[-1]) ** -0.5
    with graph.inserting_before(node):
        out = graph.call_function(tree_attention, (q, k, v, *plan, scale))
        out.meta = dict(node.meta)
        if node.target is not leaf_attention:
            out = graph.call_method("transpose", (out, 1, 2))
            out.meta = dict(node.meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
