"""The segment table: a prefix forest as flat arrays in depth-first order.

Shapes: S segments, T physical tokens. All arrays are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prefix_rewrite.errors import ForestError

IntArray = NDArray[np.int64]


# A compiler specialises on lengths of 0 and 1, so filler keeps every length at this or more.
MIN_LENGTH = 2


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """Segments in depth-first preorder; the tokens of a subtree are one contiguous interval.

    Token s is visible to token t iff `s <= t < token_subtree_end[s]`.

    Attributes:
        parent: [S] index of the parent segment, -1 for a root; always `parent[i] < i`.
        start: [S] first physical token of the segment.
        length: [S] tokens of the segment, at least 1.
        depth: [S] distance of the segment's first token from its root, in tokens.
        subtree_end: [S] one past the last physical token of the segment's subtree.
        call_ends: [C] last token of each call, where the table is that of a forest.
    """

    parent: IntArray
    start: IntArray
    length: IntArray
    depth: IntArray
    subtree_end: IntArray
    call_ends: IntArray | None = None

    @classmethod
    def from_parents(cls, parent: Sequence[int], length: Sequence[int]) -> SegmentTable:
        """Derive the table from parents and lengths given in depth-first preorder.

        Raises:
            ForestError: a segment has no token, or the order is not depth-first preorder.
        """
        count = len(parent)
        lengths = np.asarray(length, dtype=np.int64).reshape(count)
        if count and lengths.min() < 1:
            raise ForestError(f"segment {int(lengths.argmin())} has no token; drop it")
        ends = np.cumsum(lengths)
        starts = ends - lengths
        depth, subtree_end = [0] * count, ends.tolist()
        path: list[int] = []
        size = lengths.tolist()
        for i, p in enumerate(parent):
            while path and path[-1] != p:
                path.pop()
            if p != -1 and not path:
                raise ForestError(f"segment {i} with parent {p} is not in depth-first preorder")
            depth[i] = depth[p] + size[p] if p != -1 else 0
            path.append(i)
        for i in range(count - 1, -1, -1):
            if parent[i] != -1 and subtree_end[i] > subtree_end[parent[i]]:
                subtree_end[parent[i]] = subtree_end[i]
        return cls(
            parent=np.asarray(parent, dtype=np.int64).reshape(count),
            start=starts,
            length=lengths,
            depth=np.asarray(depth, dtype=np.int64).reshape(count),
            subtree_end=np.asarray(subtree_end, dtype=np.int64).reshape(count),
        )

    @property
    def num_segments(self) -> int:
        return len(self.parent)

    @property
    def num_tokens(self) -> int:
        """Physical tokens T."""
        return int(self.length.sum())

    @cached_property
    def token_subtree_end(self) -> IntArray:
        """[T] one past the last physical token that sees the token."""
        return np.repeat(self.subtree_end, self.length)

    @cached_property
    def position_ids(self) -> IntArray:
        """[T] depth of each token: its position on its own path."""
        return np.arange(self.num_tokens) - np.repeat(self.start - self.depth, self.length)

    @cached_property
    def parent_token(self) -> IntArray:
        """[T] the token before each token on its path, -1 for a first token."""
        parent = np.arange(-1, self.num_tokens - 1)
        last_token = self.start + self.length - 1
        parent[self.start] = np.where(self.parent >= 0, last_token[self.parent], -1)
        return parent

    @cached_property
    def token_calls(self) -> IntArray:
        """[T] calls that contain each token."""
        assert self.call_ends is not None, "only a forest's table knows its calls"
        ends = np.bincount(self.call_ends, minlength=self.num_tokens)
        up_to = np.append(0, np.cumsum(ends))
        return up_to[self.token_subtree_end] - up_to[: self.num_tokens]

    @cached_property
    def run_head(self) -> IntArray:
        """[S] the highest ancestor from which the path down to the segment is contiguous.

        With the heaviest child first, a root path crosses at most log2(T) + 1 such runs.
        """
        head = list(range(self.num_segments))
        parent = self.parent.tolist()
        for i in range(1, len(parent)):
            if parent[i] == i - 1:  # a first child's tokens directly follow its parent's
                head[i] = head[i - 1]
        return np.asarray(head, dtype=np.int64)

    def locate(self, segment: IntArray, depth: IntArray) -> IntArray:
        """Return [K] the tokens at the depths [K] on the root paths of the segments [K]."""
        head = self.run_head[segment]
        above = np.flatnonzero(depth < self.depth[head])
        while above.size:
            head[above] = self.run_head[self.parent[head[above]]]
            above = above[depth[above] < self.depth[head[above]]]
        return self.start[head] + depth - self.depth[head]

    def segment_of(self, token: IntArray) -> IntArray:
        """Return [K] the segments that hold the tokens [K]."""
        return np.searchsorted(self.start, token, side="right") - 1

    @property
    def num_attended_pairs(self) -> int:
        """(query, key) pairs that causal attention on the forest must compute."""
        return int((self.position_ids + 1).sum())


def with_filler(segments: SegmentTable) -> SegmentTable:
    """Append one-token roots until there are `MIN_LENGTH` tokens."""
    missing = max(0, MIN_LENGTH - segments.num_tokens)
    if not missing:
        return segments
    parent = [*segments.parent.tolist(), *[-1] * missing]
    filled = SegmentTable.from_parents(parent, [*segments.length.tolist(), *[1] * missing])
    return replace(filled, call_ends=segments.call_ends)
