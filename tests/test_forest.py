"""A forest shares exactly the prefixes that calls have in common, and loses nothing.

The oracle is a set of prefixes, one Python tuple a token, and networkx's own prefix tree.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Sequence

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.errors import ForestError
from prefix_rewrite.forest import PrefixForest

DATA_SETS = [
    "small",
    "medium_tau",
    "medium_code",
    "medium_code_elide",
    "large_tau",
    "swe_elide",
    "groups_game24",
    "tree_tot_text",
    "tree_lats_webshop",
    "qwen3_captured",
]


def prefixes(call: CapturedCall) -> list[tuple]:
    """Every prefix of a call with all that sharing depends on."""
    routes = [None] * call.num_tokens if call.routing is None else call.routing.tolist()
    tokens = [(i, repr(r)) for i, r in zip(call.token_ids.tolist(), routes, strict=True)]
    return [(call.provenance, *tokens[:n]) for n in range(1, len(tokens) + 1)]


def check_against_prefix_set(calls: Sequence[CapturedCall]) -> PrefixForest:
    """Physical tokens are the distinct prefixes, and each call's edges are its own."""
    forest = PrefixForest.from_calls(calls)
    owner: dict[tuple, int] = {}
    for i, call in enumerate(calls):
        path, keys = forest.call_path(i), prefixes(call)
        assert forest.token_ids[path].tolist() == call.token_ids.tolist()
        assert forest.segments.position_ids[path].tolist() == list(range(call.num_tokens))
        start = forest.segments.start[forest.call_segment[i]]
        assert start <= path[-1] < start + forest.segments.length[forest.call_segment[i]]
        for key, token in zip(keys, path.tolist(), strict=True):
            assert owner.setdefault(key, token) == token
        a, b = forest.edges.call_offsets[i : i + 2]
        at = np.flatnonzero(call.sampled)
        assert forest.edges.source[a:b].tolist() == path[at - 1].tolist()
        assert forest.edges.token[a:b].tolist() == path[at].tolist()
        assert forest.edges.target[a:b].tolist() == call.token_ids[at].tolist()
        assert (forest.edges.call[a:b] == i).all()
    assert forest.num_tokens == len(owner) == len(set(owner.values()))
    assert forest.num_edges == sum(call.num_sampled for call in calls)
    check_layout(forest)
    return forest


def check_layout(forest: PrefixForest) -> None:
    """The graph is a branching, laid out in depth-first order, heaviest child first."""
    table, graph = forest.segments, forest.graph
    assert graph.number_of_nodes() == 0 or nx.is_branching(graph)
    assert tuple(graph) == forest.nodes
    for i, node in enumerate(forest.nodes):
        a, b = table.start[i], table.start[i] + table.length[i]
        assert graph.nodes[node]["token_ids"].tolist() == forest.token_ids[a:b].tolist()
        assert graph.nodes[node]["depth"] == table.depth[i]
        below = nx.descendants(graph, node) | {node}
        size = sum(len(graph.nodes[n]["token_ids"]) for n in below)
        assert table.subtree_end[i] == a + size
    weight = table.subtree_end - table.start
    for i in range(table.num_segments):
        kids = np.flatnonzero(table.parent == i)
        assert (np.diff(weight[kids]) <= 0).all()


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@st.composite
def captured_calls(draw):
    ids = draw(tokens)
    mask = [False] + draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))
    kind = draw(st.sampled_from(["none", "row", "rows", "wide"]))
    routing = None
    if kind != "none":
        flat = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
        dtype = draw(st.sampled_from([np.int8, np.uint8, np.int64]))
        routing = np.asarray(flat, dtype=dtype)
        if kind != "row":
            routing = np.stack([routing, 1 - routing], -1)
        if kind == "wide":
            routing = routing[:, None]
    provenance = draw(st.sampled_from([None, "a"]))
    return CapturedCall.from_tokens(ids, mask, routing=routing, provenance=provenance)


@settings(deadline=None, max_examples=200)
@given(st.lists(captured_calls(), max_size=12))
def test_physical_tokens_are_the_distinct_prefixes(calls):
    check_against_prefix_set(calls)


@settings(deadline=None, max_examples=200)
@given(st.lists(tokens, max_size=12))
def test_matches_networkx_prefix_tree(paths):
    forest = check_against_prefix_set([CapturedCall(ids, []) for ids in paths])
    trie = nx.prefix_tree(paths)
    assert forest.num_tokens == trie.number_of_nodes() - 2  # but for its root and its nil node
    trie.remove_node(-1)
    for node in forest.nodes:  # a segment never holds a branch
        children = list(forest.graph.successors(node))
        assert len(children) != 1
    branches = [n for n in trie if n != 0 and trie.out_degree(n) > 1]
    assert forest.stats().num_branch_points == len(branches)
    assert forest.stats().num_roots == trie.out_degree(0)


@settings(deadline=None, max_examples=100)
@given(st.lists(captured_calls(), max_size=8), st.randoms(use_true_random=False))
def test_order_of_calls_changes_only_the_order_of_results(calls, random):
    order = list(range(len(calls)))
    random.shuffle(order)
    forest = PrefixForest.from_calls(calls)
    shuffled = PrefixForest.from_calls([calls[i] for i in order])
    assert shuffled.num_tokens == forest.num_tokens
    for new, old in enumerate(order):
        ids = shuffled.token_ids[shuffled.call_path(new)]
        assert ids.tolist() == forest.token_ids[forest.call_path(old)].tolist()


