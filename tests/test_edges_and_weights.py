"""One edge a sampled token, in the caller's order, with the caller's weight: nothing else."""

from __future__ import annotations

import random

import networkx as nx
import pytest
import torch
from compiled import shared_pair
from forests import SHAPES, calls_of
from oracle import assert_equal_results, run_forest, run_rows, worst_gradient

from prefix_rewrite import CapturedCall, PrefixForest


@pytest.fixture(scope="module", params=["llama", "bamba"])
def pair(request):
    return shared_pair(request.param)


CONTEXT, SAMPLED = [5, 6, 7, 8, 9, 10], [11, 12, 13]

# Sets of calls that tempt an implementation to drop, merge or misplace an edge.
AWKWARD = {
    "equal calls": [CapturedCall(CONTEXT, SAMPLED)] * 3,
    "a call that is a prefix of another": [
        CapturedCall([*CONTEXT, *SAMPLED], [14, 15]),
        CapturedCall(CONTEXT, SAMPLED),
        CapturedCall(CONTEXT, SAMPLED[:1]),
    ],
    "one call's sample inside another's context": [
        CapturedCall(CONTEXT, SAMPLED),
        CapturedCall([*CONTEXT, 11], [12, 20]),
    ],
    "nothing sampled": [CapturedCall([*CONTEXT, 21], []), CapturedCall(CONTEXT, [22])],
    "one-token calls": [CapturedCall([5], []), CapturedCall([5], [6]), CapturedCall([7], [8])],
    "one token sampled at the end of the shared part": [
        CapturedCall(CONTEXT, [30]),
        CapturedCall(CONTEXT, [31]),
    ],
    "several sampled spans": [
        CapturedCall.from_tokens([5, 6, 7, 8, 9, 10, 11], [0, 0, 1, 0, 0, 1, 1]),
        CapturedCall.from_tokens([5, 6, 7, 8, 9, 10, 12], [0, 1, 1, 0, 1, 0, 1]),
    ],
    "equal up to a mismatch": [CapturedCall([1, 2, 3], [4]), CapturedCall([1, 2, 9], [4, 5])],
    "equal tokens that must not share": [
        CapturedCall(CONTEXT, SAMPLED, provenance=step) for step in (1, 2)
    ],
}


@pytest.mark.parametrize("case", AWKWARD)
def test_every_sampled_token_has_its_edge_and_its_weight(pair, case):
    model, compiled = pair
    calls = AWKWARD[case]
    forest = PrefixForest.from_calls(calls)
    sampled = [int(call.sampled.sum()) for call in calls]
    assert forest.num_edges == sum(sampled)
    assert [len(part) for part in compiled(forest).per_call()] == sampled
    assert_equal_results(run_forest(compiled, forest), run_rows(model, calls))


@pytest.mark.parametrize("seed", range(3))
def test_results_follow_the_order_of_the_calls(pair, seed):
    model, compiled = pair
    calls = [*calls_of(SHAPES["nested"]), *AWKWARD["equal calls"], CapturedCall([3], [])]
    order = list(range(len(calls)))
    random.Random(seed).shuffle(order)
    straight = compiled(PrefixForest.from_calls(calls)).per_call()
    shuffled = compiled(PrefixForest.from_calls([calls[i] for i in order])).per_call()
    for i, logprobs in zip(order, shuffled, strict=True):
        torch.testing.assert_close(logprobs, straight[i], atol=1e-5, rtol=0)


def test_opposite_weights_of_equal_calls_cancel_exactly(pair):
    _, compiled = pair
    forest = PrefixForest.from_calls([CapturedCall(CONTEXT, SAMPLED)] * 2)
    ones = torch.ones(len(SAMPLED))
    got = run_forest(compiled, forest, torch.cat([ones, -ones]))
    first, second = got.logprobs.split(len(SAMPLED))
    assert torch.equal(first, second)
    assert not any(g.any() for g in got.gradients.values() if g is not None)


