"""Fragments for data-parallel ranks: each rank gets as many, so none waits in a collective."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_rewrite.errors import ForestError
from prefix_rewrite.forest import PrefixForest


def deal_fragments(fragments: Sequence[PrefixForest], num_ranks: int) -> list[list[PrefixForest]]:
    """Give every rank the same number of steps, and the ranks of a step fragments of like size.

    Fragments are sorted by tokens and dealt out `num_ranks` at a time, the largest to the rank
    with the least so far. The last step is filled with empty forests: a rank runs one like any
    other, so its collectives match, and it adds nothing to any gradient.

    Args:
        fragments: as `PrefixForest.split` returned them.
        num_ranks: data-parallel ranks; a context-parallel group counts as one.

    Returns:
        for each rank, its fragments in the order of steps.

    Raises:
        ForestError: there is no rank.
    """
    if num_ranks < 1:
        raise ForestError(f"fragments must go to at least one rank, got {num_ranks}")
    ordered = sorted(fragments, key=lambda fragment: -fragment.num_tokens)
    ranks: list[list[PrefixForest]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for i in range(0, len(ordered), num_ranks):
        step = ordered[i : i + num_ranks]
        step += [PrefixForest.from_calls([]) for _ in range(num_ranks - len(step))]
        by_load = sorted(range(num_ranks), key=lambda rank: tokens[rank])
        for rank, fragment in zip(by_load, step, strict=True):
            ranks[rank].append(fragment)
            tokens[rank] += fragment.num_tokens
    return ranks
