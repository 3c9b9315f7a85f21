"""Check a compiled model against the untouched one, on the user's own weights and calls.

The oracle is the untouched model on one unpadded row per call. Compared are every sampled token's
log-probability and every parameter's gradient, of a weighted sum in which all weights differ, so
that no mix-up cancels. Isolation needs no oracle: other branches must not notice a change.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.compile import compiled_runner
from prefix_rewrite.entry import forward_row
from prefix_rewrite.errors import PrefixRewriteError
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.verification_report import CallError, ParameterError, VerifyReport

# An error may reach these bounds: log-probabilities absolute, gradients in relative L2. A half
# precision model is judged by its errors over those of its own rows, both against fp32.
BOUNDS = {torch.float64: (1e-5, 1e-4), torch.float32: (1e-4, 1e-3)}
RATIO_BOUND = 1.25
# Gradients far below the largest are rounding; they are measured against this share of it.
NOISE_FLOOR = 1e-3

Gradients = dict[str, Tensor | None]


def verify(
    compiled: nn.Module,
    calls: PrefixForest | Iterable[CapturedCall],
    *,
    isolation_probes: int = 3,
) -> VerifyReport:
    """Run the calls as a forest and one by one, and compare.

    Takes as long as training each call alone once (twice in half precision), and memory for two
    (three) sets of gradients. Gradients that the model holds are restored.

    Args:
        compiled: a model from `prefix_compile`, in fp64, fp32, bf16 or fp16.
        calls: captured calls, or a forest of them.
        isolation_probes: branches whose tokens are changed to see whether others notice.

    Returns:
        A report that prints itself; `report.ok` is its verdict.

    Raises:
        PrefixRewriteError: `compiled` is no compiled model, or nothing was sampled.
    """
    runner = compiled_runner(compiled)
    forest = calls if isinstance(calls, PrefixForest) else PrefixForest.from_calls(calls)
    if not forest.num_edges:
        raise PrefixRewriteError("there must be a sampled token to verify, got none")
    model = runner.captured.model
    dtype = next(model.parameters()).dtype
    weights = torch.linspace(-1.0, 1.5, forest.num_edges, dtype=torch.float64)
    with _kept_gradients(model):
        mine = _run_forest(compiled, forest, weights)
        rows = _run_rows(model, forest, weights)
        half = dtype not in BOUNDS
        reference = _run_rows(copy.deepcopy(model).float(), forest, weights) if half else rows
        baseline = rows if half else None
    return VerifyReport(
        dtype=dtype,
        calls=_call_errors(forest, mine[0], reference[0], baseline and baseline[0]),
        parameters=_parameter_errors(mine[1], reference[1], baseline and baseline[1]),
        leaks=_leaks(compiled, forest, isolation_probes),
        bounds=(RATIO_BOUND, RATIO_BOUND) if half else BOUNDS[dtype],
        by_ratio=half,
    )


class _kept_gradients:
    """Put the gradients that the caller has accumulated aside, and back."""

    def __init__(self, model: nn.Module):
        self._parameters = list(model.parameters())

    def __enter__(self) -> None:
        self._gradients = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None

    def __exit__(self, *exception: Any) -> None:
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient


def _run_forest(
    compiled: nn.Module, forest: PrefixForest, weights: Tensor
) -> tuple[Tensor, Gradients]:
    logprobs = compiled(forest).logprobs
    (logprobs * weights.to(logprobs)).sum().backward()
    return logprobs.detach(), _take_gradients(compiled)


def _run_rows(model: nn.Module, forest: PrefixForest, weights: Tensor) -> tuple[Tensor, Gradients]:
    found = []
    device = next(model.parameters()).device
    for row, positions, edges in _rows(forest):
        if not len(positions):
            continue
        ids = torch.from_numpy(row).to(device)
        where = torch.from_numpy(positions).to(device)
        logits = forward_row(model, ids[None])[0, where - 1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        logprobs = wide.log_softmax(-1).gather(1, ids[where, None])[:, 0]
        (logprobs * weights[edges].to(logprobs)).sum().backward()
        found.append(logprobs.detach())
    return torch.cat(found), _take_gradients(model)


def _rows(forest: PrefixForest) -> Iterable[tuple[np.ndarray, np.ndarray, slice]]:
    """Yield each call's ids [N], the positions of its sampled tokens, and its edges."""
    offsets = forest.edges.call_offsets
    for call in range(forest.num_calls):
        edges = slice(int(offsets[call]), int(offsets[call + 1]))
        path = forest.call_path(call)
        positions = forest.segments.position_ids[forest.edges.token[edges]]
        yield forest.token_ids[path], positions, edges


