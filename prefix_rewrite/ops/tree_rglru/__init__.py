"""Tree gated linear recurrence (RG-LRU): every token continues its parent token's state.

Shapes: T tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.chunk_rows import compute_dtype
from prefix_rewrite.ops.chunk_tree import ChunkPlanner
from prefix_rewrite.ops.tree_rglru.recurrence import GatedRecurrence
from prefix_rewrite.segments import IntArray, SegmentTable

__all__ = ["plan_rglru", "tree_rglru"]

_PLANNER = ChunkPlanner("rglru", granule=8, collapse=False)


def plan_rglru(segments: SegmentTable) -> Mapping[str, IntArray]:
    """Plan the chunk tree that `tree_rglru` runs on."""
    return _PLANNER.plan(segments)


def tree_rglru(
    x: torch.Tensor, a: torch.Tensor, host_plan: torch.Tensor, device_plan: torch.Tensor
) -> torch.Tensor:
    """Run h_t = a_t h_{t-1} + x_t down every path of the forest.

    Args:
        x: [1, T, D] gated input.
        a: [1, T, D] recurrence gate, from 0 to 1. What it is at a root makes no difference.
        host_plan, device_plan: a packed plan with the fields of `plan_rglru`.

    Returns:
        h [1, T, D], contiguous, in the type of x. Compute is in fp32; in fp64 if any input is.

    Raises:
        LayoutError: the batch is not 1.
    """
    if x.shape[0] != 1:
        raise LayoutError(
            f"a forest is one row, got batch {x.shape[0]}; pass x of shape [1, T, D]"
        )
    plan = (host_plan, device_plan)
    h = torch.ops.prefix_rewrite.tree_rglru(x.squeeze(0), a.squeeze(0), *plan)
    return h.unsqueeze(0).to(x.dtype)


@torch.library.custom_op("prefix_rewrite::tree_rglru", mutates_args=())
def _scan(
    x: torch.Tensor, a: torch.Tensor, host_plan: torch.Tensor, device_plan: torch.Tensor
) -> torch.Tensor:
    return GatedRecurrence(x, a).forward(_PLANNER.read(host_plan, device_plan))


@_scan.register_fake
def _(
    x: torch.Tensor, a: torch.Tensor, host_plan: torch.Tensor, device_plan: torch.Tensor
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=compute_dtype(x, a))


@torch.library.custom_op("prefix_rewrite::tree_rglru_backward", mutates_args=())
def _scan_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    tree = _PLANNER.read(host_plan, device_plan)
    dx, da = GatedRecurrence(x, a).backward(grad, tree)
    return dx.to(x.dtype), da.to(a.dtype)


@_scan_backward.register_fake
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), a.new_empty(a.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx, da = torch.ops.prefix_rewrite.tree_rglru_backward(grad, *ctx.saved_tensors)
    return dx, da, None, None


_scan.register_autograd(_differentiate, setup_context=_save)