@pytest.mark.parametrize(
    ("paths", "physical"),
    [
        ([], 0),
        ([[5]], 1),
        ([[5], [6], [7]], 3),
        ([[1, 2, 3], [1, 2, 3]], 3),
        ([[1, 2], [1, 2, 3], [1]], 3),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [1, 2]], 5),
        ([[1, 2, 3, 4], [1, 2, 9, 4, 5]], 7),
    ],
)
def test_shapes_by_hand(paths, physical):
    calls = [CapturedCall(ids[:1], ids[1:]) for ids in paths]
    assert check_against_prefix_set(calls).num_tokens == physical


def test_equal_calls_stay_two_sets_of_edges():
    forest = PrefixForest.from_calls([CapturedCall([1, 2], [3, 4])] * 2)
    assert forest.num_tokens == 4
    assert forest.edges.source.tolist() == [1, 2, 1, 2]
    assert forest.edges.call.tolist() == [0, 0, 1, 1]


def test_a_call_that_ends_in_a_run_does_not_cut_it():
    forest = PrefixForest.from_calls([CapturedCall([1, 2], []), CapturedCall([1, 2, 3], [4])])
    assert forest.segments.num_segments == 1
    assert forest.call_path(0).tolist() == [0, 1]


def test_sharing_ends_exactly_where_routing_differs():
    routes = np.zeros((4, 2, 3), dtype=np.int16)
    other = routes.astype(np.uint8)
    other[2, 1, 0] = 7
    calls = [CapturedCall([1, 2], [3, 4], routing=r) for r in (routes, other)]
    assert check_against_prefix_set(calls).num_tokens == 2 + 2 + 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"routing": np.array([0, 0, 0], np.uint8)}, {"routing": np.array([256, 0, 0])}),
        ({"provenance": "v1"}, {"provenance": "v2"}),
        ({"routing": [0, 0, 0]}, {}),
        ({"routing": [[0, 0]] * 3}, {"routing": [[0, 0, 0]] * 3}),
        ({"routing": [[0, 0]] * 3}, {"routing": [[[0, 0]]] * 3}),
    ],
)
def test_other_context_shares_nothing(first, second):
    forest = PrefixForest.from_calls(
        [CapturedCall([1, 2], [3], **first), CapturedCall([1, 2], [3], **second)]
    )
    assert forest.num_tokens == 6
    assert PrefixForest.from_calls([CapturedCall([1, 2], [3], **first)] * 2).num_tokens == 3


def test_from_calls_names_the_call():
    with pytest.raises(ForestError, match="call 1: must be a CapturedCall, got dict"):
        PrefixForest.from_calls([CapturedCall([1], [2]), {"context_ids": [1]}])


def test_any_path_is_few_contiguous_runs():
    """Heaviest child first: a comb of 200 teeth has its spine in one piece."""
    spine = list(range(200))
    calls = [CapturedCall(spine[: i + 1] + [900], []) for i in range(199)]
    forest = PrefixForest.from_calls([*calls, CapturedCall([*spine, 1], [])])
    path = forest.call_path(199)
    assert (np.diff(path) != 1).sum() == 0
    runs = [(np.diff(forest.call_path(i)) != 1).sum() for i in range(200)]
    assert max(runs) <= np.log2(forest.num_tokens)


@pytest.mark.parametrize("name", DATA_SETS)
def test_counts_of_real_agent_runs(name, shared_data):
    """Counts agree with figures that another program made of the same calls."""
    load = runpy.run_path(str(shared_data / "load.py"))["iter_calls"]
    stats = json.loads((shared_data / "stats.json").read_text())[name]
    rows = list(load(next(shared_data.glob(f"{name}.*"))))
    calls = [CapturedCall(r["prompt_ids"], r["output_ids"]) for r in rows]
    forest = PrefixForest.from_calls(calls)
    counts = forest.stats()
    assert counts.num_calls == stats["calls"]
    assert counts.num_logical_tokens == stats["naive_tokens"]
    assert forest.num_tokens == stats["trie_tokens_all"]
    assert forest.num_edges == stats["sampled_tokens"]
    for i, call in enumerate(calls):
        assert np.array_equal(forest.token_ids[forest.call_path(i)], call.token_ids)
    for key in ("group", "episode"):
        apart = [CapturedCall(r["prompt_ids"], r["output_ids"], provenance=r[key]) for r in rows]
        counts = PrefixForest.from_calls(apart).stats()
        assert counts.num_tokens == stats[f"trie_tokens_per_{key}"]
        assert counts.num_path_tokens == stats[f"maximal_path_tokens_per_{key}"]
        assert counts.num_leaves == stats[f"leaves_per_{key}"]
        assert counts.num_branch_points == stats[f"branch_points_per_{key}"]
        assert counts.max_branch_depth == stats[f"max_branch_depth_per_{key}"]
    assert PrefixForest.from_calls(calls).stats().num_branch_points == stats["branch_points_all"]
    assert counts.longest_path == stats["longest_call"]["tokens"]


def test_the_forest_half_needs_no_torch():
    code = (
        "import sys, prefix_rewrite.fragments, prefix_rewrite.sharing, prefix_rewrite.cli;"
        "from prefix_rewrite import CapturedCall, PrefixForest;"
        "PrefixForest.from_calls([CapturedCall([1], [2])]).split(2);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
