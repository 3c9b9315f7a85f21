"""Training over fragments is training on the forest that was split."""

from __future__ import annotations

import pytest
import torch
from families import build_model
from forests import SHAPES, calls_of
from oracle import Result, assert_equal_results, edge_weights, run_forest, take_gradients

from prefix_rewrite import PrefixForest, prefix_compile
from prefix_rewrite.fragments import caller_order, gather_calls


@pytest.fixture(scope="module")
def compiled():
    return prefix_compile(build_model("bamba"))


@pytest.mark.parametrize("budget", [24, 40])
def test_fragments_add_up_to_the_forest(compiled, budget):
    calls = [*calls_of(SHAPES["nested"]), *calls_of(SHAPES["star"], seed=5), *calls_of([(20, [])])]
    forest = PrefixForest.from_calls(calls)
    whole = run_forest(compiled, forest)
    weights = edge_weights(forest.num_edges)

    fragments = forest.split(budget)
    assert len(fragments) > 1 and all(f.num_tokens <= budget for f in fragments)
    compiled.zero_grad()
    outputs = [compiled(fragment) for fragment in fragments]
    for fragment, out in zip(fragments, outputs, strict=True):
        own = weights[torch.from_numpy(fragment.edge_ids)]
        (out.logprobs * own.to(out.logprobs)).sum().backward()
    logprobs = torch.cat([out.logprobs.detach() for out in outputs])
    logprobs = logprobs[torch.from_numpy(caller_order(fragments))]

    split = Result(logprobs, take_gradients(compiled))
    assert_equal_results(split, whole, logprobs=1e-5, gradients=1e-5)
    per_call = gather_calls(fragments, [out.per_call() for out in outputs])
    assert torch.equal(torch.cat(per_call).detach(), logprobs)
    assert [len(own) for own in per_call] == [int(call.sampled.sum()) for call in calls]
