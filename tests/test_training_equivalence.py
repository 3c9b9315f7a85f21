"""Twenty optimiser steps by forest and by rows end in the same weights."""

from __future__ import annotations

import pytest
import torch
from compiled import CORE_FAMILIES, shared_pair
from forests import SHAPES, calls_of
from oracle import run_forest, run_rows

from prefix_rewrite import PrefixForest

STEPS = 20


@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_training_by_forest_equals_training_by_rows(family):
    model, compiled = shared_pair(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        by_rows = train(model, lambda calls: run_rows(model, calls))
        model.load_state_dict(before)
        by_forest = train(
            model, lambda calls: run_forest(compiled, PrefixForest.from_calls(calls))
        )
    finally:
        model.load_state_dict(before)
    moved = max(relative(by_rows[name], before[name]) for name in by_rows)
    assert moved > 0.03, "training must move the weights for a wrong gradient to show"
    for name, weights in by_rows.items():
        assert relative(by_forest[name], weights) <= 1e-4, name


def train(model, run) -> dict[str, torch.Tensor]:
    """SGD with momentum on two forests in turn; a copy of the weights afterwards."""
    sets = [calls_of(SHAPES["nested"]), calls_of(SHAPES["many_roots"], seed=1)]
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=3e-3, momentum=0.8)
    for step in range(STEPS):
        gradients = run(sets[step % 2]).gradients
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        torch.nn.utils.clip_grad_norm_(parameters.values(), 5.0)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