def _take_gradients(model: nn.Module) -> Gradients:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    return gradients


def _call_errors(
    forest: PrefixForest, mine: Tensor, reference: Tensor, baseline: Tensor | None
) -> list[CallError]:
    offsets = forest.edges.call_offsets.tolist()
    errors = []
    for call, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        if begin == end:
            continue
        own = slice(begin, end)
        errors.append(
            CallError(
                call=call,
                error=float((mine[own] - reference[own]).abs().max()),
                baseline=None
                if baseline is None
                else float((baseline[own] - reference[own]).abs().max()),
            )
        )
    return errors


def _parameter_errors(
    mine: Gradients, reference: Gradients, baseline: Gradients | None
) -> list[ParameterError]:
    norms = {name: 0.0 if g is None else float(g.norm()) for name, g in reference.items()}
    floor = NOISE_FLOOR * max(norms.values(), default=0.0)

    def error(got: Tensor | None, name: str) -> float:
        expected = reference[name]
        if expected is None or got is None:
            there = got if expected is None else expected
            return float("inf") if there is not None and there.any() else 0.0
        difference = float((got.to(expected.dtype) - expected).norm())
        return difference / max(norms[name], floor) if difference else 0.0

    return [
        ParameterError(
            name=name,
            error=error(mine[name], name),
            baseline=None if baseline is None else error(baseline[name], name),
        )
        for name in reference
    ]


def _leaks(compiled: nn.Module, forest: PrefixForest, probes: int) -> list[str]:
    """Change a branch's tokens; say where edges outside it noticed."""
    leaks = []
    with torch.no_grad():
        before = compiled(forest).logprobs
        for segment in _branches(forest, probes):
            begin = int(forest.segments.start[segment])
            end = int(forest.segments.subtree_end[segment])
            after = compiled(_changed(forest, begin, end)).logprobs
            source = torch.from_numpy(forest.edges.source)
            token = torch.from_numpy(forest.edges.token)
            outside = ~(((begin <= source) & (source < end)) | ((begin <= token) & (token < end)))
            noticed = int((before != after).cpu()[outside].sum())
            if noticed:
                name = forest.nodes[segment]
                leaks.append(f"{noticed} edges outside the branch at {name!r} notice its tokens")
    return leaks


def _branches(forest: PrefixForest, probes: int) -> Sequence[int]:
    """Segments, spread over the forest, outside of whose subtree there is an edge."""
    segments = forest.segments
    source = forest.edges.source
    candidates = [
        s
        for s in range(segments.num_segments)
        if ((source < segments.start[s]) | (source >= segments.subtree_end[s])).any()
    ]
    if len(candidates) <= probes:
        return candidates
    return [candidates[i] for i in np.linspace(0, len(candidates) - 1, probes).astype(int)]


def _changed(forest: PrefixForest, begin: int, end: int) -> PrefixForest:
    """The same forest with a branch's tokens exchanged for other ids that it holds."""
    ids = forest.token_ids.copy()
    known = np.unique(ids)
    place = np.searchsorted(known, ids[begin:end])
    ids[begin:end] = known[(place + 1) % len(known)]
    return dataclasses.replace(forest, token_ids=ids)
