"""Activation checkpointing is honoured: the same numbers, and layers really are recomputed."""

from __future__ import annotations

import warnings

import pytest
import torch
from dispatch import Watch
from families import build_model
from forests import SHAPES, calls_of
from oracle import (
    Result,
    assert_equal_results,
    edge_weights,
    run_forest,
    run_rows,
    take_gradients,
)

from prefix_rewrite import PrefixForest, prefix_compile

CALLS = calls_of(SHAPES["nested"])
HIDDEN, FEED_FORWARD = 32, 56  # a width that no other product in the models has


def build(family: str, **settings) -> torch.nn.Module:
    return build_model(family, intermediate_size=FEED_FORWARD, num_hidden_layers=2, **settings)


@pytest.fixture(autouse=True)
def deprecated_names():
    """Newer transformers deprecate the names that all versions have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`gradient_checkpointing_", FutureWarning)
        yield


def enable(model: torch.nn.Module, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def products(compiled: torch.nn.Module, forest: PrefixForest) -> tuple[int, int]:
    """Products that map hidden states to the feed-forward width, in forward and in backward.

    The backward has one a layer of its own, the down projection's.
    """
    counts = [0, 0]
    phase = 0

    def note(func, args, out):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            maps = (left.shape[-1], right.shape[-1]) == (HIDDEN, FEED_FORWARD)
            counts[phase] += maps and left.shape[0] not in (HIDDEN, FEED_FORWARD)

    with Watch(note):
        total = compiled(forest).logprobs.sum()
        phase = 1
        total.backward()
    compiled.zero_grad()
    return counts[0], counts[1]


def assert_recomputed(checkpointed: tuple[int, int], plain: tuple[int, int]) -> None:
    assert checkpointed[0] == plain[0] > 0
    assert checkpointed[1] == plain[1] + plain[0], "the backward repeats the forward"


SETTINGS = {"llama": {}, "bamba": {"attn_layer_indices": [1]}}


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("family", SETTINGS)
def test_checkpointed_layers_are_right_and_recomputed(family, reentrant):
    model = build(family, **SETTINGS[family])
    forest = PrefixForest.from_calls(CALLS)
    expected = run_rows(model, CALLS)
    if reentrant:  # once enabled before the capture, once after
        enable(model, reentrant)
        compiled = prefix_compile(model)
        checkpointed = products(compiled, forest)
        assert_equal_results(run_forest(compiled, forest), expected)
        model.gradient_checkpointing_disable()
        plain = products(compiled, forest)
    else:
        compiled = prefix_compile(model)
        plain = products(compiled, forest)
        enable(model, reentrant)
        checkpointed = products(compiled, forest)
        assert_equal_results(run_forest(compiled, forest), expected)
    assert_recomputed(checkpointed, plain)
    check_forests_in_flight(model, compiled)


def check_forests_in_flight(model: torch.nn.Module, compiled: torch.nn.Module) -> None:
    """The recomputation of one forest must not use the plan of the other."""
    enable(model, False)
    sets = [calls_of([(9, [(4, []), (3, [])])]), calls_of([(6, [(5, []), (5, [])])], seed=1)]
    forests = [PrefixForest.from_calls(calls) for calls in sets]
    compiled.zero_grad()
    outputs = [compiled(forest) for forest in forests]
    for i in (1, 0):
        (outputs[i].logprobs * edge_weights(forests[i].num_edges).float()).sum().backward()
        got = Result(outputs[i].logprobs.detach(), take_gradients(compiled))
        assert_equal_results(got, run_rows(model, sets[i]))


def test_checkpoints_are_honoured_by_a_compiling_backend():
    model = build("llama")
    expected = run_rows(model, CALLS)
    forest = PrefixForest.from_calls(CALLS)
    compiled = prefix_compile(model, backend="aot_eager")
    plain = products(compiled, forest)
    enable(model, False)
    assert_equal_results(run_forest(compiled, forest), expected)
    assert_recomputed(products(compiled, forest), plain)
