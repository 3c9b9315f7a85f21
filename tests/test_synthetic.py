"""Agent-shaped calls are seeded, and have the shapes they are named after."""

from __future__ import annotations

import dataclasses

import numpy as np

from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.sharing import explain_sharing
from prefix_rewrite.synthetic import EpisodeShape, agent_calls

PLAIN = EpisodeShape(
    num_episodes=1,
    turns=8,
    system=50,
    task=20,
    sampled=10,
    observation=30,
    retry=0.0,
    sub_agent=0.0,
    best_of=1,
    max_context=10**9,
)


def forest_of(**changes) -> PrefixForest:
    return PrefixForest.from_calls(agent_calls(dataclasses.replace(PLAIN, **changes)))


def test_equal_seeds_give_equal_calls():
    shape = dataclasses.replace(PLAIN, retry=0.5, sub_agent=0.5)
    first, same, other = (list(agent_calls(shape, seed=seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, same, strict=True))
    assert not np.array_equal(first[0].token_ids, other[0].token_ids)


def test_each_habit_gives_its_shape():
    assert forest_of().stats().num_leaves == 1
    assert forest_of(best_of=5).stats().num_leaves == 5
    assert forest_of(retry=1.0).stats().num_leaves == 8
    assert forest_of(num_episodes=4).stats().num_leaves == 4
    sub_agents = forest_of(sub_agent=1.0, sub_agent_turns=3).stats()
    assert (sub_agents.num_roots, sub_agents.num_calls) == (2, 8 + 8 * 3)


def test_context_edits_fork_mid_context():
    calls = list(agent_calls(dataclasses.replace(PLAIN, max_context=200)))
    report = explain_sharing(calls)
    assert report.num_forks()["rewritten"] > 0
    longest = max(call.num_tokens for call in calls)
    assert longest < forest_of().stats().longest_path
