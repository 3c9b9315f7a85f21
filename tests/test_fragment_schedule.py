"""Fragments dealt to data-parallel ranks: equal steps, each fragment once, like sizes together."""

from __future__ import annotations

import numpy as np
import pytest
from forests import SHAPES, calls_of

from prefix_rewrite import ForestError, PrefixForest
from prefix_rewrite.distributed.schedule import deal_fragments
from prefix_rewrite.fragments import caller_order


def forest_of_many_calls() -> PrefixForest:
    trees = [tree for shape in ("star", "nested", "many_roots") for tree in SHAPES[shape]]
    return PrefixForest.from_calls(calls_of(trees))


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 5, 40))
def test_every_rank_has_as_many_steps_and_each_edge_one_owner(num_ranks):
    forest = forest_of_many_calls()
    ranks = deal_fragments(forest.split(20), num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(steps) for steps in ranks}) == 1
    edges = np.concatenate([fragment.edge_ids for steps in ranks for fragment in steps])
    assert sorted(edges.tolist()) == list(range(forest.num_edges))
    dealt = [fragment for steps in ranks for fragment in steps]
    values = np.concatenate([fragment.edges.target for fragment in dealt])
    assert (values[caller_order(dealt)] == forest.edges.target).all()


def test_fewest_steps_and_only_the_last_has_empty_forests():
    fragments = forest_of_many_calls().split(20)
    ranks = deal_fragments(fragments, 2)
    assert len(ranks[0]) == -(-len(fragments) // 2)
    assert all(step.num_tokens for steps in ranks for step in steps[:-1])


def test_fragments_of_a_step_are_of_like_size():
    ranks = deal_fragments(forest_of_many_calls().split(20), 2)
    steps = [[fragment.num_tokens for fragment in step] for step in zip(*ranks, strict=True)]
    for before, after in zip(steps[:-1], steps[1:], strict=True):
        assert min(before) >= max(after)


def test_no_rank_is_refused_and_no_fragment_is_not():
    with pytest.raises(ForestError, match="at least one rank, got 0"):
        deal_fragments([], 0)
    assert deal_fragments([], 3) == [[], [], []]
