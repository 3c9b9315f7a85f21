"""Which rank of a context-parallel group owns which physical tokens.

Tokens are cut in equal tiles in depth-first order; tiles of like work are dealt out, one to each
rank at a time, the costliest to the rank with the least so far. Equal counts balance what every
token costs (dense layers, memory); like work balances what differs: attended pairs, and rows of
the vocabulary projection. Scans are balanced by heads, whatever the partition. The largest tile
that balances well is taken: large tiles need fewer tokens of other ranks.

Shapes: T physical tokens, R ranks, K kinds of work, N tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefix_rewrite.segments import IntArray, SegmentTable

FloatArray = NDArray[np.float64]

BALANCED = 1.02
MAX_TILES = 1024  # bounds the time spent on dealing out


@dataclass(frozen=True)
class Balance:
    """Imbalance of a partition: the largest rank's work over the mean, 1.0 at best.

    Attributes:
        tokens: physical tokens, as dense layers cost.
        attended_pairs: (query, key) pairs, as attention costs.
        edge_sources: rows of the vocabulary projection.
        tile: tokens of a tile.
    """

    tokens: float
    attended_pairs: float
    edge_sources: float
    tile: int

    @property
    def worst(self) -> float:
        return max(self.tokens, self.attended_pairs, self.edge_sources)


@dataclass(frozen=True, eq=False)
class Partition:
    """A forest's tokens dealt out to ranks.

    Attributes:
        owner: [T] rank that owns each token.
        num_ranks: R.
        balance: how even it is.
    """

    owner: IntArray
    num_ranks: int
    balance: Balance


def partition_tokens(
    segments: SegmentTable, num_ranks: int, edge_source: IntArray | None = None
) -> Partition:
    """Deal a forest's tokens out; a pure function, the same on every rank.

    Args:
        segments: the forest.
        num_ranks: R, at least 1; may exceed T.
        edge_source: distinct tokens whose vocabulary row is projected.
    """
    num_tokens = segments.num_tokens
    work = np.zeros((3, num_tokens))
    work[0] = 1
    work[1] = segments.position_ids + 1
    if edge_source is not None:
        work[2, edge_source] = 1
    best: Partition | None = None
    for tile in tile_sizes(num_tokens, num_ranks):
        owner = deal_tiles(work, num_ranks, tile)
        found = Partition(owner, num_ranks, _balance(work, owner, num_ranks, tile))
        if best is None or found.balance.worst < best.balance.worst:
            best = found
        if best.balance.worst <= BALANCED:
            break
    assert best is not None, "there is always a tile size"
    return best


def tile_sizes(num_tokens: int, num_ranks: int) -> list[int]:
    """Return the sizes to try, largest first: one tile a rank, then powers of two."""
    largest = max(1, -(-num_tokens // num_ranks))
    least = max(1, num_tokens // MAX_TILES)
    powers = [2**i for i in range(largest.bit_length()) if least <= 2**i < largest]
    return [largest, *reversed(powers)]


def deal_tiles(work_KT: FloatArray, num_ranks: int, tile: int) -> IntArray:
    """Return [T] owners; the ranks' numbers of tiles differ by at most one.

    Tiles are sorted by their last kind of work, then by the one before, and dealt out R at a
    time: one to each rank, the costliest to the one with the least of that work so far.
    """
    num_tokens = work_KT.shape[1]
    first = np.arange(0, num_tokens, tile)
    if not len(first):
        return np.empty(0, dtype=np.int64)
    cost_KN = np.add.reduceat(work_KT, first, axis=1)
    total_K1 = np.maximum(work_KT.sum(1, keepdims=True), 1)
    cost_NK = (cost_KN / total_K1).T
    load_RK = np.zeros((num_ranks, len(work_KT)))
    owner_N = np.empty(len(first), dtype=np.int64)
    order = np.lexsort(-cost_KN)
    for i in range(0, len(order), num_ranks):
        free = list(range(num_ranks))
        for n in order[i : i + num_ranks].tolist():
            rank = min(free, key=lambda r: float(load_RK[r] @ cost_NK[n]))
            free.remove(rank)
            owner_N[n] = rank
            load_RK[rank] += cost_NK[n]
    return np.repeat(owner_N, tile)[:num_tokens]


def _balance(work_KT: FloatArray, owner: IntArray, num_ranks: int, tile: int) -> Balance:
    load_KR = np.stack([np.bincount(owner, row, minlength=num_ranks) for row in work_KT])
    mean_K = load_KR.mean(1)
    worst_K = np.divide(load_KR.max(1), mean_K, out=np.ones(len(mean_K)), where=mean_K > 0)
    tokens, attended_pairs, edge_sources = worst_K.tolist()
    return Balance(tokens, attended_pairs, edge_sources, tile)
