"""Families with experts, and those whose own fp32 rounding reaches the usual bounds.

The truth is the model in fp64 throughout, each call alone. A forest equals it in fp64 to the last
digits, and in fp32 as closely as the untouched model's own rows do.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from families import MOE_FAMILIES, ROUGH_FAMILIES, VOCAB, build_model
from forests import SHAPES, calls_of
from oracle import (
    Result,
    assert_equal_results,
    edge_weights,
    run_forest,
    run_rows,
    take_gradients,
    worst_gradient,
)
from torch import nn
from wide import fp64_throughout

from prefix_rewrite import CapturedCall, PrefixForest, prefix_compile
from prefix_rewrite.ops.chunk_tree import ChunkPlanner
from prefix_rewrite.segments import IntArray, SegmentTable

CASES = ("nested", "fork_in_chunk", "fork_in_conv", "many_roots")
LOGPROBS, GRADIENTS = 1e-5, 1e-4


@functools.cache
def exact(family: str) -> nn.Module:
    """The compiled model in fp64."""
    return prefix_compile(build_model(family, dtype=torch.float64), backend=fp64_throughout)


@functools.cache
def truth(family: str, shape: str) -> Result:
    """Each call alone in fp64."""
    compiled, calls = exact(family), calls_of(SHAPES[shape])
    weights = edge_weights(sum(c.num_sampled for c in calls)).split([c.num_sampled for c in calls])
    compiled.zero_grad()
    alone = []
    for call, weight in zip(calls, weights, strict=True):
        logprobs = compiled(PrefixForest.from_calls([call])).logprobs
        (logprobs * weight).sum().backward()
        alone.append(logprobs.detach())
    return Result(torch.cat(alone), take_gradients(compiled))


@pytest.fixture(scope="module", params=(*ROUGH_FAMILIES, *MOE_FAMILIES))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def pair(family):
    model = build_model(family)
    return model, prefix_compile(model)


def distance(got: Result, expected: Result) -> tuple[float, float]:
    """Largest difference of log-probabilities, largest relative difference of a gradient."""
    logprobs = float((got.logprobs - expected.logprobs).abs().max())
    return logprobs, worst_gradient(got.gradients, expected.gradients)[0]


def _other_samples(call: CapturedCall) -> CapturedCall:
    """The same context and first sample, so that the forest keeps its shape."""
    context, sampled = call.token_ids[~call.sampled], call.token_ids[call.sampled]
    return CapturedCall(context, [sampled[0], *(sampled[1:] + 1) % VOCAB])


@pytest.mark.parametrize("shape", CASES)
def test_forest_equals_calls_alone_in_fp64(family, shape):
    got = run_forest(exact(family), PrefixForest.from_calls(calls_of(SHAPES[shape])))
    assert_equal_results(got, truth(family, shape), logprobs=1e-11, gradients=1e-9)


@pytest.mark.parametrize("shape", CASES)
def test_forest_rounds_no_more_than_rows_do(family, pair, shape):
    model, compiled = pair
    calls = calls_of(SHAPES[shape])
    rows = distance(run_rows(model, calls), truth(family, shape))
    assert rows[0] <= 10 * LOGPROBS and rows[1] <= 10 * GRADIENTS, f"not the same model: {rows}"
    forest = distance(run_forest(compiled, PrefixForest.from_calls(calls)), truth(family, shape))
    assert forest[0] <= max(LOGPROBS, 2 * rows[0]), f"forest {forest}, rows {rows}"
    assert forest[1] <= max(GRADIENTS, 2 * rows[1]), f"forest {forest}, rows {rows}"


def test_a_sibling_changes_nothing(family, pair):
    """Experts' groups grow and shrink with a sibling, and so may the last bit of a product."""
    _, compiled = pair
    calls = calls_of(SHAPES["star"])
    others = [calls[0], *(_other_samples(call) for call in calls[1:])]
    before = compiled(PrefixForest.from_calls(calls)).per_call()[0]
    after = compiled(PrefixForest.from_calls(others)).per_call()[0]
    bound = 1e-6 if family in MOE_FAMILIES else 0.0
    assert float((before - after).detach().abs().max()) <= bound


def test_a_lost_state_is_seen(family, pair, monkeypatch):
    """Break the product: scans and convs start every segment from nothing."""
    if family == "gpt_oss":
        pytest.skip("attention alone keeps no state")
    forest = PrefixForest.from_calls(calls_of(SHAPES["nested"]))
    planned = ChunkPlanner.plan

    def apart(segments: SegmentTable) -> SegmentTable:
        return SegmentTable.from_parents([-1] * segments.num_segments, segments.length.tolist())

    def lost(segments: SegmentTable) -> IntArray:
        parent = np.arange(-1, segments.num_tokens - 1)
        parent[segments.start] = -1
        return parent

    monkeypatch.setattr(
        ChunkPlanner, "plan", lambda self, segments: planned(self, apart(segments))
    )
    monkeypatch.setattr(SegmentTable, "parent_token", property(lost))
    broken = run_forest(pair[1], forest)
    logprobs, gradient = distance(broken, truth(family, "nested"))
    assert logprobs >= 100 * LOGPROBS and gradient >= 100 * GRADIENTS
