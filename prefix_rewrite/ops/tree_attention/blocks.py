"""Blocks of tree attention: what they cover and what they cost.

Shapes: B blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefix_rewrite.segments import IntArray

CAUSAL, FULL, ANCESTOR = 0, 1, 2

# Costs in (query, key) pairs, forward and backward, as fitted to the CPU kernel at N * D of 512.
CALL_PAIRS = 1200
MASKED_CALL_PAIRS = 600  # more, for a block under a mask
ROW_PAIRS = 40  # for each query and for each key of a block: copies, sums, thin products
KEY_STEP = 512  # a causal square is computed in whole steps of as many keys
# The kernel takes queries by 256, 64 or 32, as it gets at least this many: what a pair then costs.
FEW_QUERIES, FEWER_QUERIES = 768, 192
COST_OF_FEW, COST_OF_FEWER = 1.2, 1.6


class Block(NamedTuple):
    """One dense block of the attention: queries [q0, q1) against keys [k0, k1).

    Attributes:
        kind: CAUSAL and ANCESTOR are squares on the diagonal, FULL is a rectangle of ancestors.
        num_squares: the block is this many equal squares, side by side on the diagonal.
        windowed: 1 where some of its pairs are further apart than the window, else 0.
    """

    kind: int
    q0: int
    q1: int
    k0: int
    k1: int
    num_squares: int = 1
    windowed: int = 0

    @property
    def on_diagonal(self) -> bool:
        return self.kind != FULL

    @property
    def is_masked(self) -> bool:
        return self.kind == ANCESTOR or self.windowed == 1


def blocks_array(
    kind: IntArray | int,
    q0: IntArray,
    q1: IntArray,
    k0: IntArray,
    k1: IntArray,
    num_squares: IntArray | int = 1,
    windowed: NDArray[np.bool_] | int = 0,
) -> IntArray:
    """Return [B, 7]: the fields of `Block`, one row each."""
    columns = np.broadcast_arrays(kind, q0, q1, k0, k1, num_squares, windowed)
    return np.stack(columns, 1).astype(np.int64)


def schedule_cost(blocks_B7: IntArray) -> float:
    """Return the cost of a schedule in pairs: what the kernel computes, not what is visible."""
    kind, q0, q1, k0, k1, num_squares, windowed = blocks_B7.T
    num_queries, num_keys = q1 - q0, (k1 - k0) // num_squares
    causal_keys = (num_keys + np.minimum(num_keys, KEY_STEP)) / 2
    area = num_queries * np.where(kind == CAUSAL, causal_keys, num_keys)
    cost = _block_cost(num_queries + k1 - k0, area, num_queries // num_squares)
    cost += MASKED_CALL_PAIRS * ((kind == ANCESTOR) | (windowed == 1))
    return float(cost.sum())


def rectangle_cost(num_queries: IntArray, num_keys: IntArray) -> NDArray[np.float64]:
    """Return the cost of rectangles of any shape, 0 where one has no keys."""
    cost = _block_cost(num_queries + num_keys, num_queries * num_keys, num_queries)
    return np.where(num_keys > 0, cost, 0.0)


def _block_cost(
    num_rows: IntArray, area: IntArray | NDArray[np.float64], num_queries: IntArray
) -> NDArray[np.float64]:
    """Return the cost of blocks without a mask; a pair's goes by a square's queries."""
    few = np.where(num_queries < FEW_QUERIES, COST_OF_FEW, 1.0)
    pair: NDArray[np.float64] = np.where(num_queries < FEWER_QUERIES, COST_OF_FEWER, few)
    return pair * area + (CALL_PAIRS + ROW_PAIRS * num_rows)
