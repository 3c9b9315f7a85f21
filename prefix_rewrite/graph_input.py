"""Read a user's networkx graph, or say which node keeps it from being a prefix forest."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np

from prefix_rewrite.calls import BoolArray, as_sampled_mask, as_token_ids
from prefix_rewrite.errors import ForestError
from prefix_rewrite.order import topological_order
from prefix_rewrite.segments import IntArray


@dataclass(frozen=True)
class GraphInput:
    """A branching in the graph's own insertion order; n tokens a node.

    Attributes:
        names: node names.
        parent: index of each node's parent, -1 for a root.
        token_ids: [n] int64 of each node.
        sampled: [n] bool of each node.
        order: the nodes with parents before children.
    """

    names: list[Hashable]
    parent: list[int]
    token_ids: list[IntArray]
    sampled: list[BoolArray]
    order: list[int]


def read_graph(graph: nx.DiGraph) -> GraphInput:
    """Check a graph and read it.

    Raises:
        ForestError: the graph is no branching, or a node's attributes are malformed; the message
            names the node.
    """
    _check_kind(graph)
    names = list(graph)
    index = {name: i for i, name in enumerate(names)}
    parent = [_parent_index(graph, name, index) for name in names]
    order = topological_order(parent)
    if len(order) < len(names):
        name = names[_node_on_cycle(parent, set(order))]
        raise ForestError(f"a forest must have no cycle, got one through node {name!r}; cut it")
    nodes = [
        _read_node(name, graph.nodes[name], is_root=above == -1)
        for name, above in zip(names, parent, strict=True)
    ]
    return GraphInput(names, parent, [ids for ids, _ in nodes], [mask for _, mask in nodes], order)


def _check_kind(graph: Any) -> None:
    if not isinstance(graph, nx.Graph):
        kind = type(graph).__name__
        raise ForestError(f"from_graph must be given an nx.DiGraph, got {kind}")
    if graph.is_directed() and not graph.is_multigraph():
        return
    kind = "an undirected graph" if not graph.is_directed() else "a multigraph"
    near = next(iter(graph.edges()), None) or tuple(graph)[:1]
    where = f" (node {near[0]!r})" if near else ""
    raise ForestError(f"from_graph must be given an nx.DiGraph, got {kind}{where}; convert it")


def _parent_index(graph: nx.DiGraph, name: Hashable, index: Mapping[Hashable, int]) -> int:
    above = list(graph.predecessors(name))
    if name in above:
        raise ForestError(f"node {name!r} must not be its own parent; remove the self-loop")
    if len(above) > 1:
        raise ForestError(
            f"node {name!r} must have one parent at most, got {above[:3]!r}; "
            "copy the node once per parent"
        )
    return index[above[0]] if above else -1


def _node_on_cycle(parent: list[int], reached: set[int]) -> int:
    node = next(i for i in range(len(parent)) if i not in reached)
    seen: set[int] = set()
    while node not in seen:  # every node off the reached part hangs below a cycle
        seen.add(node)
        node = parent[node]
    return node


def _read_node(
    name: Hashable, attributes: Mapping[str, Any], *, is_root: bool
) -> tuple[IntArray, BoolArray]:
    try:
        ids = as_token_ids(attributes.get("token_ids", ()), "token_ids")
        if not len(ids):
            raise ForestError("token_ids must hold at least one token, got none")
        mask = attributes.get("sampled")
        sampled = np.zeros(len(ids), np.bool_) if mask is None else as_sampled_mask(mask, len(ids))
    except ForestError as error:
        raise ForestError(f"node {name!r}: {error}") from None
    if is_root and sampled[0]:
        raise ForestError(
            f"node {name!r}: a sampled token must have a context, got a sampled first token of "
            "a root; put the context into the root"
        )
    return ids, sampled
