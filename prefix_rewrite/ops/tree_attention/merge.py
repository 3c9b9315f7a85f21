"""Join rectangles of tree attention that share keys, so that the kernel gets more queries at once.

Dead ends along a chain are a few queries each, and each sees nearly all that the next one sees:
one rectangle over what several have in common, and a small one each for the rest, is the same
pairs in larger blocks.

Shapes: B rectangles, in order of their queries within the keys' run.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from prefix_rewrite.ops.tree_attention.blocks import FULL, blocks_array, rectangle_cost
from prefix_rewrite.segments import IntArray

GROUP_SIZES = (2, 3, 4, 6, 8, 12)


def merge_rectangles(blocks_B7: IntArray) -> IntArray:
    """Return rectangles that cover the same pairs at the lowest cost, in groups side by side."""
    _, q0, q1, k0, k1, *_ = blocks_B7[np.lexsort((blocks_B7[:, 1], blocks_B7[:, 3]))].T
    follows = (q1[:-1] == q0[1:]) & (k0[:-1] == k0[1:])
    groups = [_worthwhile(q0, q1, k0, k1, follows, size) for size in GROUP_SIZES]
    first = _best_groups(np.concatenate(groups), len(q0))
    if len(first) == len(q0):
        return blocks_B7
    size = np.diff(first, append=len(q0))
    common = np.minimum.reduceat(k1, first)
    joined = blocks_array(FULL, q0[first], q1[first + size - 1], k0[first], common)
    common_B = np.repeat(common, size)
    rest = k1 > common_B
    return np.concatenate([joined, blocks_array(FULL, q0, q1, common_B, k1)[rest]])


def _worthwhile(
    q0: IntArray,
    q1: IntArray,
    k0: IntArray,
    k1: IntArray,
    follows: NDArray[np.bool_],
    size: int,
) -> NDArray[np.float64]:
    """Return (first, end, saving) of each group of `size` that costs less than its members."""
    firsts = np.arange(len(q0) - size + 1)
    firsts = firsts[_windows(follows, size - 1).all(1)]
    members = firsts[:, None] + np.arange(size)
    common = k1[members].min(1)
    num_queries, num_keys = q1[members] - q0[members], k1[members] - k0[members]
    cost = rectangle_cost(num_queries.sum(1), common - k0[firsts])
    cost += rectangle_cost(num_queries, k1[members] - common[:, None]).sum(1)
    saving = rectangle_cost(num_queries, num_keys).sum(1) - cost
    return np.stack([firsts, firsts + size, saving], 1)[saving > 0]


def _windows(x: NDArray[np.bool_], size: int) -> NDArray[np.bool_]:
    return sliding_window_view(x, size) if len(x) >= size else np.empty((0, size), dtype=bool)


def _best_groups(groups_G3: NDArray[np.float64], count: int) -> IntArray:
    """Return the first rectangle of each group, of one or more, that together save the most."""
    ending: dict[int, list[tuple[int, float]]] = {}
    for first, end, saving in groups_G3.tolist():
        ending.setdefault(int(end), []).append((int(first), saving))
    best, start = [0.0], [0]
    for end in range(1, count + 1):
        most, begin = best[-1], end - 1
        for first, saving in ending.get(end, ()):
            if best[first] + saving > most:
                most, begin = best[first] + saving, first
        best.append(most)
        start.append(begin)
    firsts, end = [], count
    while end:
        end = start[end]
        firsts.append(end)
    return np.array(firsts[::-1], dtype=np.int64)
