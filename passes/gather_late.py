"""Gather sharded parameters where a module uses them, not before the graph."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import torch
from torch.fx import GraphModule, Node

from prefix_rewrite.distributed.fsdp import gather_parameter
from prefix_rewrite.passes.context import PassContext, PassReport
from prefix_rewrite.passes.honour_checkpoints import run_checkpointed
from prefix_rewrite.passes.nodes import get_attribute, module_path, value_of


def gather_late(graph_module: GraphModule, context: PassContext) -> PassReport:
    """Gather once for each module that uses a parameter: it is freed before the next one."""
    counts: Counter[str] = Counter()
    if context.gathers:
        inputs = graph_module.graph.find_nodes(op="placeholder")
        inputs = [node for node in inputs if _is_floating(node)]
        _gather(graph_module, inputs, counts)
    return PassReport("gather_late", counts)


def _gather(graph_module: GraphModule, inputs: list[Node], counts: Counter[str]) -> None:
    """Gather what users of the inputs need; checkpoints gather inside, and so once more.

    All in the graph's order, which every rank has in common: ranks must gather in one order.
    """
    graph = graph_module.graph
    for node in inputs:
        users = sorted(node.users)  # in the graph's order
        computing = [u for u in users if u.op != "output" and u.target is not run_checkpointed]
        for _, group in groupby(computing, module_path):
            first, *others = group
            with graph.inserting_before(first):
                whole = graph.call_function(gather_parameter, (node,))
            counts["gather"] += 1
            for user in (first, *others):
                user.replace_input_with(node, whole)
    for call in graph.nodes:
        if call.target is run_checkpointed:
            child = get_attribute(graph_module, str(call.args[0].target))
            pairs = zip(child.graph.find_nodes(op="placeholder"), call.args[1:], strict=True)
            _gather(child, [inner for inner, outer in pairs if outer in inputs], counts)


def _is_floating(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point()
