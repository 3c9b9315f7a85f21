"""In bf16 a forest is as near to the truth as rows are; what is fp32 stays fp32."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from compiled import CORE_FAMILIES, changed, shared_pair
from families import build_model
from forests import SHAPES, calls_of
from oracle import Gradients, Result, assert_equal_results, run_forest, run_rows

from prefix_rewrite import PrefixForest, prefix_compile

SETS = [calls_of(SHAPES[name], seed=seed) for seed, name in enumerate(("nested", "fork_in_chunk"))]
BF16 = torch.bfloat16


def distances(result: Result, truth: Result) -> torch.Tensor:
    """Squared distances [2] to the truth: of log-probabilities, of gradients (each relative)."""
    logprobs = (result.logprobs - truth.logprobs).float().square().sum()
    gradients = torch.zeros(())
    for name, exact in truth.gradients.items():
        mine = result.gradients[name]
        if exact is not None and exact.any():
            gradients += (as_float(mine) - exact).square().sum() / exact.square().sum()
    return torch.stack([logprobs, gradients])


def as_float(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.float()


@functools.cache
def squared_errors(family: str) -> torch.Tensor:
    """[2, 2]: of the forest and of rows, in log-probabilities and in gradients."""
    model, compiled = shared_pair(family, BF16)
    exact = copy.deepcopy(model).float()
    total = torch.zeros(2, 2)
    for calls in SETS:
        truth = run_rows(exact, calls)
        forest = run_forest(compiled, PrefixForest.from_calls(calls))
        assert forest.logprobs.dtype == torch.float32
        assert_same_dtypes(forest.gradients, model)
        total[0] += distances(forest, truth)
        total[1] += distances(run_rows(model, calls), truth)
    return total


def assert_same_dtypes(gradients: Gradients, model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        assert gradient is None or gradient.dtype == parameter.dtype == BF16


@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_the_forests_error_is_at_most_twice_that_of_rows(family):
    forest, rows = squared_errors(family)
    assert (rows > 0).all() and (forest.sqrt() <= 2 * rows.sqrt()).all()


def test_over_all_families_the_forests_error_is_that_of_rows():
    forest, rows = sum(squared_errors(family) for family in CORE_FAMILIES)
    assert (forest.sqrt() <= 1.25 * rows.sqrt()).all(), (forest / rows).sqrt()


def test_parameters_kept_in_fp32_stay_so_and_do_help():
    model = build_model("mamba2", dtype=BF16)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias", ".D")):
            parameter.data = parameter.data.float()
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    assert set(dtypes.values()) == {BF16, torch.float32}
    compiled = prefix_compile(model)
    calls = SETS[0]
    got = run_forest(compiled, PrefixForest.from_calls(calls))
    for name, parameter in model.named_parameters():
        assert got.gradients[name].dtype == parameter.dtype
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    assert {name: value.dtype for name, value in compiled.state_dict().items()} == dtypes
    truth = run_rows(copy.deepcopy(model).float(), calls)
    forest, rows = distances(got, truth), distances(run_rows(model, calls), truth)
    assert (forest.sqrt() <= 2 * rows.sqrt()).all()


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_under_autocast(family):
    model, compiled = shared_pair(family)
    calls = SETS[0]
    truth = run_rows(model, calls)
    with torch.autocast("cpu", BF16):
        rows = run_rows(model, calls)
        got = run_forest(compiled, PrefixForest.from_calls(calls))
    assert got.logprobs.dtype == torch.float32
    forest, plain = distances(got, truth), distances(rows, truth)
    assert (forest.sqrt() <= 1.5 * plain.sqrt()).all(), (forest / plain).sqrt()
    # Nothing of the low precision is left behind.
    assert_equal_results(run_forest(compiled, PrefixForest.from_calls(calls)), truth)


def test_the_softmax_is_in_fp32_over_a_wide_vocabulary():
    model = build_model("llama", dtype=BF16, vocab_size=50_000, num_hidden_layers=1)
    compiled = prefix_compile(model)
    calls = SETS[0]
    out = compiled(PrefixForest.from_calls(calls), logits=True)
    targets = torch.cat([torch.from_numpy(call.token_ids[call.sampled]) for call in calls])
    exact = out.logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert out.logits.dtype == BF16 and exact.min() < -10
    torch.testing.assert_close(out.logprobs, exact, atol=1e-3, rtol=0)
    fused = compiled(PrefixForest.from_calls(calls)).logprobs
    assert fused.dtype == torch.float32
    torch.testing.assert_close(fused, exact, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_extreme_decays_stay_finite_and_right(dtype):
    """Decay exponents of thousands: no exp of a positive number may ever be taken."""
    model, compiled = shared_pair("mamba2", dtype)
    calls = calls_of([(300, [(3, []), (3, [])])])
    extreme = {"A_log": lambda p: p.fill_(6.0), "dt_bias": lambda p: p.fill_(3.0)}
    with changed(model, extreme):
        got = run_forest(compiled, PrefixForest.from_calls(calls))
        expected = run_rows(model, calls)
    assert torch.isfinite(got.logprobs).all()
    assert all(torch.isfinite(g).all() for g in got.gradients.values())
    if dtype == torch.float32:
        assert_equal_results(got, expected)
    else:
        torch.testing.assert_close(got.logprobs, expected.logprobs, atol=0.1, rtol=0.02)
