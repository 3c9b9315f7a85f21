"""Give every graph that holds a mixer the forest's plan, as inputs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from prefix_rewrite.passes.context import PassContext, PassReport
from prefix_rewrite.passes.graph_census import find_leaf
from prefix_rewrite.passes.nodes import get_attribute, value_of, walk
from prefix_rewrite.targets import find_target

checkpoint_op = torch.ops.higher_order.tag_activation_checkpoint


def bind_layout(graph_module: GraphModule, context: PassContext) -> PassReport:
    """Take the plan's tensors from the `bind` call and thread them into sub-graphs."""
    bind = find_leaf(graph_module, torch.ops.prefix_rewrite.leaf_bind)
    input_ids, plan = bind.args
    bind.replace_all_uses_with(input_ids)
    graph_module.graph.erase_node(bind)
    counts: Counter[str] = Counter()
    _thread(graph_module, tuple(plan), context, counts)
    return PassReport("bind_layout", counts)


def _thread(
    graph_module: GraphModule, plan: Any, context: PassContext, counts: Counter[str]
) -> None:
    context.plans[graph_module] = plan
    for node in list(graph_module.graph.nodes):
        if node.target is not checkpoint_op:
            continue
        child = get_attribute(graph_module, str(node.args[0].target))
        if not _holds_mixer(child):
            continue
        node.args = (*node.args, *plan)
        inner = tuple(_add_input(child, value_of(outer), outer.name) for outer in plan)
        counts["sub-graph"] += 1
        _thread(child, inner, context, counts)


def _holds_mixer(graph_module: GraphModule) -> bool:
    return any(find_target(node) is not None for _, node in walk(graph_module))


def _add_input(graph_module: GraphModule, value: Any, name: str) -> Node:
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    with graph_module.graph.inserting_after(inputs[-1]):
        node = graph_module.graph.placeholder(name)
    node.meta["example_value"] = value
    return node
