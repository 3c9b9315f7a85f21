"""The prefix forest: captured calls, or a user's own graph, with each shared prefix once.

Shapes: C calls, N tokens of one call, S segments, T physical tokens, E sampled edges.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np

from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.errors import ForestError
from prefix_rewrite.graph_input import read_graph
from prefix_rewrite.order import heavy_first_order
from prefix_rewrite.segments import IntArray, SegmentTable
from prefix_rewrite.stats import ForestStats, count_forest
from prefix_rewrite.trie import NO_CALL, build_radix_tree


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """Sampled edges in the caller's order: calls in order, tokens in order within a call.

    Attributes:
        source: [E] physical token that predicts, the last of the sampled token's context.
        target: [E] token id that was sampled.
        call: [E] call that owns the edge.
        token: [E] physical token that was sampled.
        call_offsets: [C + 1] edges of call i are `call_offsets[i]:call_offsets[i + 1]`.
    """

    source: IntArray
    target: IntArray
    call: IntArray
    token: IntArray
    call_offsets: IntArray

    @property
    def num_edges(self) -> int:
        return len(self.source)


@dataclass(frozen=True, eq=False)
class PrefixForest:
    """Physical tokens in depth-first order, and the sampled edges that own their loss.

    Make one with `from_calls` or `from_graph`. In a forest made of a graph, call i is the path
    that ends with the graph's i-th node, and owns the edges of that node.

    Attributes:
        segments: the segment table, heaviest child first.
        token_ids: [T] int64 ids in depth-first order.
        nodes: [S] node names; the position is the segment's index.
        edges: the sampled edges.
        call_segment: [C] segment that holds the call's last token.
        call_length: [C] tokens of the call.
    """

    segments: SegmentTable
    token_ids: IntArray
    nodes: tuple[Hashable, ...]
    edges: EdgeTable
    call_segment: IntArray
    call_length: IntArray

    @classmethod
    def from_calls(cls, calls: Iterable[CapturedCall]) -> PrefixForest:
        """Share every prefix that calls have in common, exactly; nothing is dropped or merged.

        Example:
            >>> forest = PrefixForest.from_calls(
            ...     [CapturedCall([1, 2], [3, 4]), CapturedCall([1, 2], [3, 5])]
            ... )
            >>> forest.num_tokens, forest.num_edges
            (5, 4)

        Raises:
            ForestError: a member is not a `CapturedCall`.
        """
        calls = list(calls)
        for i, call in enumerate(calls):
            if not isinstance(call, CapturedCall):
                kind = type(call).__name__
                raise ForestError(f"call {i}: must be a CapturedCall, got {kind}; construct one")
        tree = build_radix_tree(calls)
        rank = [NO_CALL] * len(tree.parent)
        for i, node in enumerate(tree.call_node):
            rank[node] = min(rank[node], i)
        length = [end - begin for begin, end in zip(tree.begin, tree.end, strict=True)]
        order = heavy_first_order(tree.parent, length, rank)
        runs = [calls[tree.example[i]].token_ids[tree.begin[i] : tree.end[i]] for i in order]
        table, place = _lay_out(tree.parent, length, order)
        return cls._assemble(
            table,
            runs,
            nodes=tuple(range(len(order))),
            call_segment=place[np.asarray(tree.call_node, dtype=np.int64)],
            call_length=np.asarray([call.num_tokens for call in calls], dtype=np.int64),
            depths=[np.flatnonzero(call.sampled) for call in calls],
        )

    @classmethod
    def from_graph(cls, graph: nx.DiGraph) -> PrefixForest:
        """Lay out a user's own branching; equal tokens under different names stay apart.

        Args:
            graph: nodes have `token_ids` [n >= 1] and optionally `sampled` [n], a boolean mask.

        Raises:
            ForestError: the graph is no branching, or a node's attributes are malformed; the
                message names the node.
        """
        given = read_graph(graph)
        count = len(given.names)
        length = [len(ids) for ids in given.token_ids]
        order = heavy_first_order(given.parent, length, range(count))
        table, place = _lay_out(given.parent, length, order)
        begin = table.depth[place]
        return cls._assemble(
            table,
            [given.token_ids[i] for i in order],
            nodes=tuple(given.names[i] for i in order),
            call_segment=place,
            call_length=begin + np.asarray(length, dtype=np.int64),
            depths=[b + np.flatnonzero(m) for b, m in zip(begin, given.sampled, strict=True)],
        )

    @classmethod
    def _assemble(
        cls,
        table: SegmentTable,
        runs: Sequence[IntArray],
        *,
        nodes: tuple[Hashable, ...],
        call_segment: IntArray,
        call_length: IntArray,
        depths: Sequence[IntArray],
    ) -> PrefixForest:
        """Put a forest together from each segment's ids and each call's sampled depths."""
        token_ids = np.concatenate([np.empty(0, dtype=np.int64), *runs])
        counts = np.asarray([len(depth) for depth in depths], dtype=np.int64)
        depth = np.concatenate([np.empty(0, dtype=np.int64), *depths])
        call = np.repeat(np.arange(len(counts)), counts)
        token = table.locate(call_segment[call], depth)
        last = table.locate(call_segment, call_length - 1)
        edges = EdgeTable(
            source=table.parent_token[token],
            target=token_ids[token],
            call=call,
            token=token,
            call_offsets=np.concatenate([[0], np.cumsum(counts)]),
        )
        return cls(table, token_ids, nodes, edges, table.segment_of(last), call_length)

    @property
    def num_tokens(self) -> int:
        """Physical tokens T."""
        return len(self.token_ids)

    @property
    def num_edges(self) -> int:
        """Sampled edges E that this forest owns."""
        return self.edges.num_edges

    @property
    def num_calls(self) -> int:
        """Calls C; of a forest made of a graph, its nodes."""
        return len(self.call_length)

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The forest as a networkx branching: nodes `token_ids`, `depth` (of the first token)."""
        graph = nx.DiGraph()
        table = self.segments
        starts, ends = table.start.tolist(), (table.start + table.length).tolist()
        for i, depth in enumerate(table.depth.tolist()):
            ids = self.token_ids[starts[i] : ends[i]]
            graph.add_node(self.nodes[i], token_ids=ids, depth=depth)
        for i, above in enumerate(table.parent.tolist()):
            if above != -1:
                graph.add_edge(self.nodes[above], self.nodes[i])
        return graph

    def call_path(self, call: int) -> IntArray:
        """Return the call's physical tokens [N], root first; their ids are the call's own."""
        length = int(self.call_length[call])
        segment = np.full(length, self.call_segment[call])
        return self.segments.locate(segment, np.arange(length))

    def node_edges(self, node: Hashable) -> IntArray:
        """Return the edges [k] whose sampled token lies in a node, in the caller's order.

        Raises:
            ForestError: no node has this name.
        """
        if node not in self._segment_index:
            raise ForestError(f"node {node!r} must be a node of the forest; see forest.nodes")
        order, offsets = self._edges_by_segment
        index = self._segment_index[node]
        return order[offsets[index] : offsets[index + 1]]

    @cached_property
    def _segment_index(self) -> dict[Hashable, int]:
        return {node: i for i, node in enumerate(self.nodes)}

    @cached_property
    def _edges_by_segment(self) -> tuple[IntArray, IntArray]:
        segment = self.segments.segment_of(self.edges.token)
        order = np.argsort(segment, kind="stable")
        offsets = np.searchsorted(segment[order], np.arange(len(self.nodes) + 1))
        return order, offsets

    def stats(self) -> ForestStats:
        """Count tokens, sharing and branching."""
        return count_forest(self)

    def __repr__(self) -> str:
        return (
            f"PrefixForest({self.num_calls} calls, {self.num_tokens} tokens, "
            f"{self.num_edges} edges, {self.segments.num_segments} segments)"
        )


def _lay_out(
    parent: Sequence[int], length: Sequence[int], order: Sequence[int]
) -> tuple[SegmentTable, IntArray]:
    """Return the segment table of nodes laid out in `order`, and each node's segment index."""
    place = np.empty(len(order), dtype=np.int64)
    place[np.asarray(order, dtype=np.int64)] = np.arange(len(order))
    above = [parent[i] for i in order]
    parents = [-1 if p == -1 else int(place[p]) for p in above]
    return SegmentTable.from_parents(parents, [length[i] for i in order]), place
