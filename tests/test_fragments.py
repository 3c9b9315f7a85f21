"""Fragments fit their budget, repeat little, and own every sampled edge exactly once.

Oracles work on sets of prefixes: a fragment's size is the number of distinct prefixes of its
paths, whatever the segments.
"""

from __future__ import annotations

import itertools
import json
import random
import runpy
from collections.abc import Iterator, Sequence

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_rewrite import packing
from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.errors import ForestError
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.fragments import (
    caller_order,
    check_owners,
    gather_calls,
    least_repeated,
    split_stats,
)

Path = tuple[int, ...]


def leaf_paths(forest: PrefixForest) -> list[Path]:
    """Token ids of each root-to-leaf path, in the forest's depth-first order."""
    graph = forest.graph
    paths = []
    for node in forest.nodes:
        if graph.out_degree(node) == 0:
            up = [node]
            while graph.in_degree(up[-1]):
                up.extend(graph.predecessors(up[-1]))
            paths.append(tuple(i for n in up[::-1] for i in graph.nodes[n]["token_ids"].tolist()))
    return paths


def distinct_prefixes(paths: Sequence[Path]) -> set[Path]:
    return {path[:n] for path in paths for n in range(1, len(path) + 1)}


def first_fit_tokens(paths: Sequence[Path], max_tokens: int) -> int:
    """Each path in turn goes to the first fragment that has room for it."""
    fragments: list[set[Path]] = []
    for path in paths:
        own = distinct_prefixes([path])
        home = next((f for f in fragments if len(f | own) <= max_tokens), None)
        if home is None:
            fragments.append(own)
        else:
            home |= own
    return sum(map(len, fragments))