def test_weights_of_equal_calls_add_up_and_nothing_is_divided(pair):
    model, compiled = pair
    call = CapturedCall(CONTEXT, SAMPLED)
    ones = torch.ones(len(SAMPLED))
    for scales in ([1.0, -0.5], [2.0, 3.0, 4.0], [1000.0]):
        weights = torch.cat([scale * ones for scale in scales])
        got = run_forest(compiled, PrefixForest.from_calls([call] * len(scales)), weights)
        once = run_rows(model, [call], sum(scales) * ones).gradients
        assert worst_gradient(got.gradients, once)[0] < 1e-5


def test_one_forest_two_forests_and_calls_one_at_a_time_accumulate_the_same(pair):
    _, compiled = pair
    calls = calls_of(SHAPES["nested"])
    total = sum(call.num_sampled for call in calls)
    weights = torch.linspace(-1, 1.5, total).split([call.num_sampled for call in calls])
    gradients = []
    for size in (len(calls), 2, 1):
        compiled.zero_grad()
        for begin in range(0, len(calls), size):
            out = compiled(PrefixForest.from_calls(calls[begin : begin + size]))
            (out.logprobs * torch.cat(weights[begin : begin + size])).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in compiled.named_parameters()})
    assert worst_gradient(gradients[1], gradients[0])[0] < 1e-5
    assert worst_gradient(gradients[2], gradients[0])[0] < 1e-5


TREE = {"root": (6, None), (1, "a"): (3, "root"), "b": (2, "root"), 7.5: (4, (1, "a"))}


def make_graph(order: list, unsampled: object = None) -> nx.DiGraph:
    """TREE's nodes inserted in an order; their tokens depend on the name alone."""
    graph = nx.DiGraph()
    for name in order:
        length, _ = TREE[name]
        rng = random.Random(str(name))
        ids = [rng.randrange(3, 90) for _ in range(length)]
        sampled = [i > 0 and name != unsampled for i in range(length)]
        graph.add_node(name, token_ids=ids, sampled=sampled)
    graph.add_edges_from((TREE[name][1], name) for name in reversed(order) if TREE[name][1])
    return graph


def test_results_of_a_graph_do_not_depend_on_insertion_order(pair):
    _, compiled = pair
    names = list(TREE)
    orders = [names, names[::-1], [names[i] for i in (2, 0, 3, 1)]]
    results = [compiled(PrefixForest.from_graph(make_graph(o))).per_node() for o in orders]
    for result in results:
        assert set(result) == set(TREE)
        for name in TREE:
            torch.testing.assert_close(result[name], results[0][name], atol=1e-5, rtol=0)


def test_a_node_that_is_not_sampled_leaves_the_others_bit_identical(pair):
    _, compiled = pair
    whole = compiled(PrefixForest.from_graph(make_graph(list(TREE)))).per_node()
    forest = PrefixForest.from_graph(make_graph(list(TREE), unsampled="b"))
    partial = compiled(forest).per_node()
    assert not len(partial["b"]) and forest.num_edges == sum(map(len, whole.values())) - 1
    assert all(torch.equal(partial[name], whole[name]) for name in TREE if name != "b")


def test_roots_of_equal_tokens_keep_their_own_results(pair):
    model, compiled = pair
    graph = nx.DiGraph()
    for name in ("left", "right"):
        graph.add_node(name, token_ids=CONTEXT, sampled=[i > 2 for i in range(len(CONTEXT))])
    forest = PrefixForest.from_graph(graph)
    assert forest.num_tokens == 2 * len(CONTEXT)
    out = compiled(forest).per_node()
    torch.testing.assert_close(out["left"], out["right"], atol=1e-6, rtol=0)
    calls = [CapturedCall(CONTEXT[:3], CONTEXT[3:])] * 2
    assert_equal_results(run_forest(compiled, forest), run_rows(model, calls))


def test_siblings_of_equal_tokens_get_equal_results_in_any_place(pair):
    """Position is depth, not place in storage."""
    _, compiled = pair
    graph = nx.DiGraph()
    graph.add_node("p", token_ids=CONTEXT)
    for name in "abc":
        graph.add_node(name, token_ids=[20, 21, 22, 23], sampled=[True] * 4)
        graph.add_edge("p", name)
    out = compiled(PrefixForest.from_graph(graph)).per_node()
    torch.testing.assert_close(out["b"], out["a"], atol=2e-6, rtol=0)
    torch.testing.assert_close(out["c"], out["a"], atol=2e-6, rtol=0)
