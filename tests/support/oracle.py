"""The oracle: the untouched model on one unpadded row per call, and comparisons with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from families import forward_rows
from torch import Tensor, nn

from prefix_rewrite import CapturedCall, PrefixForest

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Result:
    """Log-probabilities [E] in the caller's order, and each parameter's gradient."""

    logprobs: Tensor
    gradients: Gradients


def edge_weights(count: int) -> Tensor:
    """[E] weights that all differ, of both signs, so that no mix-up cancels."""
    return torch.linspace(-1.0, 1.5, count, dtype=torch.float64) if count else torch.empty(0)


def run_rows(
    model: nn.Module,
    calls: Sequence[CapturedCall],
    weights: Tensor | None = None,
    forward: Callable[[nn.Module, Tensor], Tensor] = forward_rows,
) -> Result:
    """Run each call alone; gradients of the weighted sum of log-probabilities."""
    count = sum(int(call.sampled.sum()) for call in calls)
    weights = edge_weights(count) if weights is None else weights
    model.zero_grad()
    found, begin = [], 0
    for call in calls:
        positions = torch.from_numpy(call.sampled).nonzero()[:, 0]
        if not len(positions):
            continue
        ids = torch.from_numpy(call.token_ids)[None]
        logits = forward(model, ids)[0]
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        logprobs = wide.log_softmax(-1)[positions - 1, ids[0, positions]]
        end = begin + len(positions)
        (logprobs * weights[begin:end].to(logprobs)).sum().backward()
        found.append(logprobs.detach())
        begin = end
    return Result(torch.cat(found) if found else torch.empty(0), take_gradients(model))


def run_forest(compiled: nn.Module, forest: PrefixForest, weights: Tensor | None = None) -> Result:
    """Run the forest at once; gradients of the same weighted sum."""
    weights = edge_weights(forest.num_edges) if weights is None else weights
    compiled.zero_grad()
    out = compiled(forest)
    (out.logprobs * weights.to(out.logprobs)).sum().backward()
    return Result(out.logprobs.detach(), take_gradients(compiled))


def take_gradients(model: nn.Module) -> Gradients:
    gradients: Gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    model.zero_grad()
    return gradients


def worst_gradient(got: Gradients, expected: Gradients, noise: float = 1e-3) -> tuple[float, str]:
    """Largest relative L2 difference over parameters, and the parameter's name.

    A parameter whose expected gradient is below `noise` times the largest one is measured against
    that: it may be nothing but rounding.
    """
    assert got.keys() == expected.keys()
    norms = {name: 0.0 if g is None else float(g.norm()) for name, g in expected.items()}
    floor = noise * max(norms.values(), default=0.0)
    worst = (0.0, "")
    for name, reference in expected.items():
        mine = got[name]
        if reference is None:
            assert mine is None or not mine.any(), f"{name} gets a gradient only in the forest"
            continue
        assert mine is not None or norms[name] == 0, f"{name} gets no gradient in the forest"
        scale = max(norms[name], floor)
        if mine is not None and scale:  # also where the reference is exactly zero
            error = float((mine - reference).norm()) / scale
            worst = max(worst, (error, name))
    return worst


def assert_equal_results(
    got: Result,
    expected: Result,
    *,
    logprobs: float = 1e-5,
    gradients: float = 1e-4,
    noise: float = 1e-3,
) -> None:
    assert got.logprobs.shape == expected.logprobs.shape
    difference = (
        float((got.logprobs - expected.logprobs).abs().max()) if len(got.logprobs) else 0.0
    )
    assert difference <= logprobs, f"logprobs differ by {difference:.1e}"
    error, name = worst_gradient(got.gradients, expected.gradients, noise)
    assert error <= gradients, f"gradient of {name} differs by {error:.1e}"
