"""One rewrite serves every forest: few recompiles, and forests in flight stay apart."""

from __future__ import annotations

import itertools

import pytest
import torch
from compiled import shared_pair
from families import build_model
from forests import SHAPES, calls_of
from one_layer import OneLayer
from oracle import (
    Result,
    assert_equal_results,
    edge_weights,
    run_forest,
    run_rows,
    take_gradients,
)

from prefix_rewrite import CapturedCall, PrefixForest, prefix_compile

# Totals of tokens, segments of one token among them; then 12 shapes that differ in everything.
SIZES = (1, 2, 3, 5, 63, 64, 65, 257)


def forests_of_all_shapes() -> list[list[CapturedCall]]:
    sets = []
    for size in SIZES:
        row = [3 + i % 90 for i in range(size)]
        calls = [CapturedCall(row[:-1], row[-1:]) if size > 1 else CapturedCall(row, [])]
        if size > 3:  # a leaf of one token, and one that leaves in the middle
            calls.append(CapturedCall(row[:-1], [95]))
            calls.append(CapturedCall(row[: size // 2], [94, 93]))
        sets.append(calls)
    sets += [calls_of(trees) for trees in SHAPES.values()]
    sets += [calls_of([(9, [(4, [])] * n)] * n, seed=n) for n in (2, 3, 5, 8)]
    return sets


class Counting:
    """A backend that runs the graph as it is, and counts how often it is asked to."""

    def __init__(self):
        self.compiled = 0

    def __call__(self, graph_module, inputs):
        self.compiled += 1
        return graph_module.forward


@pytest.mark.parametrize("family", ["bamba", "handwritten"])
def test_at_most_two_recompiles_over_twenty_forests(family):
    backend = Counting()
    model = build_model(family)
    compiled = prefix_compile(model, backend=backend)
    warm_up = calls_of(SHAPES["star"], seed=99)
    run_forest(compiled, PrefixForest.from_calls(warm_up))
    after_warm_up = backend.compiled
    sets = forests_of_all_shapes()
    assert len(sets) == 20
    for calls in sets:
        got = run_forest(compiled, PrefixForest.from_calls(calls))
        assert_equal_results(got, run_rows(model, calls))
    assert backend.compiled - after_warm_up <= 2


@pytest.mark.parametrize("family", ["llama", "bamba", "zamba2"])
def test_forests_in_flight_stay_apart(family):
    """Three forwards, two with as many tokens but other shapes, before any backward."""
    model, compiled = shared_pair(family)
    sets = [calls_of([(9, [(4, []), (3, [])])]), calls_of([(6, [(5, []), (5, [])])], seed=1)]
    sets.append(calls_of(SHAPES["fork_in_chunk"], seed=2))
    forests = [PrefixForest.from_calls(calls) for calls in sets]
    assert forests[0].num_tokens == forests[1].num_tokens
    compiled.zero_grad()
    outputs = [compiled(forest) for forest in forests]
    for i in (1, 2, 0):
        (outputs[i].logprobs * edge_weights(forests[i].num_edges).float()).sum().backward()
        got = Result(outputs[i].logprobs.detach(), take_gradients(compiled))
        assert_equal_results(got, run_rows(model, sets[i]))


def test_the_same_forest_gives_the_same_bits_and_its_plan_is_not_stale():
    _, compiled = shared_pair("bamba")
    forest = PrefixForest.from_calls(calls_of(SHAPES["nested"]))
    other = PrefixForest.from_calls(calls_of(SHAPES["star"]))
    first = run_forest(compiled, forest)
    run_forest(compiled, other)
    again = run_forest(compiled, forest)
    assert torch.equal(again.logprobs, first.logprobs)
    assert all(torch.equal(again.gradients[n], g) for n, g in first.gradients.items())


@pytest.mark.parametrize("family", ["llama", "bamba", "falcon_h1"])
def test_a_path_gives_the_same_result_in_any_company(family):
    _, compiled = shared_pair(family)
    path = CapturedCall([5, 6, 7, 8, 9, 10, 11], [12, 13, 14])
    companies = [
        [],
        [CapturedCall([5, 6, 7, 20], [21, 22]), CapturedCall([30, 31], [32])],
        calls_of(SHAPES["fork_in_chunk"]),
    ]
    results = [compiled(PrefixForest.from_calls([path, *c])).per_call()[0] for c in companies]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=0)


def test_many_modes_in_turn_need_no_reset():
    """More variants than the compiler keeps by default: each is captured once, and stays."""
    backend = Counting()
    model = OneLayer(between=torch.nn.Dropout(0.0))
    compiled = prefix_compile(model, backend=backend)
    forest = PrefixForest.from_calls(calls_of(SHAPES["nested"]))
    plain = compiled(forest).logprobs
    for _ in range(2):
        for training, grad, entropy, logits in itertools.product((True, False), repeat=4):
            model.train(training)
            with torch.set_grad_enabled(grad):
                out = compiled(forest, entropy=entropy, logits=logits)
            torch.testing.assert_close(out.logprobs, plain, atol=1e-6, rtol=0)
            assert out.logprobs.requires_grad == grad
    assert backend.compiled == 16
