"""A captured call holds the exact ids it was given, or says what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.errors import ForestError


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda ids: np.asarray(ids, dtype=np.int32),
        lambda ids: np.asarray(ids, dtype=np.uint64),
        lambda ids: torch.tensor(ids, dtype=torch.int64),
        lambda ids: torch.tensor(ids, dtype=torch.int16)[::1],
    ],
)
def test_ids_are_kept_whatever_holds_them(make):
    call = CapturedCall(make([7, 0, 3]), make([9, 9]))
    assert call.token_ids.dtype == np.int64
    assert call.token_ids.tolist() == [7, 0, 3, 9, 9]
    assert call.sampled.dtype == np.bool_
    assert call.sampled.tolist() == [False] * 3 + [True] * 2
    assert (call.num_tokens, call.num_sampled) == (5, 2)


def test_a_call_keeps_a_snapshot():
    ids, routes = np.array([1, 2, 3]), np.array([[0], [1], [2]])
    mask = np.array([False, True, True])
    call = CapturedCall.from_tokens(ids, mask, routing=routes)
    ids[:], routes[:], mask[:] = 0, 0, False
    assert call.token_ids.tolist() == [1, 2, 3]
    assert call.routing is not None and call.routing.tolist() == [[0], [1], [2]]
    assert call.num_sampled == 2


def test_zero_length_samples_are_fine():
    assert CapturedCall([1, 2], []).num_sampled == 0
    assert CapturedCall.from_tokens([1], [False]).num_tokens == 1


@pytest.mark.parametrize("mask", [[0, 1, 0, 1], [False, True, False, True]])
def test_a_mask_may_have_several_spans(mask):
    for kind in (list, np.asarray, torch.tensor):
        call = CapturedCall.from_tokens([4, 5, 6, 7], kind(mask))
        assert call.sampled.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CapturedCall([1, -100, 2], [3]), "context_ids must be >= 0, got -100 at pos"),
        (lambda: CapturedCall([1], [-1]), "sampled_ids must be >= 0"),
        (lambda: CapturedCall([1.0, 2.0], [3]), "context_ids must be integers, got float64"),
        (lambda: CapturedCall([1], torch.tensor([0.5])), "sampled_ids must be integers"),
        (lambda: CapturedCall([True], [3]), "must be integers, got bool"),
        (lambda: CapturedCall([2**63], [3]), "must fit in int64"),
        (lambda: CapturedCall("ab", [3]), "must be integers"),
        (lambda: CapturedCall([[1, 2]], [3]), r"one dimension, got shape \(1, 2\)"),
        (lambda: CapturedCall([[1], [2, 3]], [3]), "context_ids must be an array of integers"),
        (lambda: CapturedCall(5, [3]), r"one dimension, got shape \(\)"),
        (lambda: CapturedCall([], [3, 4]), "must have a context, got sampled first token 3"),
        (lambda: CapturedCall([], []), "at least one token"),
        (lambda: CapturedCall.from_tokens([1, 2], [True, False]), "must have a context"),
        (lambda: CapturedCall.from_tokens([1, 2], [False]), r"2 in all, got shape \(1,\)"),
        (lambda: CapturedCall.from_tokens([1, 2], [0, 2]), "must be boolean"),
        (lambda: CapturedCall.from_tokens([1, 2], [0.0, 1.0]), "must be boolean"),
        (lambda: CapturedCall([1], [2], routing=[[1]]), r"2 in all, got shape \(1, 1\)"),
        (lambda: CapturedCall([1], [2], routing=3), "one row a token"),
        (lambda: CapturedCall([1], [2], routing=[0.5, 0.5]), "routing must be integers"),
        (lambda: CapturedCall([1], [2], provenance=[3]), "hashable, got list"),
    ],
)
def test_malformed_input_is_refused_by_name(make, message):
    with pytest.raises(ForestError, match=message):
        make()
