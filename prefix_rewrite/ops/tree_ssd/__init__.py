"""Tree Mamba-2 scan: every token continues the state of its parent token on the forest.

Shapes: T tokens, H heads, P head width, G groups, N state width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.chunk_rows import compute_dtype
from prefix_rewrite.ops.chunk_tree import ChunkPlanner
from prefix_rewrite.ops.tree_ssd.block import SsdInputs
from prefix_rewrite.ops.tree_ssd.chunked import scan_backward, scan_forward
from prefix_rewrite.segments import IntArray, SegmentTable

__all__ = ["plan_ssd", "tree_ssd"]

PLANNER = ChunkPlanner("ssd")


def plan_ssd(segments: SegmentTable) -> Mapping[str, IntArray]:
    """Plan the chunk tree that `tree_ssd` runs on."""
    return PLANNER.plan(segments)


def tree_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """Run the Mamba-2 scan down every path of the forest; the steps are `mamba2_chunk_scan`'s.

    Args:
        x: [1, T, H, P].
        dt: [1, T, H]; the time step is clamp(softplus(dt + dt_bias), dt_min, dt_max).
        A: [H], negative.
        B, C: [1, T, G, N]; head h uses group h // (H / G).
        D: [H], [H, P] or None.
        z: [1, T, H, P] gate or None: y * silu(z).
        dt_bias: [H] or None.
        host_plan, device_plan: a packed plan with the fields of `plan_ssd`.

    Returns:
        y [1, T, H, P], contiguous, in fp32; in fp64 if any input is.

    Raises:
        LayoutError: the batch is not 1, or H is no multiple of G.
    """
    if x.shape[0] != 1:
        raise LayoutError(
            f"a forest is one row, got batch {x.shape[0]}; pass x of shape [1, T, ..]"
        )
    if x.shape[2] % B.shape[2]:
        raise LayoutError(f"heads must be a multiple of groups, got {x.shape[2]} and {B.shape[2]}")
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(dt_min, dt_max)
    rows = (x.squeeze(0), dt.squeeze(0), A, B.squeeze(0), C.squeeze(0), D)
    y = torch.ops.prefix_rewrite.tree_ssd(*rows, host_plan, device_plan).unsqueeze(0)
    return y if z is None else y * F.silu(z.to(y.dtype))


@torch.library.custom_op("prefix_rewrite::tree_ssd", mutates_args=())
def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return scan_forward(SsdInputs(x, dt, A, B, C, D), PLANNER.read(host_plan, device_plan))


@_scan.register_fake
def _(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=compute_dtype(x, dt, A, B, C, D))


@torch.library.custom_op("prefix_rewrite::tree_ssd_backward", mutates_args=())
def _scan_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> list[torch.Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        grads = scan_backward(
            grad, SsdInputs(x, dt, A, B, C, D), PLANNER.read(host_plan, device_plan)
        )
    given = (x, dt, A, B, C, D)
    return [
        g.to(t.dtype) for g, t in zip(grads, given, strict=True) if g is not None and t is not None
    ]


@_scan_backward.register_fake
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t in (x, dt, A, B, C, D) if t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.prefix_rewrite.tree_ssd_backward(grad, *ctx.saved_tensors)
    return (*grads, *[None] * (8 - len(grads)))


_scan.register_autograd(_differentiate, setup_context=_save)
