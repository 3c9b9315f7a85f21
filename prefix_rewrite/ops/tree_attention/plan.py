"""Plan tree attention: a forest's visible (query, key) pairs as few dense blocks.

Shapes: S segments, T tokens, B blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefix_rewrite.plan import register_field
from prefix_rewrite.segments import IntArray, SegmentTable

BLOCKS = register_field("attention_blocks", "host")
SUBTREE_END = register_field("attention_subtree_end", "device")

CAUSAL, FULL, ANCESTOR = 0, 1, 2
TILE_SIZES = (0, 16, 32, 64, 128, 256)

# Costs in (query, key) pairs, forward and backward, as fitted to the CPU kernel at N * D of 512.
CALL_PAIRS = 1200
MASKED_CALL_PAIRS = 600  # more, for an ANCESTOR block
ROW_PAIRS = 40  # for each query and for each key of a block: copies, sums, thin products
KEY_STEP = 512  # a causal square is computed in whole steps of as many keys


class Block(NamedTuple):
    """One dense block of the attention: queries [q0, q1) against keys [k0, k1).

    Attributes:
        kind: CAUSAL and ANCESTOR are squares on the diagonal, FULL is a rectangle of ancestors.
        num_squares: the block is this many equal squares, side by side on the diagonal.
    """

    kind: int
    q0: int
    q1: int
    k0: int
    k1: int
    num_squares: int

    @property
    def on_diagonal(self) -> bool:
        return self.kind != FULL


def plan_attention(segments: SegmentTable) -> dict[str, IntArray]:
    """Cover every visible pair once by blocks, with the cheapest tile size.

    A run of first children is contiguous, so it takes one causal square, and each of its branching
    points one rectangle: the later children's subtrees against the run so far. With the heaviest
    child first this is a heavy-path decomposition (Sleator and Tarjan 1983): the ancestors of a
    token are at most log2(T) + 1 intervals. Subtrees of at most a tile's tokens are one
    ancestor-masked square each, or one for several siblings.

    Returns:
        `attention_blocks` [B, 6], the fields of `Block`, diagonal blocks first: they hold every
        token exactly once. `attention_subtree_end` [T].
    """
    schedules = [schedule(segments, tile) for tile in TILE_SIZES]
    return {
        BLOCKS: min(schedules, key=schedule_cost),
        SUBTREE_END: segments.token_subtree_end,
    }


def schedule_cost(blocks_B6: IntArray) -> float:
    """Return the cost of a schedule in pairs: what the kernel computes, not what is visible."""
    kind, q0, q1, k0, k1, num_squares = blocks_B6.T
    num_queries, num_keys = q1 - q0, (k1 - k0) // num_squares
    causal_keys = (num_keys + np.minimum(num_keys, KEY_STEP)) / 2
    area = num_queries * np.where(kind == CAUSAL, causal_keys, num_keys)
    calls = CALL_PAIRS + MASKED_CALL_PAIRS * (kind == ANCESTOR)
    return float((calls + ROW_PAIRS * (num_queries + k1 - k0) + area).sum())


def schedule(segments: SegmentTable, tile: int) -> IntArray:
    """Return the [B, 6] blocks, with subtrees of up to `tile` tokens masked, not cut up."""
    tiles, tiled = _tiles(segments, tile)
    squares = np.concatenate([tiles, _run_squares(segments, tiled)])
    squares = squares[np.argsort(squares[:, 1], kind="stable")]
    return np.concatenate([_batch_equal(squares), _rectangles(segments, tiled)])


def _tiles(segments: SegmentTable, tile: int) -> tuple[IntArray, NDArray[np.bool_]]:
    """Return the (kind, first, end) squares of the small subtrees, and [S] what is in them.

    The tail of a run stays in its run where nothing branches off it: it is causal there.
    """
    start, subtree_end = segments.start, segments.subtree_end
    is_head = segments.run_head == np.arange(segments.num_segments)
    next_head = np.append(start[is_head][1:], segments.num_tokens)
    is_chain = subtree_end == next_head[np.cumsum(is_head) - 1]
    small = (subtree_end - start <= tile) & (is_head | ~is_chain)
    # Subtrees are nested or disjoint: in a small one is what the furthest so far reaches past.
    reach = np.maximum.accumulate(np.where(small, subtree_end, 0))
    roots = small & (start >= np.append(0, reach[:-1]))
    return _pack_siblings(segments, np.flatnonzero(roots), is_chain), start < reach


def _pack_siblings(
    segments: SegmentTable, roots: IntArray, is_chain: NDArray[np.bool_]
) -> IntArray:
    """Give each root's subtree a (kind, first, end) square, siblings one where that is cheaper."""
    squares: list[tuple[int, int, int]] = []
    packed_parent = -2
    fields = (segments.parent, segments.start, segments.subtree_end, is_chain)
    for parent, a, b, chain in zip(*(field[roots].tolist() for field in fields), strict=True):
        first, end = squares[-1][1:] if parent == packed_parent else (a, -1)
        if end == a and 2 * (a - first) * (b - a) < CALL_PAIRS:
            squares[-1] = (ANCESTOR, first, b)
        else:
            squares.append((CAUSAL if chain else ANCESTOR, a, b))
        packed_parent = parent
    return np.array(squares, dtype=np.int64).reshape(-1, 3)


def _run_squares(segments: SegmentTable, tiled: NDArray[np.bool_]) -> IntArray:
    """Return the (kind, first, end) square of each run, as far as it is not `tiled`."""
    head, untiled = segments.run_head, np.flatnonzero(~tiled)
    last = untiled[np.append(np.diff(head[untiled]) != 0, True)[: len(untiled)]]
    first, end = segments.start[head[last]], segments.start[last] + segments.length[last]
    return np.stack([np.full_like(last, CAUSAL), first, end], 1)


def _batch_equal(squares: IntArray) -> IntArray:
    """Turn sorted (kind, first, end) squares into [B, 6] blocks, equal causal ones in one."""
    kind, a, b = squares.T
    joins = np.zeros(len(squares), dtype=bool)
    equal = (a[1:] == b[:-1]) & (b[1:] - a[1:] == b[:-1] - a[:-1])
    joins[1:] = equal & (kind[1:] == CAUSAL) & (kind[:-1] == CAUSAL)
    first = np.flatnonzero(~joins)
    num_squares = np.diff(np.append(first, len(squares)))
    a, b = a[first], b[first + num_squares - 1]
    return np.stack([kind[first], a, b, a, b, num_squares], 1)


def _rectangles(segments: SegmentTable, tiled: NDArray[np.bool_]) -> IntArray:
    """Return the [B, 6] rectangles of the segments where subtrees leave their run."""
    start, end, subtree_end = (
        segments.start,
        segments.start + segments.length,
        segments.subtree_end,
    )
    first_child = np.flatnonzero(segments.parent[1:] == np.arange(len(start) - 1)) + 1
    first_child = first_child[~tiled[first_child - 1]]
    parent = first_child - 1
    q0 = np.where(tiled[first_child], end[parent], subtree_end[first_child])
    leaves = q0 < subtree_end[parent]
    parent, q0 = parent[leaves], q0[leaves]
    k0 = start[segments.run_head[parent]]
    full, one = np.full_like(parent, FULL), np.ones_like(parent)
    return np.stack([full, q0, subtree_end[parent], k0, end[parent], one], 1)
