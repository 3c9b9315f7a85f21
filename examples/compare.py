"""Train one batch as a forest and each call alone: the same gradients, and how long each takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from prefix_rewrite import CapturedCall, PrefixForest


@dataclass(frozen=True)
class Comparison:
    """Medians over repeats, and the largest differences between the two ways.

    Attributes:
        forest_seconds: one forward and backward of the compiled model on the forest.
        alone_seconds: the same of the untouched model, summed over the calls.
        logprob_difference: largest absolute difference of a sampled token's log-probability.
        gradient_difference: largest difference of a parameter's gradient, relative to the
            largest entry of that gradient.
    """

    forest_seconds: float
    alone_seconds: float
    logprob_difference: float
    gradient_difference: float

    @property
    def speedup(self) -> float:
        return self.alone_seconds / self.forest_seconds


def compare(
    model: nn.Module, compiled: nn.Module, calls: Sequence[CapturedCall], repeats: int
) -> Comparison:
    """Measure both ways in turn, `repeats` times, and compare what they computed.

    Every sampled token gets a weight of its own: rewards may all be equal by now, and then
    advantages of zero would make any two gradients agree.
    """
    num_edges = sum(call.num_sampled for call in calls)
    weights = torch.randn(num_edges, generator=torch.Generator().manual_seed(0)) / num_edges
    as_forest, alone = [], []
    for _ in range(repeats):
        as_forest.append(_run(model, lambda: backward_forest(compiled, calls, weights)))
        alone.append(_run(model, lambda: backward_alone(model, calls, weights)))
    tree, rows = as_forest[-1], alone[-1]
    return Comparison(
        forest_seconds=median(run.seconds for run in as_forest),
        alone_seconds=median(run.seconds for run in alone),
        logprob_difference=float((tree.logprobs - rows.logprobs).abs().max()),
        gradient_difference=max(
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
            for a, b in zip(tree.gradients, rows.gradients, strict=True)
        ),
    )


def backward_forest(compiled: nn.Module, calls: Sequence[CapturedCall], weights: Tensor) -> Tensor:
    """Accumulate the batch's gradient with every shared prefix computed once; return logprobs."""
    logprobs = compiled(PrefixForest.from_calls(calls)).logprobs
    (-(weights * logprobs).sum()).backward()
    return logprobs.detach()


def backward_alone(model: nn.Module, calls: Sequence[CapturedCall], weights: Tensor) -> Tensor:
    """Accumulate the same gradient call by call, without this library; return logprobs [E]."""
    logprobs = []
    spans = weights.split([call.num_sampled for call in calls])
    for call, call_weights in zip(calls, spans, strict=True):
        ids, sampled = torch.from_numpy(call.token_ids), torch.from_numpy(call.sampled)
        at = sampled.nonzero()[:, 0]
        logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=at - 1).logits[0]
        picked = logits.log_softmax(-1).gather(-1, ids[at, None])[:, 0]
        (-(call_weights * picked).sum()).backward()
        logprobs.append(picked.detach())
    return torch.cat(logprobs)


@dataclass(frozen=True)
class _Run:
    seconds: float
    logprobs: Tensor
    gradients: list[Tensor]


def _run(model: nn.Module, backward: Callable[[], Tensor]) -> _Run:
    model.zero_grad()
    start = time.perf_counter()
    logprobs = backward()
    seconds = time.perf_counter() - start
    gradients = [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
    ]
    model.zero_grad()
    return _Run(seconds, logprobs, gradients)
