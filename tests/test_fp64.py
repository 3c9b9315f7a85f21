"""In fp64, a forest equals each of its calls as a forest of its own: no rounding hides a fault.

Both sides run through our own ops, since transformers computes parts of a model in fp32 whatever
its weights are; what those ops compute is tested against plain loops and against the models.
"""

from __future__ import annotations

import pytest
import torch
from compiled import CORE_FAMILIES
from families import build_model
from forests import SHAPES, calls_of
from oracle import Result, assert_equal_results, edge_weights, run_forest, take_gradients
from wide import fp64_throughout

from prefix_rewrite import PrefixForest, prefix_compile


@pytest.fixture(scope="module", params=CORE_FAMILIES)
def compiled(request):
    model = build_model(request.param, dtype=torch.float64)
    return prefix_compile(model, backend=fp64_throughout)


@pytest.mark.parametrize("shape", ["nested", "fork_in_chunk", "fork_in_conv", "many_roots"])
def test_forest_equals_calls_alone(compiled, shape):
    calls = calls_of(SHAPES[shape])
    forest = PrefixForest.from_calls(calls)
    got = run_forest(compiled, forest)
    assert got.logprobs.dtype == torch.float64
    weights = edge_weights(forest.num_edges).split([call.num_sampled for call in calls])
    compiled.zero_grad()
    alone = []
    for call, weight in zip(calls, weights, strict=True):
        logprobs = compiled(PrefixForest.from_calls([call])).logprobs
        (logprobs * weight).sum().backward()
        alone.append(logprobs.detach())
    expected = Result(torch.cat(alone), take_gradients(compiled))
    assert_equal_results(got, expected, logprobs=1e-11, gradients=1e-9)
