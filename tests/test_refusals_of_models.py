"""A model that can't be run exactly is refused, by a reason; its nearest neighbour is accepted.

Every refusal names the module that made the call and the line it was made at.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from one_layer import HEADS, WIDTH, OneLayer, causal
from oracle import assert_equal_results, run_forest, run_rows
from torch import nn

from prefix_rewrite import (
    CapturedCall,
    PrefixForest,
    PrefixRewriteError,
    UnsupportedModelError,
    prefix_compile,
)

CALLS = [CapturedCall([5, 6, 7], [8, 9]), CapturedCall([5, 6], [10, 11, 12])]


def sdpa(**options):
    """Attention with options of `F.scaled_dot_product_attention` besides causality."""
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, **{"is_causal": True, **options}
    )


def with_mask(make):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make(q.shape[2]))


def triangle(size):
    return torch.ones(size, size, dtype=torch.bool).tril()


def slope_by_distance(size):
    at = torch.arange(size)
    return torch.where(triangle(size), 0.1 * (at - at[:, None]), -torch.inf)


def keys_twice(q, k, v):
    return causal(q, torch.cat([k, k], 2), torch.cat([v, v], 2))


def ungrouped(q, k, v):
    return causal(q, *(x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v)))


ATTENTION = {
    "a causal mask": (with_mask(triangle), causal, "is given a mask"),
    "alibi": (with_mask(slope_by_distance), sdpa(scale=0.3), "is given a mask"),
    "non-causal": (sdpa(is_causal=False), causal, "is not causal"),
    "dropout": (sdpa(dropout_p=0.25), sdpa(dropout_p=0.0), "attention dropout is 0.25"),
    "other keys": (keys_twice, causal, "'?k'? has .* positions where the model has"),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case):
    refused, accepted, reason = ATTENTION[case]
    with pytest.raises(UnsupportedModelError, match=reason.replace("'?k'?", "k")) as caught:
        prefix_compile(OneLayer(refused))
    for finding in caught.value.findings:
        assert finding.module == "attention"
        assert finding.source.startswith(__file__) or "one_layer.py:" in finding.source
    assert_accepted(OneLayer(accepted))


def test_grouped_queries():
    with pytest.raises(UnsupportedModelError, match="grouped-query attention without enable_gqa"):
        prefix_compile(OneLayer(kv_heads=1))
    assert_accepted(OneLayer(sdpa(enable_gqa=True), kv_heads=1))
    assert_accepted(OneLayer(ungrouped, kv_heads=1))


def per_row(model, x):
    return 3.0 * torch.tanh(model.head(x) / 3.0)


HEADS_OF_MODELS = {
    "over tokens": lambda model, x: model.head(x) - model.head(x).mean(1, keepdim=True),
    "over everything": lambda model, x: model.head(x) - model.head(x).mean(),
    "divided by the length": lambda model, x: model.head(x) / x.shape[1],
    "a weight made of tokens": lambda model, x: x @ (x.mean((0, 1)) * model.head.weight).T,
    "shifted": lambda model, x: model.head(x).roll(1, 1),
    "cut": lambda model, x: model.head(x)[:, :-1],
    "a sum along the row": lambda model, x: model.head(x).cumsum(1),
    "last token only": lambda model, x: model.head(x)[:, -1],
}


@pytest.mark.parametrize("case", HEADS_OF_MODELS)
def test_operations_after_the_head(case):
    with pytest.raises(UnsupportedModelError, match="logits") as caught:
        prefix_compile(OneLayer(finish=HEADS_OF_MODELS[case]))
    assert any(f.source.startswith(__file__) for f in caught.value.findings)


def test_pointwise_operations_after_the_head_are_accepted():
    assert_accepted(OneLayer(finish=per_row))


class FeedForward(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x):
        return x + self.dropout(F.relu(self.linear(x)))


def test_dropout_elsewhere():
    with pytest.raises(UnsupportedModelError, match=r"dropout of 0.2 in training") as caught:
        prefix_compile(OneLayer(between=FeedForward(0.2)))
    assert caught.value.findings[0].module == "between.dropout"
    assert_accepted(OneLayer(between=FeedForward(0.0)))
    assert_accepted(OneLayer(between=FeedForward(0.2)).eval())


def test_dropout_is_refused_only_once_the_model_trains():
    compiled = prefix_compile(OneLayer(between=FeedForward(0.2)).eval())
    forest = PrefixForest.from_calls(CALLS)
    expected = compiled(forest).logprobs
    with pytest.raises(UnsupportedModelError, match="dropout of 0.2"):
        compiled.train()(forest)
    assert torch.equal(compiled.eval()(forest).logprobs, expected)


def two_heads(model, x):
    return model.head(x), model.further(x)


def test_a_head_that_looks_further_ahead():
    model = OneLayer(finish=two_heads)
    model.further = nn.Linear(WIDTH, model.head.out_features)
    with pytest.raises(UnsupportedModelError, match="second vocabulary projection") as caught:
        prefix_compile(model)
    assert caught.value.findings[0].module == "further"
    with pytest.warns(UserWarning, match="further: .* is bypassed"):
        compiled = prefix_compile(model, mtp="bypass")
    got = run_forest(compiled, PrefixForest.from_calls(CALLS))
    assert_equal_results(got, run_rows(model, CALLS, forward=lambda m, ids: m(ids)[0]))
    assert got.gradients["further.weight"] is None


class Branches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def test_control_flow_on_values():
    with pytest.raises(UnsupportedModelError, match="could not be captured as one graph") as error:
        prefix_compile(OneLayer(between=Branches()))
    assert error.value.__cause__ is None and __file__ in error.value.findings[0].source
    assert isinstance(error.value, PrefixRewriteError) and isinstance(error.value, ValueError)


class NoArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self):
        return self.head.weight


def test_a_forward_without_arguments():
    with pytest.raises(UnsupportedModelError, match="forward takes no arguments"):
        prefix_compile(NoArguments())


def test_all_findings_come_in_one_error():
    model = OneLayer(sdpa(is_causal=False, dropout_p=0.1), HEADS_OF_MODELS["shifted"])
    model.between = FeedForward(0.3)
    with pytest.raises(UnsupportedModelError) as caught:
        prefix_compile(model)
    message = str(caught.value)
    for reason in ("is not causal", "attention dropout is 0.1", "dropout of 0.3", "roll"):
        assert reason in message
    assert len(caught.value.findings) == 4 and "4 reason(s)" in message


def test_a_refused_model_is_left_as_it_was():
    model = OneLayer(sdpa(is_causal=False))
    ids = torch.arange(5)[None]
    before, keys = model(ids), set(vars(model))
    with pytest.raises(UnsupportedModelError):
        prefix_compile(model)
    assert torch.equal(model(ids), before) and set(vars(model)) == keys


BAD_ARGUMENTS = {
    "not a module": (lambda: prefix_compile(lambda ids: ids), "model must be an nn.Module, got"),
    "mtp": (lambda: prefix_compile(OneLayer(), mtp="train"), "mtp must be .* got 'train'"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments(case):
    call, message = BAD_ARGUMENTS[case]
    with pytest.raises(PrefixRewriteError, match=message):
        call()


def assert_accepted(model: nn.Module) -> None:
    """Accepted, and right: the same numbers as the model on each call alone."""
    got = run_forest(prefix_compile(model), PrefixForest.from_calls(CALLS))
    assert_equal_results(got, run_rows(model, CALLS, forward=lambda m, ids: m(ids)))
