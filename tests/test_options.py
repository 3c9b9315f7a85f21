"""Temperature, entropy and logits mean what they say, with gradients."""

from __future__ import annotations

import pytest
import torch
from compiled import shared_pair
from families import forward_rows
from forests import SHAPES, calls_of
from oracle import Result, assert_equal_results, edge_weights, take_gradients

from prefix_rewrite import PrefixForest, PrefixRewriteError


@pytest.fixture(scope="module", params=["llama", "granitemoehybrid", "handwritten"])
def pair(request):
    """Heads of one linear layer, of a scaled one, and of one with a bias."""
    return shared_pair(request.param)


CALLS = calls_of(SHAPES["nested"])


def rows_of_logits(model: torch.nn.Module) -> torch.Tensor:
    """[E, V] logits at each edge, from each call alone."""
    rows = []
    for call in CALLS:
        at = torch.from_numpy(call.sampled).nonzero()[:, 0] - 1
        rows.append(forward_rows(model, torch.from_numpy(call.token_ids)[None])[0, at])
    return torch.cat(rows)


def targets() -> torch.Tensor:
    return torch.cat([torch.from_numpy(call.token_ids[call.sampled]) for call in CALLS])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_temperature_and_entropy_follow_their_definition(pair, temperature):
    model, compiled = pair
    weights = edge_weights(len(targets())).float()

    model.zero_grad()
    log_probs = (rows_of_logits(model) / temperature).log_softmax(-1)
    logprobs = log_probs.gather(1, targets()[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    (weights * logprobs + weights.flip(0) * entropy).sum().backward()
    expected = Result(torch.cat([logprobs, entropy]).detach(), take_gradients(model))

    out = compiled(PrefixForest.from_calls(CALLS), temperature=temperature, entropy=True)
    (weights * out.logprobs + weights.flip(0) * out.entropy).sum().backward()
    got = Result(torch.cat([out.logprobs, out.entropy]).detach(), take_gradients(model))
    assert_equal_results(got, expected)


def test_logits_are_the_models_own_at_each_edge_with_their_gradient(pair):
    model, compiled = pair
    out = compiled(PrefixForest.from_calls(CALLS), logits=True)
    mix = torch.linspace(-1, 1, out.logits.numel()).view_as(out.logits)
    (out.logits * mix).sum().backward()
    got = Result(out.logits.detach(), take_gradients(model))
    rows = rows_of_logits(model)
    assert out.logits.shape == rows.shape and out.logits.dtype == rows.dtype
    (rows * mix).sum().backward()
    assert_equal_results(got, Result(rows.detach(), take_gradients(model)))


def test_options_do_not_change_the_logprobs(pair):
    _, compiled = pair
    forest = PrefixForest.from_calls(CALLS)
    plain = compiled(forest).logprobs
    for options in ({"entropy": True}, {"logits": True}, {"entropy": True, "logits": True}):
        torch.testing.assert_close(compiled(forest, **options).logprobs, plain, atol=1e-5, rtol=0)
    with torch.no_grad():
        assert torch.equal(compiled(forest).logprobs, plain)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature):
    _, compiled = shared_pair("llama")
    with pytest.raises(PrefixRewriteError, match="temperature must be above 0, got"):
        compiled(PrefixForest.from_calls(CALLS), temperature=temperature)