def partitions(items: list) -> Iterator[list[list]]:
    """Every way to split a list into non-empty groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]


def optimal_tokens(paths: list[Path], max_tokens: int) -> int:
    """Fewest tokens over every partition of the paths whose fragments all fit."""
    sizes = {
        group: len(distinct_prefixes(group))
        for n in range(1, len(paths) + 1)
        for group in itertools.combinations(paths, n)
    }
    totals = []
    for partition in partitions(paths):
        parts = [sizes[tuple(group)] for group in partition]
        if max(parts) <= max_tokens:
            totals.append(sum(parts))
    return min(totals)


def check_fragments(forest: PrefixForest, fragments: Sequence[PrefixForest]) -> None:
    """Each call is owned once, keeps its exact ids and its own edges with their whole context."""
    assert sorted(i for f in fragments for i in f.call_ids) == list(range(forest.num_calls))
    assert sorted(e for f in fragments for e in f.edge_ids) == list(range(forest.num_edges))
    for fragment in fragments:
        for i, call in enumerate(fragment.call_ids):
            whole = forest.token_ids[forest.call_path(call)]
            assert np.array_equal(fragment.token_ids[fragment.call_path(i)], whole)
        here, there = fragment.edges, fragment.edge_ids
        assert np.array_equal(here.target, forest.edges.target[there])
        assert np.array_equal(fragment.call_ids[here.call], forest.edges.call[there])
        for name in ("source", "token"):
            assert np.array_equal(
                fragment.segments.position_ids[getattr(here, name)],
                forest.segments.position_ids[getattr(forest.edges, name)[there]],
            )
        path_of_edge = [fragment.call_path(call) for call in here.call]
        for path, source in zip(path_of_edge, here.source, strict=True):
            assert source in path
    restored = np.concatenate([f.edges.target for f in fragments])[caller_order(fragments)]
    assert np.array_equal(restored, forest.edges.target)
    own = [[f.token_ids[f.call_path(i)].tolist() for i in range(f.num_calls)] for f in fragments]
    calls = [forest.token_ids[forest.call_path(i)].tolist() for i in range(forest.num_calls)]
    assert gather_calls(fragments, own) == calls


def random_forest(seed: int, num_calls: int, length: int = 12) -> PrefixForest:
    rng = random.Random(seed)
    calls = []
    for _ in range(num_calls):
        ids = [rng.randrange(2) for _ in range(rng.randint(1, length))]
        if calls and rng.random() < 0.8:
            stem = rng.choice(calls).token_ids.tolist()
            ids = stem[: rng.randint(1, len(stem))] + ids[: length // 2]
        mask = [False] + [rng.random() < 0.5 for _ in ids[1:]]
        calls.append(CapturedCall.from_tokens(ids, mask))
    return PrefixForest.from_calls(calls)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 14), st.floats(0, 1))
def test_fragments_fit_and_own_every_edge_once(seed, num_calls, slack):
    forest = random_forest(seed, num_calls)
    longest = forest.stats().longest_path
    budget = longest + int(slack * (forest.num_tokens - longest))
    fragments = forest.split(budget)
    assert max(f.num_tokens for f in fragments) <= budget
    check_fragments(forest, fragments)
    held: set[Path] = set()  # what earlier fragments hold: a call belongs to the first
    for fragment in fragments:
        for call in fragment.call_ids:
            assert tuple(forest.token_ids[forest.call_path(call)].tolist()) not in held
        held |= distinct_prefixes(leaf_paths(fragment))
    paths = [path for f in fragments for path in leaf_paths(f)]
    assert distinct_prefixes(paths) == distinct_prefixes(leaf_paths(forest))
    stats = split_stats(forest, fragments)
    assert stats.num_tokens == sum(len(distinct_prefixes(leaf_paths(f))) for f in fragments)
    assert stats.num_edges == forest.num_edges
    assert stats.num_tokens <= first_fit_tokens(leaf_paths(forest), budget)
    assert stats.num_repeated >= least_repeated(forest, budget)


@pytest.mark.parametrize("stretch", [1.0, 1.2, 1.5])
def test_small_forests_are_split_as_well_as_by_exhaustive_search(stretch):
    compared = 0
    for seed in range(80):
        forest = random_forest(seed, 8, length=20)
        paths = leaf_paths(forest)
        if not 3 <= len(paths) <= 7:
            continue
        budget = int(forest.stats().longest_path * stretch)
        best = optimal_tokens(paths, budget)
        assert forest.num_tokens + least_repeated(forest, budget) <= best
        assert sum(f.num_tokens for f in forest.split(budget)) == best
        compared += 1
    assert compared > 30


def test_no_plan_is_worse_than_first_fit_even_without_luck(monkeypatch):
    """First fit in depth-first order is a candidate of its own, and sometimes the best one."""
    monkeypatch.setattr(packing, "SHUFFLES", 0)
    for seed in range(60):
        forest = random_forest(seed, 40, length=24)
        budget = int(forest.stats().longest_path * 1.1)
        got = sum(f.num_tokens for f in forest.split(budget))
        assert got <= first_fit_tokens(leaf_paths(forest), budget)


def test_everything_that_fits_is_one_fragment():
    forest = random_forest(3, 10)
    (fragment,) = forest.split(forest.num_tokens)
    assert fragment.num_tokens == forest.num_tokens
    assert np.array_equal(fragment.edge_ids, np.arange(forest.num_edges))
    assert PrefixForest.from_calls([]).split(1) == []


def test_attended_pairs_are_a_budget_too():
    calls = [CapturedCall([1, 2, 3], [i, 5, 6]) for i in range(4, 10)]
    forest = PrefixForest.from_calls(calls)
    pairs = 6 + 2 * 15  # the prefix, and two branches of tokens that see 4, 5 and 6 keys
    fragments = forest.split(100, max_attended_pairs=pairs)
    assert [f.segments.num_attended_pairs for f in fragments] == [pairs] * 3
    check_fragments(forest, fragments)
    with pytest.raises(ForestError, match="max_attended_pairs=20.* 21 attended pairs, 1 more"):
        forest.split(100, max_attended_pairs=20)
    assert len(forest.split(100, max_attended_pairs=21)) == 6


def test_a_path_over_the_budget_says_by_how_much():
    forest = PrefixForest.from_calls([CapturedCall([1], [2]), CapturedCall([1, 3, 4], [5, 6])])
    with pytest.raises(ForestError, match="max_tokens=4, but .* has 5 tokens, 1 more; raise"):
        forest.split(4)
    assert sum(f.num_edges for f in forest.split(5)) == 3


def test_a_missing_or_repeated_fragment_is_noticed():
    forest = random_forest(5, 8)
    fragments = forest.split(forest.stats().longest_path)
    owning = [f for f in fragments if f.num_edges]
    with pytest.raises(ForestError, match=f"got {owning[0].num_edges} without and 0 with"):
        check_owners(forest, [f for f in fragments if f is not owning[0]])
    with pytest.raises(ForestError, match=f"got 0 without and {owning[0].num_edges} with"):
        split_stats(forest, [*fragments, owning[0]])


def test_fragments_of_a_graph_keep_its_names():
    graph = nx.DiGraph()
    graph.add_node("root", token_ids=[1, 2], sampled=[False, True])
    for i in range(5):
        graph.add_node(f"leaf {i}", token_ids=[7, 8, 9], sampled=[True, False, True])
        graph.add_edge("root", f"leaf {i}")
    forest = PrefixForest.from_graph(graph)
    fragments = forest.split(8)
    check_fragments(forest, fragments)
    owned = [node for f in fragments for node in f.nodes if len(f.node_edges(node))]
    assert sorted(owned) == sorted(graph)
    for fragment in fragments:
        for node in fragment.nodes:
            ids = fragment.edge_ids[fragment.node_edges(node)]
            assert len(ids) in (0, len(forest.node_edges(node)))
            assert set(ids) <= set(forest.node_edges(node))


def test_a_group_that_fits_stays_together():
    calls = [
        CapturedCall([prompt, 1, 2], [sample]) for prompt in range(9) for sample in range(20, 24)
    ]
    forest = PrefixForest.from_calls(calls)
    for budget in range(7, 30):
        fragments = forest.split(budget)
        homes = {(i // 4, f) for f, part in enumerate(fragments) for i in part.call_ids}
        assert len(homes) == 9
        assert split_stats(forest, fragments).num_repeated == 0


@pytest.mark.parametrize("shape", ["chain", "star", "comb"])
def test_deep_and_wide_forests_split_without_recursion(shape):
    count = 6_000
    graph = nx.DiGraph()
    for i in range(count):
        graph.add_node(i, token_ids=[i], sampled=[i > 0])
    if shape == "chain":
        graph.add_edges_from((i - 1, i) for i in range(1, count))
    elif shape == "star":
        graph.add_edges_from((0, i) for i in range(1, count))
    else:  # a tooth at every second token of the spine
        graph.add_edges_from((max(0, i - 2 if i % 2 == 0 else i - 1), i) for i in range(1, count))
    forest = PrefixForest.from_graph(graph)
    fragments = forest.split(count // 2 + count // 10 if shape != "chain" else count)
    check_owners(forest, fragments)
    assert len(fragments) <= 10


SETS = ["small", "medium_code", "medium_code_elide", "swe_elide", "groups_game24", "large_tau"]


@pytest.mark.parametrize("name", [*SETS, "medium_tau", "tree_tot_text", "tree_lats_webshop"])
def test_real_agent_runs_repeat_little(name, shared_data):
    """At twice the longest path, groups apart: within 1 % of what no plan can beat."""
    load = runpy.run_path(str(shared_data / "load.py"))["iter_calls"]
    stats = json.loads((shared_data / "stats.json").read_text())[name]
    calls = [
        CapturedCall(r["prompt_ids"], r["output_ids"], provenance=r["group"])
        for r in load(next(shared_data.glob(f"{name}.*")))
    ]
    forest = PrefixForest.from_calls(calls)
    budget = 2 * stats["longest_call"]["tokens"]
    fragments = forest.split(budget)
    counts = split_stats(forest, fragments)
    assert counts.largest <= budget
    assert counts.num_edges == stats["sampled_tokens"]
    excess = counts.num_repeated - least_repeated(forest, budget)
    assert 0 <= excess <= 0.01 * forest.num_tokens
    for fragment in fragments:
        for i, call in enumerate(fragment.call_ids):
            ids = fragment.token_ids[fragment.call_path(i)]
            assert np.array_equal(ids, calls[call].token_ids)
