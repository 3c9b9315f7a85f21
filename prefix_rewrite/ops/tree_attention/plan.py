"""Plan tree attention: a forest's visible (query, key) pairs as few dense blocks.

Shapes: S segments, T tokens, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefix_rewrite.plan import register_field
from prefix_rewrite.segments import IntArray, SegmentTable

BLOCKS = register_field("attention_blocks", "host")
SUBTREE_END = register_field("attention_subtree_end", "device")

CAUSAL, FULL, ANCESTOR = 0, 1, 2
TILE_SIZES = (0, 32, 64, 128, 256)

# Cost of a block, in (query, key) pairs at N * D = 1024, forward and backward, one thread.
CALL_PAIRS = 700
MASKED_PAIR = 1.15


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

    Follows the first child from every segment: such a path is contiguous, so it takes one causal
    square, and each of its branching points one rectangle: all the later children's subtrees
    against the path so far. With the heaviest child first in depth-first order this is a
    heavy-path decomposition (Sleator and Tarjan 1983): a token's ancestors are at most
    log2(T) + 1 intervals. Neighbouring small subtrees share one ancestor-masked square.

    Returns:
        `attention_blocks` [B, 6], the fields of `Block`, diagonal blocks first: they hold every
        token exactly once. `attention_subtree_end` [T].
    """
    paths = _Paths.of(segments)
    schedules = [_schedule(paths, tile) for tile in TILE_SIZES]
    return {
        BLOCKS: min(schedules, key=schedule_cost),
        SUBTREE_END: segments.token_subtree_end,
    }


def schedule_cost(blocks_B6: IntArray) -> float:
    """Return the cost of a schedule, in pairs; what a kernel computes, not what is visible."""
    kind, q0, q1, k0, k1, count = blocks_B6.T
    area = (q1 - q0) * (k1 - k0) / count
    return float((CALL_PAIRS + area * np.where(kind == ANCESTOR, MASKED_PAIR, 1.0)).sum())


@dataclass(frozen=True)
class _Paths:
    """Chain-merged segments ("runs"), and the first-child paths that they form.

    Attributes:
        parent, start, end, subtree_end: [S] of each run; `end` is one past its own last token.
        head: [S] first run of the run's path.
    """

    parent: IntArray
    start: IntArray
    end: IntArray
    subtree_end: IntArray
    head: IntArray

    @classmethod
    def of(cls, segments: SegmentTable) -> _Paths:
        parent, index = segments.parent, np.arange(segments.num_segments)
        num_children = np.bincount(parent + 1, minlength=len(parent) + 1)[1:]
        only_child = (parent == index - 1) & (parent >= 0)
        only_child[1:] &= num_children[:-1] == 1
        first = np.flatnonzero(~only_child)
        run_of = np.cumsum(~only_child) - 1
        run_parent = np.where(parent[first] >= 0, run_of[parent[first]], -1)
        start = segments.start[first]
        run_index = np.arange(len(first))
        is_head = (run_parent != run_index - 1) | (run_parent < 0)
        return cls(
            parent=run_parent,
            start=start,
            end=np.append(start[1:], segments.num_tokens)[: len(first)],
            subtree_end=segments.subtree_end[first],
            head=np.flatnonzero(is_head)[np.cumsum(is_head) - 1] if len(first) else run_index,
        )


def _schedule(paths: _Paths, tile: int) -> IntArray:
    """Return the [B, 6] blocks, neighbouring subtrees of up to `tile` tokens merged."""
    heads, start, parent = np.unique(paths.head), paths.start, paths.parent
    small = paths.subtree_end - start <= tile
    in_small = small[paths.head]
    hangs_in_small = np.where(parent[heads] >= 0, in_small[parent[heads]], False)
    tiles = _tiles(paths, heads[small[heads] & ~hangs_in_small], tile)

    path_end = paths.end[np.append(heads[1:], len(start)) - 1]
    squares = np.stack([np.full_like(heads, CAUSAL), start[heads], path_end], 1)
    squares = np.concatenate([tiles, squares[~small[heads]]])
    squares = squares[np.argsort(squares[:, 1], kind="stable")]
    return np.concatenate([_batch_equal(squares), _rectangles(paths, ~in_small)])


def _tiles(paths: _Paths, roots: IntArray, tile: int) -> IntArray:
    """Pack the subtrees of runs `roots`, siblings side by side, in (kind, first, end) squares."""
    squares: list[tuple[int, int, int]] = []
    packed_parent = -2
    is_chain = paths.subtree_end == paths.end
    fields = (paths.parent, paths.start, paths.subtree_end, is_chain)
    for parent, a, b, chain in zip(*(field[roots].tolist() for field in fields), strict=True):
        if parent == packed_parent and squares[-1][2] == a and b - squares[-1][1] <= tile:
            squares[-1] = (ANCESTOR, squares[-1][1], b)
        else:
            squares.append((CAUSAL if chain else ANCESTOR, a, b))
        packed_parent = parent
    return np.array(squares, dtype=np.int64).reshape(-1, 3)


def _batch_equal(squares: IntArray) -> IntArray:
    """Turn sorted (kind, first, end) squares into [B, 6] blocks, equal causal ones in one."""
    kind, a, b = squares.T
    joins = np.zeros(len(squares), dtype=bool)
    equal = (a[1:] == b[:-1]) & (b[1:] - a[1:] == b[:-1] - a[:-1])
    joins[1:] = equal & (kind[1:] == CAUSAL) & (kind[:-1] == CAUSAL)
    first = np.flatnonzero(~joins)
    count = np.diff(np.append(first, len(squares)))
    a, b = a[first], b[first + count - 1]
    return np.stack([kind[first], a, b, a, b, count], 1)


def _rectangles(paths: _Paths, wanted: NDArray[np.bool_]) -> IntArray:
    """Return the [B, 6] rectangles of the branching runs among those `wanted`."""
    has_child = np.append(paths.parent[1:] == np.arange(len(paths.parent) - 1), False)
    run = np.flatnonzero(has_child & wanted)
    q0, q1 = paths.subtree_end[run + 1], paths.subtree_end[run]
    k0, k1 = paths.start[paths.head[run]], paths.end[run]
    full, one = np.full_like(run, FULL), np.ones_like(run)
    return np.stack([full, q0, q1, k0, k1, one], 1)
