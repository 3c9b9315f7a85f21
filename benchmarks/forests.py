"""The forests that the benchmarks share, as segment tables, heaviest child first."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from prefix_rewrite.order import heavy_first_order
from prefix_rewrite.segments import SegmentTable


def star(prompt: int, branches: int, tokens: int) -> SegmentTable:
    """One prompt with `branches` answers: a GRPO group."""
    return heavy_first([-1] + [0] * branches, [prompt] + [tokens] * branches)


def agent(turns: int, turn_tokens: int, dead_ends: int, dead_end_tokens: int) -> SegmentTable:
    """A chain of turns, each with `dead_ends` tries that were given up."""
    parent: list[int] = []
    length: list[int] = []
    last = -1
    for _ in range(turns):
        parent += [last] + [len(parent)] * dead_ends
        length += [turn_tokens] + [dead_end_tokens] * dead_ends
        last = len(parent) - 1 - dead_ends
    return heavy_first(parent, length)


def binary(levels: int, tokens: int) -> SegmentTable:
    """A complete binary tree of `levels` levels of segments."""
    count = 2**levels - 1
    return heavy_first([(i + 1) // 2 - 1 for i in range(count)], [tokens] * count)


def tiny(segments: int, tokens: int, seed: int = 0) -> SegmentTable:
    """A random recursive tree of `segments` segments of `tokens` tokens."""
    rng = random.Random(seed)
    parent = [-1] + [rng.randrange(i) for i in range(1, segments)]
    return heavy_first(parent, [tokens] * segments)


def unshared(calls: int, tokens: int) -> SegmentTable:
    """Calls that share nothing."""
    return heavy_first([-1] * calls, [tokens] * calls)


def heavy_first(parent: Sequence[int], length: Sequence[int]) -> SegmentTable:
    """Lay segments out in depth-first order, heaviest child first; any `parent[i] < i`."""
    order = heavy_first_order(parent, length, range(len(parent)))
    rank = {segment: i for i, segment in enumerate(order)} | {-1: -1}
    return SegmentTable.from_parents([rank[parent[i]] for i in order], [length[i] for i in order])


FORESTS: dict[str, Callable[[], SegmentTable]] = {
    "star2048x8x256": lambda: star(2048, 8, 256),
    "star4096x16x128": lambda: star(4096, 16, 128),
    "agent16": lambda: agent(16, 128, 2, 64),
    "agent32": lambda: agent(32, 128, 2, 64),
    "binary5": lambda: binary(5, 128),
    "binary6": lambda: binary(6, 128),
    "tiny1000x4": lambda: tiny(1000, 4),
    "unshared8x512": lambda: unshared(8, 512),
}
