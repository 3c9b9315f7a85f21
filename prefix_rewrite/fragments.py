"""Split a forest into fragments that fit a budget; every sampled edge keeps exactly one owner.

Ancestors are repeated where several fragments need them. A call belongs to the first fragment
that holds its last token, and so do its edges.

Shapes: C calls, E sampled edges, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from prefix_rewrite.errors import ForestError
from prefix_rewrite.forest import PrefixForest, assemble_forest
from prefix_rewrite.packing import UNLIMITED, least_tokens, pack_leaves, size
from prefix_rewrite.segments import IntArray

T = TypeVar("T")


@dataclass(frozen=True)
class SplitStats:
    """What splitting cost.

    Attributes:
        num_fragments: fragments.
        num_tokens: physical tokens of all fragments.
        num_repeated: those that the forest before splitting did not have.
        num_edges: owned edges of all fragments, equal to the forest's.
        largest: physical tokens of the largest fragment.
    """

    num_fragments: int
    num_tokens: int
    num_repeated: int
    num_edges: int
    largest: int

    @property
    def repeated(self) -> float:
        """Repeated tokens as a fraction of the forest's tokens."""
        whole = self.num_tokens - self.num_repeated
        return self.num_repeated / whole if whole else 0.0


def split_forest(
    forest: PrefixForest, max_tokens: int, *, max_attended_pairs: int | None = None
) -> list[PrefixForest]:
    """Plan fragments within a budget; see `PrefixForest.split`."""
    pairs = UNLIMITED if max_attended_pairs is None else max_attended_pairs
    budget = np.asarray([max_tokens, pairs], dtype=np.int64)
    _check_paths(forest, budget)
    if not forest.num_tokens:
        return []
    packing = pack_leaves(forest.segments, budget)
    members = _fragment_segments(forest, packing.leaves)
    owner = np.full(forest.segments.num_segments, -1, dtype=np.int64)
    for f in range(len(members) - 1, -1, -1):
        owner[members[f]] = f
    call_owner = owner[forest.call_segment]
    by_owner = np.argsort(call_owner, kind="stable")
    bounds = np.searchsorted(call_owner[by_owner], np.arange(len(members) + 1))
    num_sampled = np.diff(forest.edges.call_offsets)
    fragments = [
        _cut_out(forest, members[f], by_owner[bounds[f] : bounds[f + 1]], num_sampled)
        for f in range(len(members))
    ]
    assert sum(f.num_tokens for f in fragments) == packing.num_tokens, "a plan must cost its price"
    check_owners(forest, fragments)
    return fragments


def check_owners(forest: PrefixForest, fragments: Sequence[PrefixForest]) -> None:
    """Check that the fragments own each edge of the forest exactly once.

    Raises:
        ForestError: an edge has no owner or several; the message counts them.
    """
    owned = np.concatenate([np.empty(0, dtype=np.int64), *(f.edge_ids for f in fragments)])
    owners = np.bincount(owned, minlength=forest.num_edges)
    missing, repeated = int((owners == 0).sum()), int((owners > 1).sum())
    if missing or repeated or len(owners) > forest.num_edges:
        raise ForestError(
            f"every sampled edge must have one owner, got {missing} without and {repeated} with "
            f"several of {forest.num_edges}; give all fragments of one split, each once"
        )


def caller_order(fragments: Sequence[PrefixForest]) -> IntArray:
    """Return [E] where each edge of the split forest is in the fragments' results.

    `torch.cat(logprobs_of_each_fragment)[caller_order(fragments)]` is in the caller's order, as
    if the forest had not been split.
    """
    return np.argsort(np.concatenate([np.empty(0, np.int64), *(f.edge_ids for f in fragments)]))


def gather_calls(fragments: Sequence[PrefixForest], results: Sequence[Sequence[T]]) -> list[T]:
    """Return one result a call, in the caller's order.

    Args:
        fragments: all fragments of one split.
        results: what each fragment gave for its own calls, such as its `out.per_call()`.
    """
    by_call = {
        call: result
        for fragment, own in zip(fragments, results, strict=True)
        for call, result in zip(fragment.call_ids.tolist(), own, strict=True)
    }
    return [by_call[call] for call in range(len(by_call))]


def split_stats(forest: PrefixForest, fragments: Sequence[PrefixForest]) -> SplitStats:
    """Count what splitting cost.

    Raises:
        ForestError: the fragments do not own each edge of the forest once.
    """
    check_owners(forest, fragments)
    tokens = [f.num_tokens for f in fragments]
    return SplitStats(
        num_fragments=len(fragments),
        num_tokens=sum(tokens),
        num_repeated=sum(tokens) - forest.num_tokens,
        num_edges=sum(f.num_edges for f in fragments),
        largest=max(tokens, default=0),
    )


def least_repeated(forest: PrefixForest, max_tokens: int) -> int:
    """Return a number of repeated tokens that no plan within the budget can beat."""
    return least_tokens(forest.segments, max_tokens) - forest.num_tokens


def _check_paths(forest: PrefixForest, budget: IntArray) -> None:
    table = forest.segments
    paths = size(table.depth + table.length)
    for axis, (name, unit) in enumerate(
        [("max_tokens", "tokens"), ("max_attended_pairs", "attended pairs")]
    ):
        if (paths[:, axis] > budget[axis]).any():
            worst = int(paths[:, axis].argmax())
            got, limit = int(paths[worst, axis]), int(budget[axis])
            call = int(np.flatnonzero(forest.call_segment == worst)[0])  # a leaf ends a call
            raise ForestError(
                f"{name} must hold the longest path, got {name}={limit}, but call {call} "
                f"(node {forest.nodes[worst]!r}) has {got} {unit}, {got - limit} more; "
                f"raise {name} to {got} or shorten that call"
            )


def _fragment_segments(forest: PrefixForest, leaves: list[list[int]]) -> list[IntArray]:
    """Return each fragment's segments, in depth-first order."""
    parent = forest.segments.parent.tolist()
    last_seen = [-1] * len(parent)
    members = []
    for f, fragment in enumerate(sorted(leaves, key=min)):
        found = []
        for leaf in fragment:
            segment = leaf
            while segment != -1 and last_seen[segment] != f:
                last_seen[segment] = f
                found.append(segment)
                segment = parent[segment]
        members.append(np.sort(np.asarray(found, dtype=np.int64)))
    return members


def _cut_out(
    forest: PrefixForest, segments: IntArray, calls: IntArray, num_sampled: IntArray
) -> PrefixForest:
    """Return the fragment of these segments [S], ancestor-closed, that owns these calls [C]."""
    table, edges = forest.segments, forest.edges
    counts = num_sampled[calls]
    first = edges.call_offsets[calls]
    offsets = np.cumsum(counts) - counts
    edge_ids = np.repeat(first - offsets, counts) + np.arange(counts.sum())
    above = np.searchsorted(segments, table.parent[segments])
    parent = np.where(table.parent[segments] == -1, -1, above)
    starts = table.start[segments]
    stops = starts + table.length[segments]
    return assemble_forest(
        parent=parent.tolist(),
        runs=[forest.token_ids[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)],
        rank=range(len(segments)),
        names=[forest.nodes[i] for i in segments.tolist()],
        call_node=np.searchsorted(segments, forest.call_segment[calls]),
        call_length=forest.call_length[calls],
        sampled_depth=table.position_ids[edges.token[edge_ids]],
        num_sampled=counts,
        call_ids=calls,
        edge_ids=edge_ids,
        of_graph=forest.of_graph,
    )
