"""Cut a schedule to a sliding window: a token sees the ancestors less than a window above it.

Shapes: B blocks, S tokens (keys; the first of them are the queries too), P pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefix_rewrite.ops.tree_attention.blocks import ANCESTOR, CAUSAL, FULL, blocks_array
from prefix_rewrite.segments import IntArray

BoolArray = NDArray[np.bool_]


def best_span(window: int) -> int:
    """Return the span of `cut_to_window` with the least `schedule_cost`, within a few percent."""
    return min(max(64, 2 * window), 512)


def cut_to_window(blocks_B7: IntArray, depth_S: IntArray, window: int, span: int) -> IntArray:
    """Return [B, 7] blocks that cover the same pairs less than `window` apart, each once.

    What lies within the window stays as it is. A causal square becomes pieces and the rectangles
    before them, a rectangle loses the keys and the queries that are out of reach, and what the
    window's edge still runs through is masked. Every query of a block sees one of its keys.

    Args:
        blocks_B7: a schedule without a window, diagonal blocks first; the keys of a rectangle and
            the tokens of a causal square lie on one path, in order.
        depth_S: depth of each token.
        window: how many tokens a token sees, itself included; at least 1.
        span: queries are cut where their depth enters another multiple of this.
    """
    past = _furthest_pair(blocks_B7, depth_S) >= window
    kind = blocks_B7[:, 0]
    tiles = blocks_B7[past & (kind == ANCESTOR)]
    tiles[:, 6] = 1
    pieces, before = _cut_squares(blocks_B7[past & (kind == CAUSAL)], depth_S, window, span)
    _, q0, q1, k0, k1, _, _ = blocks_B7[past & (kind == FULL)].T
    rectangles = np.concatenate([np.stack([q0, q1, k0, k1], 1), before])
    kept_squares, kept_rectangles = (blocks_B7[~past & on] for on in (kind != FULL, kind == FULL))
    squares = np.concatenate([kept_squares, tiles, pieces])
    return np.concatenate(
        [
            squares[np.argsort(squares[:, 1], kind="stable")],
            kept_rectangles,
            _cut_rectangles(rectangles, depth_S, window, span),
        ]
    )


def _furthest_pair(blocks_B7: IntArray, depth_S: IntArray) -> IntArray:
    """[B] how far above its deepest query a block's highest key is, at most."""
    _, q0, q1, k0, _, num_squares, _ = blocks_B7.T
    deepest = _reduce(np.maximum, depth_S, q0, q1)
    furthest = deepest - depth_S[k0]  # a path's first token and a subtree's are the highest
    for i in np.flatnonzero(num_squares > 1):
        squares = depth_S[q0[i] : q1[i]].reshape(num_squares[i], -1)
        furthest[i] = (squares[:, -1] - squares[:, 0]).max()
    return furthest


def _cut_squares(
    blocks_B7: IntArray, depth_S: IntArray, window: int, span: int
) -> tuple[IntArray, IntArray]:
    """Return the [P, 7] causal pieces of paths, and the (q0, q1, k0, k1) before each."""
    _, q0, q1, _, _, num_squares, _ = blocks_B7.T
    size = np.repeat((q1 - q0) // np.maximum(num_squares, 1), num_squares)
    nth = np.arange(len(size)) - np.repeat(np.cumsum(num_squares) - num_squares, num_squares)
    first = np.repeat(q0, num_squares) + nth * size
    pieces = _split(first, first + size, depth_S, span)
    a, b = pieces.first, pieces.end
    windowed = depth_S[b - 1] - depth_S[a] >= window
    path = first[pieces.of]
    before = np.stack([a, b, path, a], 1)[a > path]
    return blocks_array(CAUSAL, a, b, a, b, windowed=windowed), before


def _cut_rectangles(rows: IntArray, depth_S: IntArray, window: int, span: int) -> IntArray:
    """Cut (q0, q1, k0, k1) to the queries that see the last key, and the keys that they see."""
    q0, q1, k0, k1 = rows.T
    reach = depth_S[k1 - 1] + window
    pieces = _split(q0, q1, depth_S, span, below=reach)
    a, b, k0, k1 = pieces.first, pieces.end, k0[pieces.of], k1[pieces.of]
    highest, deepest = (_reduce(f, depth_S, a, b) for f in (np.minimum, np.maximum))
    by_one, by_all = (_search(depth_S, k0, k1, x - window + 1) for x in (highest, deepest))
    cut = by_one < by_all
    split = cut & _is_path(depth_S, a, b)
    # Along a path of queries the window's edge runs through a triangle of keys; the rest is full.
    last = _search(depth_S, a, b, depth_S[by_all - 1] + window)
    whole = blocks_array(FULL, a, b, np.where(split, by_all, by_one), k1, windowed=cut & ~split)
    edge = blocks_array(FULL, a, last, by_one, by_all, windowed=split)[split]
    return np.concatenate([whole, edge])


class _Pieces(NamedTuple):
    """Intervals [first, end) of tokens, [P] each, and the interval that each is a piece `of`."""

    first: IntArray
    end: IntArray
    of: IntArray


def _split(
    first: IntArray, end: IntArray, depth_S: IntArray, span: int, below: IntArray | None = None
) -> _Pieces:
    """Split intervals by depth: keep what is `below` one, cut what exceeds the `span`."""
    tokens, of = _ranges(first, end)
    depth = depth_S[tokens]
    inside = np.ones(len(tokens), dtype=bool) if below is None else depth < below[of]
    starts = np.append(True, (np.diff(of) != 0) | (np.diff(inside) != 0))[: len(tokens)]
    run = np.cumsum(starts) - 1
    bounds = np.append(np.flatnonzero(starts), len(tokens))
    spread = np.subtract(
        *(_reduce(f, depth, bounds[:-1], bounds[1:]) for f in (np.maximum, np.minimum))
    )
    starts[1:] |= (np.diff(depth // span) != 0) & (spread[run[1:]] >= span)
    at = np.flatnonzero(starts)
    end_at = np.append(at[1:], len(tokens))[: len(at)]
    at, end_at = at[inside[at]], end_at[inside[at]]
    return _Pieces(tokens[at], tokens[end_at - 1] + 1, of[at])


def _ranges(first: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """Return all numbers of the intervals [first, end), and the interval of each."""
    length = end - first
    of = np.repeat(np.arange(len(first)), length)
    return np.arange(len(of)) + (first - (np.cumsum(length) - length))[of], of


def _reduce(function: np.ufunc, values: IntArray, first: IntArray, end: IntArray) -> IntArray:
    """Reduce the values of each interval [first, end), none of them empty."""
    if not len(first):
        return first
    bounds = np.stack([first, end], 1).reshape(-1)
    return function.reduceat(np.append(values, 0), bounds)[::2]


def _is_path(depth_S: IntArray, first: IntArray, end: IntArray) -> BoolArray:
    """Say in which intervals the depth only grows."""
    falls = np.append(0, np.cumsum(np.diff(depth_S) <= 0))
    return falls[end - 1] == falls[first]


def _search(depth_S: IntArray, first: IntArray, end: IntArray, depth: IntArray) -> IntArray:
    """Return, by bisection, the first place in each [first, end) of such a depth or more.

    Where the depth does not grow along the interval the place returned means nothing.
    """
    low, high = first.copy(), end.copy()
    while (open_ := low < high).any():
        middle = (low + high) // 2
        less = open_ & (depth_S[np.minimum(middle, len(depth_S) - 1)] < depth)
        low = np.where(less, middle + 1, low)
        high = np.where(open_ & ~less, middle, high)
    return low
