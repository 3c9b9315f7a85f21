"""Hand-made sets of calls, one for each shape a forest can have."""

from __future__ import annotations

import random
from collections.abc import Sequence

from families import VOCAB

from prefix_rewrite import CapturedCall

Tree = tuple[int, Sequence["Tree"]]  # tokens of a segment, its children


def calls_of(
    trees: Sequence[Tree], *, seed: int = 0, sampled: int | None = None
) -> list[CapturedCall]:
    """One call a leaf, with fresh random tokens in each segment; its last segment is sampled.

    Children of one segment start with different tokens, so that they do branch there.

    Args:
        sampled: sample at most that many tokens at each leaf.
    """
    rng = random.Random(seed)
    calls: list[CapturedCall] = []
    pending = [(tree, [], first) for tree, first in _with_first(trees, rng)]
    while pending:
        (length, children), context, first = pending.pop(0)
        own = [first, *(rng.randrange(3, VOCAB) for _ in range(length - 1))]
        pending.extend((c, [*context, *own], f) for c, f in _with_first(children, rng))
        if not children:
            keep = len(own) if sampled is None else min(sampled, len(own))
            keep = keep if context else min(keep, len(own) - 1)
            row = [*context, *own]
            calls.append(CapturedCall(row[: len(row) - keep], row[len(row) - keep :]))
    return calls


def _with_first(trees: Sequence[Tree], rng: random.Random) -> list[tuple[Tree, int]]:
    return list(zip(trees, rng.sample(range(3, VOCAB), len(trees)), strict=True))


def chain_with_leaves(count: int) -> Tree:
    """A chain of one-token segments, with a fork of one-token segments hanging off each."""
    tree: Tree = (1, [])
    for _ in range(count):
        tree = (1, [tree, (1, [(1, []), (1, [])])])
    return tree


SHAPES: dict[str, list[Tree]] = {
    "one_call": [(12, [])],
    "chain": [(5, [(3, [(4, [])])])],
    "star": [(9, [(4, []), (3, []), (6, [])])],
    "nested": [(7, [(2, [(3, []), (1, [(2, []), (2, [])])]), (5, [])])],
    "fork_in_chunk": [(70, [(3, []), (66, [(2, []), (9, [])])])],
    "fork_in_conv": [(2, [(1, [(3, []), (1, [(2, []), (4, [])])]), (2, [])])],
    "many_roots": [(5, []), (2, [(2, []), (3, [])]), (6, []), (2, [])],
    "one_token": [chain_with_leaves(8)],
}
