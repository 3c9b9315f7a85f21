"""Every leak between tokens is refused, and its nearest harmless twin is accepted and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forests import SHAPES, calls_of
from hostile_experts import HOSTILE_EXPERTS
from hostile_models import HOSTILE_MODELS
from hostile_ops import HOSTILE_OPS
from hostile_outputs import HOSTILE_OUTPUTS
from oracle import assert_equal_results, run_forest, run_rows
from torch import Tensor, nn

from prefix_rewrite import PrefixForest, UnsupportedModelError, prefix_compile

PAIRS = HOSTILE_OPS | HOSTILE_EXPERTS | HOSTILE_MODELS | HOSTILE_OUTPUTS


def logits_of_row(model: nn.Module, ids: Tensor) -> Tensor:
    output: Any = model(ids, torch.arange(ids.shape[1])[None])
    return output if isinstance(output, Tensor) else output[0]


@pytest.mark.parametrize("name", PAIRS)
def test_a_leak_is_refused_by_name(name):
    with pytest.raises(UnsupportedModelError) as caught:
        prefix_compile(PAIRS[name].build(leak=True))
    assert PAIRS[name].names in str(caught.value)
    where = [finding.source for finding in caught.value.findings]
    assert all(where), "each finding must say where"


@pytest.mark.parametrize("name", PAIRS)
def test_its_twin_is_exact(name):
    model = PAIRS[name].build(leak=False)
    calls = calls_of(SHAPES["nested"])
    expected = run_rows(model, calls, forward=logits_of_row)
    got = run_forest(prefix_compile(model), PrefixForest.from_calls(calls))
    assert_equal_results(got, expected)


def test_bypass_trains_without_a_head_on_later_tokens():
    model = PAIRS["second_head_on_later_tokens"].build(leak=True)
    with pytest.warns(UserWarning, match="next_head.*is bypassed and gets no gradient"):
        compiled = prefix_compile(model, mtp="bypass")
    calls = calls_of(SHAPES["nested"])
    got = run_forest(compiled, PrefixForest.from_calls(calls))
    assert_equal_results(got, run_rows(model, calls, forward=logits_of_row))
    assert got.gradients["next_head.weight"] is None


def test_bypass_does_not_excuse_a_leak_into_the_logits():
    model = PAIRS["logits_of_the_last_token"].build(leak=True)
    with pytest.raises(UnsupportedModelError, match="getitem"):
        prefix_compile(model, mtp="bypass")
