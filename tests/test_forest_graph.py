"""A user's own graph is laid out under its own names, or the node that is no forest is named."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.errors import ForestError
from prefix_rewrite.forest import PrefixForest


def search_tree(order=("root", ("a", 1), frozenset({2}))) -> nx.DiGraph:
    """root(3) -> ('a', 1)(2, sampled), {2}(2, the same tokens, last one sampled)."""
    attributes = {
        "root": {"token_ids": [1, 2, 3], "sampled": [False, True, False]},
        ("a", 1): {"token_ids": np.array([7, 8]), "sampled": np.array([True, True])},
        frozenset({2}): {"token_ids": [7, 8], "sampled": [False, True]},
    }
    graph = nx.DiGraph()
    for name in order:
        graph.add_node(name, **attributes[name])
    for child in order:
        if child != "root":
            graph.add_edge("root", child)
    return graph


def test_equal_tokens_under_two_names_stay_apart():
    forest = PrefixForest.from_graph(search_tree())
    assert forest.num_tokens == 7
    assert set(forest.nodes) == set(search_tree())
    assert nx.utils.edges_equal(forest.graph.edges, search_tree().edges, directed=True)


def test_roots_with_equal_tokens_stay_apart():
    graph = nx.DiGraph()
    for name in ("one group", "another group"):
        graph.add_node(name, token_ids=[1, 2, 3], sampled=[False, True, True])
    forest = PrefixForest.from_graph(graph)
    assert (forest.num_tokens, forest.stats().num_roots) == (6, 2)
    first, second = (forest.edges.source[forest.node_edges(name)] for name in graph)
    assert not set(first) & set(second)


def test_results_are_addressable_by_node_whatever_the_insertion_order():
    names = list(search_tree())
    for seed in range(6):
        random.Random(seed).shuffle(names)
        forest = PrefixForest.from_graph(search_tree(names))
        got = {
            name: [
                (forest.segments.position_ids[forest.edges.source[e]], forest.edges.target[e])
                for e in forest.node_edges(name)
            ]
            for name in names
        }
        assert got == {"root": [(0, 2)], ("a", 1): [(2, 7), (3, 8)], frozenset({2}): [(3, 8)]}
        assert [names[i] for i in forest.edges.call] == [
            name for name in names for _ in forest.node_edges(name)
        ]
        for i, name in enumerate(names):
            ids = ([] if name == "root" else [1, 2, 3]) + list(
                search_tree().nodes[name]["token_ids"]
            )
            assert forest.token_ids[forest.call_path(i)].tolist() == ids


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(0, 12))
def test_any_branching_keeps_its_paths_and_its_sampled_tokens(rng, count):
    nodes = {}
    for i in range(count):
        parent = rng.choice([None, *range(i)])
        size = rng.randint(1, 3)
        mask = [rng.random() < 0.5 for _ in range(size)]
        mask[0] &= parent is not None
        nodes[i] = (parent, [rng.randrange(3) for _ in range(size)], mask)
    graph = nx.DiGraph()
    for i in rng.sample(list(nodes), count):
        graph.add_node(i, token_ids=nodes[i][1], sampled=nodes[i][2])
    graph.add_edges_from((parent, i) for i, (parent, _, _) in nodes.items() if parent is not None)
    forest = PrefixForest.from_graph(graph)

    def path(i):
        parent, ids, _ = nodes[i]
        return ([] if parent is None else path(parent)) + ids

    assert forest.num_tokens == sum(len(ids) for _, ids, _ in nodes.values())
    assert nx.utils.edges_equal(forest.graph.edges, graph.edges, directed=True)
    for call, i in enumerate(graph):
        tokens = forest.call_path(call)
        assert forest.token_ids[tokens].tolist() == path(i)
        own = tokens[len(tokens) - len(nodes[i][1]) :]
        edges = forest.node_edges(i)
        assert forest.edges.token[edges].tolist() == own[nodes[i][2]].tolist()
        before = [tokens[tokens.tolist().index(t) - 1] for t in own[nodes[i][2]]]
        assert forest.edges.source[edges].tolist() == before


def test_a_child_starts_from_its_parents_last_token():
    forest = PrefixForest.from_graph(search_tree())
    edge = forest.node_edges(("a", 1))[0]
    assert forest.token_ids[forest.edges.source[edge]] == 3


def test_an_unknown_node_is_named():
    with pytest.raises(ForestError, match="node 'x'"):
        PrefixForest.from_graph(search_tree()).node_edges("x")


def test_node_edges_of_calls():
    forest = PrefixForest.from_calls([CapturedCall([1, 2], [3, 4]), CapturedCall([1, 2], [3, 5])])
    sampled_in = {node: forest.node_edges(node).tolist() for node in forest.nodes}
    assert sorted(sampled_in.values()) == [[0, 2], [1], [3]]


def test_an_empty_graph_is_an_empty_forest():
    for forest in (PrefixForest.from_graph(nx.DiGraph()), PrefixForest.from_calls([])):
        assert (forest.num_tokens, forest.num_edges, forest.num_calls) == (0, 0, 0)
        assert forest.edges.call_offsets.tolist() == [0]
        assert forest.graph.number_of_nodes() == 0
        assert forest.stats().sharing == 1.0


@pytest.mark.parametrize("count", [3_000, 100_000])
def test_a_deep_chain_equals_one_node(count):
    chain = nx.DiGraph()
    for i in range(count):
        chain.add_node(i, token_ids=[i], sampled=[i > 0])
        if i:
            chain.add_edge(i - 1, i)
    forest = PrefixForest.from_graph(chain)
    single = nx.DiGraph()
    single.add_node("all", token_ids=range(count), sampled=np.arange(count) > 0)
    whole = PrefixForest.from_graph(single)
    assert np.array_equal(forest.token_ids, whole.token_ids)
    assert np.array_equal(forest.segments.position_ids, whole.segments.position_ids)
    assert np.array_equal(forest.segments.token_subtree_end, whole.segments.token_subtree_end)
    assert np.array_equal(forest.edges.source, whole.edges.source)
    assert forest.graph.number_of_edges() == count - 1
    assert forest.stats().longest_path == count


def test_a_wide_star():
    star = nx.DiGraph()
    star.add_node("hub", token_ids=[1, 2])
    for i in range(100_000):
        star.add_node(i, token_ids=[i], sampled=[True])
        star.add_edge("hub", i)
    forest = PrefixForest.from_graph(star)
    assert forest.num_edges == 100_000
    assert (forest.edges.source == 1).all()
    assert forest.edges.target.tolist() == list(range(100_000))


def chain(*names, kind=nx.DiGraph) -> nx.DiGraph:
    graph = kind()
    for name in names:
        graph.add_node(name, token_ids=[1, 2])
    graph.add_edges_from(zip(names, names[1:], strict=False))
    return graph


def with_edges(*edges) -> nx.DiGraph:
    graph = chain("a", "b", "c")
    graph.add_edges_from(edges)
    return graph


def with_node(**attributes) -> nx.DiGraph:
    graph = chain("a", "b")
    graph.nodes["b"].clear()
    graph.nodes["b"].update(attributes)
    return graph


def with_root(**attributes) -> nx.DiGraph:
    graph = chain("a", "b")
    graph.nodes["a"].update(attributes)
    return graph


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (with_edges(("c", "a")), "no cycle, got one through node '[abc]'"),
        (with_edges(("a", "c")), r"node 'c' must have one parent at most, got \['b', 'a'\]"),
        (with_edges(("a", "a")), "node 'a' must not be its own parent"),
        (chain("a", "b", kind=nx.Graph), "undirected graph.*'a'"),
        (chain("a", "b", kind=nx.MultiDiGraph), "multigraph.*'a'"),
        ({"a": ["b"]}, "nx.DiGraph, got dict"),
        (with_node(), "node 'b': token_ids must hold at least one token"),
        (with_node(token_ids=[]), "node 'b': token_ids must hold at least one token"),
        (with_node(token_ids=[1, -2]), "node 'b': token_ids must be >= 0, got -2"),
        (with_node(token_ids=[1.5]), "node 'b': token_ids must be integers"),
        (with_node(token_ids=[1, 2], sampled=[True]), "node 'b': sampled must be one boolean"),
        (with_root(sampled=[True, True]), "node 'a': a sampled token must have a context"),
    ],
)
def test_what_is_no_forest_is_refused_by_name(graph, message):
    with pytest.raises(ForestError, match=message):
        PrefixForest.from_graph(graph)


@pytest.mark.parametrize(
    "graph",
    [with_edges(), with_root(sampled=[False, True]), with_node(token_ids=[1], sampled=[1])],
)
def test_the_nearest_accepted_graphs(graph):
    assert PrefixForest.from_graph(graph).num_tokens >= 3
