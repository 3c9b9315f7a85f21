"""What one rank owns of a forest, and what it needs of the other ranks' tokens. Pure numpy.

A rank stores its tokens in depth-first order. They form a forest of their own, in which a token's
parent is its nearest ancestor that the rank owns: visibility among them is the whole forest's.
Rows of other ranks' tokens are fetched by lists that every rank derives alone, for all ranks.

Shapes: T physical tokens, R ranks, n tokens of this rank, L its rows (n and filler), F rows
fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prefix_rewrite.distributed.partition import Partition
from prefix_rewrite.segments import MIN_LENGTH, IntArray, SegmentTable, with_filler

BoolArray = NDArray[np.bool_]

REACH = 3  # a causal conv of 4 taps reads as many tokens above its own


@dataclass(frozen=True)
class Fetch:
    """Rows that go from rank to rank.

    Attributes:
        tokens: tokens whose rows this rank gets, ascending.
        place: [F] where each of them is in the buffer received, which is sorted by owner; then
            filler, one past its end.
        send_rows: [K] rows of this rank to send, sorted by receiver.
        send_counts, receive_counts: [R] rows to and from each rank.
    """

    tokens: IntArray
    place: IntArray
    send_rows: IntArray
    send_counts: IntArray
    receive_counts: IntArray

    @property
    def num_rows(self) -> int:
        """F"""
        return len(self.place)


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of a partitioned forest.

    Attributes:
        segments: the whole forest.
        partition: who owns what.
        rank: this rank.
    """

    segments: SegmentTable
    partition: Partition
    rank: int

    @cached_property
    def counts(self) -> IntArray:
        """[R] tokens that each rank owns."""
        return np.bincount(self.partition.owner, minlength=self.partition.num_ranks)

    @cached_property
    def order(self) -> IntArray:
        """[T] where each token is if the ranks' tokens are stored one rank after the other."""
        return _inverse(np.argsort(self.partition.owner, kind="stable"))

    def tokens_of(self, rank: int) -> IntArray:
        """Tokens that a rank owns, ascending."""
        return np.flatnonzero(self.partition.owner == rank)

    @cached_property
    def tokens(self) -> IntArray:
        """[n] tokens that this rank owns, ascending."""
        return self.tokens_of(self.rank)

    @cached_property
    def forest(self) -> SegmentTable:
        """This rank's rows as a forest: its tokens, then filler roots; depths are not the whole
        forest's."""
        return with_filler(induced_forest(self.segments, self.tokens))

    @property
    def num_rows(self) -> int:
        """L"""
        return self.forest.num_tokens

    @cached_property
    def ancestors(self) -> Fetch:
        """The other ranks' tokens that this rank's tokens see."""
        return self._fetch(seen_by)

    @cached_property
    def near(self) -> Fetch:
        """Those of them that are at most `REACH` tokens above."""
        return self._fetch(near_above)

    def _fetch(self, wanted: Callable[[SegmentTable, IntArray], BoolArray]) -> Fetch:
        owner, num_ranks = self.partition.owner, self.partition.num_ranks
        row_of = self.order - (np.cumsum(self.counts) - self.counts)[owner]
        lists = []
        for rank in range(num_ranks):
            mask = wanted(self.segments, self.tokens_of(rank)) & (owner != rank)
            lists.append(np.flatnonzero(mask))
        sends = [tokens[owner[tokens] == self.rank] for tokens in lists]
        tokens = lists[self.rank]
        place = _inverse(np.argsort(owner[tokens], kind="stable"))
        filler = max(0, MIN_LENGTH - len(tokens))
        return Fetch(
            tokens=tokens,
            place=np.pad(place, (0, filler), constant_values=len(tokens)),
            send_rows=row_of[np.concatenate(sends)],
            send_counts=np.asarray([len(rows) for rows in sends], dtype=np.int64),
            receive_counts=np.bincount(owner[tokens], minlength=num_ranks),
        )


SharePlanner = Callable[[Share], Mapping[str, IntArray]]


def seen_by(segments: SegmentTable, tokens: IntArray) -> BoolArray:
    """Mark [T] every token that one of `tokens` (ascending) sees, itself included."""
    first, end = visible_from(segments, tokens)
    return end > first


def visible_from(segments: SegmentTable, tokens: IntArray) -> tuple[IntArray, IntArray]:
    """Return [T] bounds of the places in `tokens` (ascending) from which each token is seen."""
    first = np.searchsorted(tokens, np.arange(segments.num_tokens))
    return first, np.searchsorted(tokens, segments.token_subtree_end)


def near_above(segments: SegmentTable, tokens: IntArray) -> BoolArray:
    """Mark [T] the tokens up to `REACH` above one of `tokens` on its path."""
    mask = np.zeros(segments.num_tokens, dtype=bool)
    for _ in range(REACH):
        tokens = segments.parent_token[tokens]
        tokens = tokens[tokens >= 0]
        mask[tokens] = True
    return mask


def induced_forest(segments: SegmentTable, tokens: IntArray) -> SegmentTable:
    """Return the forest of some tokens [n], ascending: parents are nearest ancestors among them.

    Depth-first order stays depth-first order, and chains without a branch become one segment.
    """
    end = np.searchsorted(tokens, segments.token_subtree_end[tokens])
    place = np.arange(len(tokens))
    follows = np.zeros(len(tokens), dtype=bool)
    follows[1:] = (end[:-1] == end[1:]) & (end[:-1] > place[1:])
    first = np.flatnonzero(~follows)
    parent: list[int] = []
    path: list[tuple[int, int]] = []  # (segment, end of its subtree)
    for i, (a, b) in enumerate(zip(first.tolist(), end[first].tolist(), strict=True)):
        while path and path[-1][1] <= a:
            path.pop()
        parent.append(path[-1][0] if path else -1)
        path.append((i, b))
    return SegmentTable.from_parents(parent, np.diff(first, append=len(tokens)).tolist())


def _inverse(permutation: IntArray) -> IntArray:
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation))
    return inverse
