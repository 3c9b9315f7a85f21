"""The prefix forest: captured calls, or a user's own graph, with each shared prefix once.

Shapes: C calls, N tokens of one call, S segments, T physical tokens, E sampled edges.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
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
        call_ids: [C] the calls' positions in the forest that this is a fragment of; else 0..C-1.
        edge_ids: [E] the edges' positions there; else 0..E-1.
        of_graph: whether it was made of a graph.
    """

    segments: SegmentTable
    token_ids: IntArray
    nodes: tuple[Hashable, ...]
    edges: EdgeTable
    call_segment: IntArray
    call_length: IntArray
    call_ids: IntArray
    edge_ids: IntArray
    of_graph: bool = False

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
        spans = list(zip(tree.example, tree.begin, tree.end, strict=True))
        rank = [NO_CALL] * len(spans)
        for i, node in enumerate(tree.call_node):
            rank[node] = min(rank[node], i)
        return assemble_forest(
            parent=tree.parent,
            runs=[calls[call].token_ids[begin:end] for call, begin, end in spans],
            rank=rank,
            names=None,
            call_node=np.asarray(tree.call_node, dtype=np.int64),
            call_length=np.asarray([call.num_tokens for call in calls], dtype=np.int64),
            sampled_depth=_concatenate([np.flatnonzero(call.sampled) for call in calls]),
            num_sampled=np.asarray([call.num_sampled for call in calls], dtype=np.int64),
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
        length = np.asarray([len(ids) for ids in given.token_ids], dtype=np.int64)
        begin = np.zeros(len(length), dtype=np.int64)
        for i in given.order:
            if given.parent[i] != -1:
                begin[i] = begin[given.parent[i]] + length[given.parent[i]]
        at = [np.flatnonzero(mask) for mask in given.sampled]
        num_sampled = np.asarray([len(positions) for positions in at], dtype=np.int64)
        return assemble_forest(
            parent=given.parent,
            runs=given.token_ids,
            rank=range(len(length)),
            names=given.names,
            call_node=np.arange(len(length)),
            call_length=begin + length,
            sampled_depth=np.repeat(begin, num_sampled) + _concatenate(at),
            num_sampled=num_sampled,
            of_graph=True,
        )

    def split(
        self, max_tokens: int, *, max_attended_pairs: int | None = None
    ) -> list[PrefixForest]:
        """Plan fragments within a budget, with little repeated and each edge owned once.

        A fragment's `call_ids` and `edge_ids` are positions in this forest, and
        `fragments.caller_order` puts the results of all fragments back into the caller's order.
        Groups with a common prefix stay together where they fit.

        Args:
            max_tokens: physical tokens that a fragment may have.
            max_attended_pairs: (query, key) pairs of causal attention that it may have.

        Raises:
            ForestError: a single path is over the budget; the message says by how much.
        """
        from prefix_rewrite.fragments import split_forest

        return split_forest(self, max_tokens, max_attended_pairs=max_attended_pairs)

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

    @property
    def token_calls(self) -> IntArray:
        """[T] calls that contain each physical token; of a graph, paths to its leaves.

        What a statistic over tokens must weigh each token by to be that of the calls as rows.
        """
        return self.segments.token_calls

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


def assemble_forest(
    *,
    parent: Sequence[int],
    runs: Sequence[IntArray],
    rank: Sequence[int],
    names: Sequence[Hashable] | None,
    call_node: IntArray,
    call_length: IntArray,
    sampled_depth: IntArray,
    num_sampled: IntArray,
    call_ids: IntArray | None = None,
    edge_ids: IntArray | None = None,
    of_graph: bool = False,
) -> PrefixForest:
    """Lay out nodes given in any order, and find the sampled edges of the calls.

    Args:
        parent: [S] parent of each node, -1 for a root.
        runs: [S] token ids of each node.
        rank: [S] first use by the caller, which decides between children of equal weight.
        names: [S] node names; None names them by their segment index.
        call_node: [C] a node at or below the one that holds the call's last token.
        call_length: [C] tokens of each call.
        sampled_depth: [E] depth of each sampled token, call by call.
        num_sampled: [C] sampled tokens of each call.
        call_ids: [C] the calls' positions in the forest that is split; None if it is whole.
        edge_ids: [E] the same of the edges.
        of_graph: whether the nodes are a user's own.
    """
    length = [len(ids) for ids in runs]
    order = heavy_first_order(parent, length, rank)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    parents = [-1 if parent[i] == -1 else int(place[parent[i]]) for i in order]
    table = SegmentTable.from_parents(parents, [length[i] for i in order])
    token_ids = _concatenate([runs[i] for i in order])
    call_segment = place[call_node]
    call = np.repeat(np.arange(len(num_sampled)), num_sampled)
    token = table.locate(call_segment[call], sampled_depth)
    call_ends = table.locate(call_segment.copy(), call_length - 1)
    leaves = table.subtree_end[table.subtree_end == table.start + table.length]
    return PrefixForest(
        segments=replace(table, call_ends=leaves - 1 if of_graph else call_ends),
        token_ids=token_ids,
        nodes=tuple(range(len(order)) if names is None else [names[i] for i in order]),
        edges=EdgeTable(
            source=table.parent_token[token],
            target=token_ids[token],
            call=call,
            token=token,
            call_offsets=np.concatenate([[0], np.cumsum(num_sampled)]),
        ),
        call_segment=table.segment_of(call_ends),
        call_length=call_length,
        call_ids=np.arange(len(call_length)) if call_ids is None else call_ids,
        edge_ids=np.arange(len(token)) if edge_ids is None else edge_ids,
        of_graph=of_graph,
    )


def _concatenate(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])
