"""Project logits at the sampled edges only: no tensor has V columns and more than E rows."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from prefix_rewrite.ops.edge_logprobs import edge_logprobs, logits_logprobs
from prefix_rewrite.passes.context import PassContext, PassReport
from prefix_rewrite.passes.head import RESHARDING, Head, is_projection


def project_edges(graph_module: GraphModule, context: PassContext) -> PassReport:
    """Select the edges' rows before the head, and end the graph in their log-probabilities."""
    census = context.checked_census
    graph, project, head = graph_module.graph, census.project, census.head
    _, _, edge_source, edge_row, edge_target, temperature, entropy, logits_wanted = project.args
    edges = (edge_row, edge_target, temperature)
    with graph.inserting_before(project):
        rows = {source: _select(graph, source, edge_source) for source in head.sources}
        if head.fused is not None and not logits_wanted:
            logprobs, entropies = _fused(graph, head, rows, edges, entropy)
            logits = entropies  # not asked for: any tensor will do
        else:
            logits = _run_on_rows(graph, head, rows, census.tokens)[project.args[0]]
            result = graph.call_function(logits_logprobs, (logits, *edges, entropy))
            logprobs, entropies = _unpack(graph, result)
    for item in list(project.users):
        item.replace_all_uses_with((logprobs, entropies, logits)[item.args[1]])
        graph.erase_node(item)
    graph.erase_node(project)
    for node in reversed(head.nodes):
        _erase(node)
    return PassReport("project_edges", Counter(head=1))


def _erase(node: Node) -> None:
    """Erase a node of the head, and what only outputs beside the logits were made of."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


def _select(graph: Graph, source: Node, edge_source: Any) -> Node:
    """[1,T,D] -> [1,R,D]"""
    rows = graph.call_function(torch.index_select, (source, 1, edge_source))
    rows.meta = {k: v for k, v in source.meta.items() if k in ("nn_module_stack", "stack_trace")}
    return rows


def _fused(
    graph: Graph, head: Head, rows: dict[Node, Node], edges: tuple[Any, ...], entropy: Any
) -> tuple[Node, Node]:
    assert head.fused is not None
    _, weight, *bias = head.fused.projection.args
    (source,) = head.sources
    result = graph.call_function(
        edge_logprobs,
        (rows[source], weight, bias[0] if bias else None, *edges),
        {
            "steps": ",".join(head.fused.steps),
            "constants": list(head.fused.constants),
            "entropy": entropy,
        },
    )
    return _unpack(graph, result)


def _run_on_rows(graph: Graph, head: Head, rows: dict[Node, Node], tokens: Any) -> dict[Any, Node]:
    """Copy the head's ops so that they take the selected rows; shards are gathered."""
    copies: dict[Any, Node] = {}

    def mapped(node: Node) -> Node:
        return copies.get(node, rows.get(node, node))

    for node in head.nodes:
        if node.target in RESHARDING:
            copies[node] = mapped(node.args[0])
            continue
        copies[node] = graph.node_copy(node, mapped)
        copies[node].meta.pop("example_value", None)
        if head.sharded and is_projection(node, tokens):
            copies[node] = graph.call_method("full_tensor", (copies[node],))
    return copies


def _unpack(graph: Graph, pair: Node) -> tuple[Node, Node]:
    first, second = (graph.call_function(operator.getitem, (pair, i)) for i in (0, 1))
    return first, second
