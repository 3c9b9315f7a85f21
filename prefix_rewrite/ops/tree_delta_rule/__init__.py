"""Tree gated delta rule: every token updates the state of its parent token on the forest.

Shapes: T tokens, G query/key heads, H value heads, K and V head widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.chunk_rows import compute_dtype
from prefix_rewrite.ops.chunk_tree import ChunkPlanner, ChunkTree
from prefix_rewrite.ops.tree_delta_rule.chunked import DeltaInputs, delta_backward, delta_forward
from prefix_rewrite.segments import IntArray, SegmentTable

__all__ = ["plan_channel_delta_rule", "plan_delta_rule", "tree_delta_rule"]

_PLANNER = ChunkPlanner("delta_rule")
# A decay for every channel is split at points between tokens, which siblings have none of.
_CHANNEL_PLANNER = ChunkPlanner("channel_delta_rule", collapse=False)


def plan_delta_rule(segments: SegmentTable) -> Mapping[str, IntArray]:
    """Plan the chunk tree of `tree_delta_rule` with one decay a head."""
    return _PLANNER.plan(segments)


def plan_channel_delta_rule(segments: SegmentTable) -> Mapping[str, IntArray]:
    """Plan the chunk tree of `tree_delta_rule` with one decay a channel."""
    return _CHANNEL_PLANNER.plan(segments)


def tree_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
    normalise: bool,
) -> torch.Tensor:
    """Run the gated delta rule down every path of the forest, with queries scaled by K^-0.5.

    Args:
        q, k: [1, T, G, K].
        v: [1, T, H, V]; value head h uses query/key head h // (H / G).
        g: log decay, at most 0: [1, T, H], or [1, T, H, K] for one a channel.
        beta: [1, T, H].
        host_plan, device_plan: a packed plan with the fields of `plan_delta_rule`, or of
            `plan_channel_delta_rule` where g has one decay a channel.
        normalise: whether queries and keys are divided by their norms.

    Returns:
        [1, T, H, V], contiguous, in the type of q. Compute is in fp32; in fp64 if any input is.

    Raises:
        LayoutError: the batch is not 1, or H is no multiple of G.
    """
    if q.shape[0] != 1:
        raise LayoutError(
            f"a forest is one row, got batch {q.shape[0]}; pass q of shape [1, T, ..]"
        )
    G, H = q.shape[2], v.shape[2]
    if H % G:
        raise LayoutError(f"value heads must be a multiple of query heads, got {H} and {G}")
    dtype = compute_dtype(q, k, v, g, beta)
    queries, keys = (_ready(x.squeeze(0).to(dtype), normalise, H // G) for x in (q, k))
    o = torch.ops.prefix_rewrite.tree_delta_rule(
        queries * q.shape[3] ** -0.5,
        keys,
        v.squeeze(0),
        g.squeeze(0),
        beta.squeeze(0),
        host_plan,
        device_plan,
    )
    return o.unsqueeze(0).to(q.dtype)


def _ready(x: torch.Tensor, normalise: bool, repeats: int) -> torch.Tensor:
    """[T, G, K] to [T, H, K]"""
    if normalise:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def _read(g: torch.Tensor, host_plan: torch.Tensor, device_plan: torch.Tensor) -> ChunkTree:
    planner = _PLANNER if g.dim() == 2 else _CHANNEL_PLANNER
    return planner.read(host_plan, device_plan)


@torch.library.custom_op("prefix_rewrite::tree_delta_rule", mutates_args=())
def _delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> torch.Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return delta_forward(DeltaInputs(q, k, v, g, beta), _read(g, host_plan, device_plan))


@_delta.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> torch.Tensor:
    return v.new_empty(v.shape, dtype=compute_dtype(q, k, v, g, beta))


@torch.library.custom_op("prefix_rewrite::tree_delta_rule_backward", mutates_args=())
def _delta_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> list[torch.Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        inputs = DeltaInputs(q, k, v, g, beta)
        grads = delta_backward(grad, inputs, _read(g, host_plan, device_plan))
    return [d.to(x.dtype) for d, x in zip(grads, (q, k, v, g, beta), strict=True)]


@_delta_backward.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, g, beta)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.prefix_rewrite.tree_delta_rule_backward(grad, *ctx.saved_tensors)
    return (*grads, None, None)


_delta.register_autograd(_differentiate, setup_context=_save)
