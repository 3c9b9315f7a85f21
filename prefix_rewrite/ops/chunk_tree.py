"""The chunk tree: recurrent mixers cut a forest in chunks and carry states from parent to child.

A chunk is at most `chunk_size` consecutive tokens: a stretch of one chain-merged segment, or a
tile of whole small sibling subtrees. Work inside chunks is batched over all chunks; only states
are carried from chunk to chunk, level by level. A tile never has children, so it needs no state.

Shapes: T physical tokens, K chunks, I inner chunks (those with children: each has one state row),
n chunks of a block, Q their padded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from prefix_rewrite.ops.chunk_cut import cut_chunks
from prefix_rewrite.plan import PlanView, register_field
from prefix_rewrite.segments import IntArray, SegmentTable

Compose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def compose_elementwise(out: torch.Tensor, maps: torch.Tensor, states: torch.Tensor) -> None:
    """Add `maps * states` to `out` in place: scalar or diagonal decay (broadcast)."""
    out.addcmul_(maps, states)


@dataclass(frozen=True)
class ChunkBlock:
    """A batch of chunks of one padded size, as index tensors on the model's device.

    Attributes:
        tokens: [n, Q] token of each place; padding repeats the chunk's last token.
        valid: [n, Q] whether the place holds a token of its own.
        visible: [n, Q, Q] whether the key (last dimension) is the query or its ancestor.
        last: [n] place of the chunk's last token.
        parents: [n] state row of the parent chunk, None for a block of roots.
        states: the block's own state rows, None for a block without children.
        ragged: whether any place may be padding.
    """

    tokens: torch.Tensor
    valid: torch.Tensor
    visible: torch.Tensor
    last: torch.Tensor
    parents: torch.Tensor | None
    states: slice | None
    ragged: bool


@dataclass(frozen=True)
class ChunkTree:
    """The chunk tree of one forest, read from a packed plan.

    Attributes:
        chunk_size: most tokens of a chunk.
        groups: [(first chunk, end chunk, Q, has parents, first state row or -1, ragged)].
        steps: [(first state row, end row, first parent row or -1)] in order of level; the parents
            of a step with -1 are not consecutive rows and are looked up.
        num_states: I.
        start, length: [K] chunk bounds; parent: [K] state row of the parent, 0 for roots.
        state_parent: [I] the same, per state row.
        token_end: [T] subtree end of each token.
    """

    chunk_size: int
    groups: list[list[int]]
    steps: list[list[int]]
    num_states: int
    start: torch.Tensor
    length: torch.Tensor
    parent: torch.Tensor
    state_parent: torch.Tensor
    token_end: torch.Tensor

    def blocks(self, max_places: int) -> Iterator[ChunkBlock]:
        """Yield all chunks in blocks of at most `max_places` padded tokens (at least a chunk)."""
        for first, end, size, has_parents, state, ragged in self.groups:
            step = max(1, max_places // size)
            for lo in range(first, end, step):
                hi = min(lo + step, end)
                row = state + lo - first
                yield self._block(
                    slice(lo, hi),
                    size,
                    self.parent[lo:hi] if has_parents else None,
                    slice(row, row + hi - lo) if state >= 0 else None,
                    bool(ragged),
                )

    def _block(
        self,
        chunks: slice,
        size: int,
        parents: torch.Tensor | None,
        states: slice | None,
        ragged: bool,
    ) -> ChunkBlock:
        start, last = self.start[chunks, None], self.length[chunks, None] - 1
        place = torch.arange(size, device=start.device)
        tokens = start + torch.minimum(place, last)
        end = self.token_end[tokens] - start
        visible = (place[:, None] >= place) & (place[:, None] < end[:, None, :])
        return ChunkBlock(tokens, place <= last, visible, last.squeeze(1), parents, states, ragged)


def carry_down(
    states: torch.Tensor,
    maps: torch.Tensor,
    tree: ChunkTree,
    compose: Compose = compose_elementwise,
) -> None:
    """Turn each inner chunk's own contribution into its end state, in place.

    `end[c] = own[c] + maps[c] . end[parent[c]]`, roots first.

    Args:
        states: [I, ...] own contributions; end states on return.
        maps: [I, ...] what a chunk does to the state that enters it.
        compose: `compose(out, maps, states)` adds `maps . states` to `out` in place.
    """
    for lo, hi, parent in tree.steps:
        if parent >= 0:
            entering = states[parent : parent + hi - lo]
        else:
            entering = states.index_select(0, tree.state_parent[lo:hi])
        compose(states[lo:hi], maps[lo:hi], entering)


def carry_up(
    grads: torch.Tensor,
    maps: torch.Tensor,
    tree: ChunkTree,
    compose: Compose = compose_elementwise,
) -> None:
    """Adjoint of `carry_down`: gather each chunk's gradient from its descendants, in place.

    Args:
        grads: [I, ...] gradient of each end state by its direct readers; in total on return,
            which is also the gradient of the chunk's own contribution.
        maps: [I, ...] as given to `carry_down`, transposed where they are matrices.
    """
    for lo, hi, parent in reversed(tree.steps):
        if parent >= 0:
            compose(grads[parent : parent + hi - lo], maps[lo:hi], grads[lo:hi])
        else:
            carried = torch.zeros_like(grads[lo:hi])
            compose(carried, maps[lo:hi], grads[lo:hi])
            grads.index_add_(0, tree.state_parent[lo:hi], carried)


class ChunkPlanner:
    """Plans the chunk tree of a forest for one op, and reads it back.

    Args:
        op: prefix of the plan's field names.
        chunk_size: most tokens of a chunk.
        granule: chunks are padded to a multiple of it, and batched with those of equal size.
        collapse: whether small sibling subtrees share a chunk.
    """

    def __init__(self, op: str, chunk_size: int = 64, granule: int = 16, collapse: bool = True):
        self.chunk_size, self.granule, self.collapse = chunk_size, granule, collapse
        self._groups = register_field(f"{op}_groups", "host")
        self._steps = register_field(f"{op}_steps", "host")
        self._chunks = register_field(f"{op}_chunks", "device")
        self._state_parent = register_field(f"{op}_state_parent", "device")
        self._token_end = register_field(f"{op}_token_end", "device")

    def plan(self, segments: SegmentTable) -> Mapping[str, IntArray]:
        """Return the plan's fields for a forest."""
        chunks = cut_chunks(segments, self.chunk_size, self.collapse)
        padded = -(-chunks.length // self.granule) * self.granule
        inner = np.zeros(len(padded), dtype=bool)
        inner[chunks.parent[chunks.parent >= 0]] = True
        child = chunks.parent >= 0
        order = np.lexsort((chunks.start, chunks.level, ~inner, child, padded))
        row = np.cumsum(inner[order]) - 1  # state row of each chunk, where it has one
        row_of = np.empty_like(row)
        row_of[order] = row
        parent = np.where(child, row_of[chunks.parent], 0)[order]
        padded, inner, child = padded[order], inner[order], child[order]
        length = chunks.length[order]
        return {
            self._groups: _groups(padded, child, inner, row, length),
            self._steps: _steps(chunks.level[order][inner], parent[inner]),
            self._chunks: np.stack([chunks.start[order], length, parent]),
            self._state_parent: parent[inner],
            self._token_end: segments.token_subtree_end,
        }

    def read(self, host_plan: torch.Tensor, device_plan: torch.Tensor) -> ChunkTree:
        """Read the chunk tree back out of a packed plan.

        Raises:
            LayoutError: the plan was packed without this planner's fields.
        """
        view = PlanView(host_plan, device_plan)
        start, length, parent = view[self._chunks]
        state_parent = view[self._state_parent]
        return ChunkTree(
            chunk_size=self.chunk_size,
            groups=view[self._groups].tolist(),
            steps=view[self._steps].tolist(),
            num_states=len(state_parent),
            start=start,
            length=length,
            parent=parent,
            state_parent=state_parent,
            token_end=view[self._token_end],
        )


def _groups(
    padded: IntArray, child: np.ndarray, inner: np.ndarray, row: IntArray, length: IntArray
) -> IntArray:
    """Rows (first chunk, end chunk, Q, has parents, first state row or -1, ragged)."""
    change = np.flatnonzero((np.diff(padded) != 0) | (np.diff(child) != 0) | (np.diff(inner) != 0))
    first = np.append(0, change + 1)[: len(padded)]
    end = np.append(first[1:], len(padded))[: len(first)]
    ragged = np.add.reduceat(padded - length, first) > 0 if len(first) else first
    state = np.where(inner[first], row[first], -1)
    return np.stack([first, end, padded[first], child[first], state, ragged], 1).astype(np.int64)


def _steps(level: IntArray, parent: IntArray) -> IntArray:
    """Rows (first state row, end row, first parent row or -1), by level, without the roots."""
    rows = np.lexsort((np.arange(len(level)), level))
    rows = rows[level[rows] > 0]
    new = (np.diff(level[rows]) != 0) | (np.diff(rows) != 1)
    first = np.append(0, np.flatnonzero(new) + 1)[: len(rows)]
    end = np.append(first[1:], len(rows))[: len(first)]
    lo = rows[first]
    jumps = np.append(0, np.cumsum(np.diff(parent[rows]) != 1))
    consecutive = jumps[end - 1] == jumps[first] if len(first) else first
    return np.stack([lo, lo + end - first, np.where(consecutive, parent[lo], -1)], 1)
