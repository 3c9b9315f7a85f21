"""Plan tree attention: a forest's visible (query, key) pairs as few dense blocks.

Shapes: S segments, T tokens, B blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefix_rewrite.ops.tree_attention.blocks import (
    ANCESTOR,
    CALL_PAIRS,
    CAUSAL,
    FULL,
    blocks_array,
    schedule_cost,
)
from prefix_rewrite.ops.tree_attention.merge import merge_rectangles
from prefix_rewrite.ops.tree_attention.window import best_span, cut_to_window
from prefix_rewrite.plan import register_field
from prefix_rewrite.segments import IntArray, SegmentTable

SUBTREE_END = register_field("attention_subtree_end", "device")
DEPTH = register_field("attention_depth", "device")

TILE_SIZES = (0, 16, 32, 64, 128, 256)


def blocks_field(window: int) -> str:
    """Name the plan field that holds the blocks of attention with such a window, 0 for none."""
    return register_field(f"attention_blocks_{window}" if window else "attention_blocks", "host")


BLOCKS = blocks_field(0)


def plan_attention(segments: SegmentTable, window: int = 0) -> dict[str, IntArray]:
    """Cover every visible pair once by blocks, with the cheapest tile size.

    A run of first children is contiguous, so it takes one causal square, and each of its branching
    points one rectangle: the later children's subtrees against the run so far; neighbours join
    where they share keys. With the heaviest child first this is a heavy-path decomposition
    (Sleator and Tarjan 1983): the ancestors of a token are at most log2(T) + 1 intervals. Subtrees
    of at most a tile's tokens are one ancestor-masked square each, or one for several siblings.

    Args:
        segments: the forest.
        window: tokens that a token sees, itself included; 0 for all its ancestors.

    Returns:
        `attention_blocks` [B, 7], the fields of `Block`, diagonal blocks first: they hold every
        token exactly once. `attention_subtree_end` [T], `attention_depth` [T].
    """
    blocks = min((schedule(segments, tile) for tile in TILE_SIZES), key=schedule_cost)
    if window:
        blocks = cut_to_window(blocks, segments.position_ids, window, best_span(window))
    return {
        blocks_field(window): blocks,
        SUBTREE_END: segments.token_subtree_end,
        DEPTH: segments.position_ids,
    }


def schedule(segments: SegmentTable, tile: int) -> IntArray:
    """Return the [B, 7] blocks, with subtrees of up to `tile` tokens masked, not cut up."""
    tiles, tiled = _tiles(segments, tile)
    squares = np.concatenate([tiles, _run_squares(segments, tiled)])
    squares = squares[np.argsort(squares[:, 1], kind="stable")]
    rectangles = merge_rectangles(_rectangles(segments, tiled))
    return np.concatenate([_batch_equal(squares), rectangles])


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
    """Turn sorted (kind, first, end) squares into [B, 7] blocks, equal causal ones in one."""
    kind, a, b = squares.T
    joins = np.zeros(len(squares), dtype=bool)
    equal = (a[1:] == b[:-1]) & (b[1:] - a[1:] == b[:-1] - a[:-1])
    joins[1:] = equal & (kind[1:] == CAUSAL) & (kind[:-1] == CAUSAL)
    first = np.flatnonzero(~joins)
    num_squares = np.diff(np.append(first, len(squares)))
    a, b = a[first], b[first + num_squares - 1]
    return blocks_array(kind[first], a, b, a, b, num_squares)


def _rectangles(segments: SegmentTable, tiled: NDArray[np.bool_]) -> IntArray:
    """Return the [B, 7] rectangles of the segments where subtrees leave their run."""
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
    return blocks_array(FULL, q0, subtree_end[parent], k0, end[parent])
