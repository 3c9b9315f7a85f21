"""Tree Mamba-1 scan: every token continues the state of its parent token on the forest.

Shapes: T tokens, D channels, N state width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.chunk_rows import compute_dtype
from prefix_rewrite.ops.chunk_tree import ChunkPlanner
from prefix_rewrite.ops.tree_selective_scan.recurrence import SelectiveScan
from prefix_rewrite.segments import IntArray, SegmentTable

__all__ = ["plan_selective_scan", "tree_selective_scan"]

# Places are scanned one after the other, so a tile of siblings would gain nothing.
_PLANNER = ChunkPlanner("selective_scan", granule=8, collapse=False)


def plan_selective_scan(segments: SegmentTable) -> Mapping[str, IntArray]:
    """Plan the chunk tree that `tree_selective_scan` runs on."""
    return _PLANNER.plan(segments)


def tree_selective_scan(
    u: torch.Tensor,
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
) -> torch.Tensor:
    """Run the Mamba-1 scan down every path of the forest; the steps are `selective_scan`'s.

    Args:
        u: [1, D, T]; fastest as the transposed view of a [1, T, D] tensor, as are dt, B and C.
        dt: [1, D, T]; the time step is softplus(dt + dt_bias).
        A: [D, N], negative.
        B, C: [1, N, T].
        D: [D] or None.
        z: [1, D, T] gate or None: y * silu(z).
        dt_bias: [D] or None.
        host_plan, device_plan: a packed plan with the fields of `plan_selective_scan`.

    Returns:
        y [1, D, T], the transposed view of a contiguous [1, T, D] tensor, in fp32; in fp64 if any
        input is.

    Raises:
        LayoutError: the batch is not 1.
    """
    if u.shape[0] != 1:
        raise LayoutError(
            f"a forest is one row, got batch {u.shape[0]}; pass u of shape [1, D, T]"
        )
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)[:, None]
    if dt_softplus:
        dt = F.softplus(dt)
    u_rows, dt_rows, B_rows, C_rows = (t.squeeze(0).transpose(0, 1) for t in (u, dt, B, C))
    y = torch.ops.prefix_rewrite.tree_selective_scan(
        u_rows, dt_rows, A, B_rows, C_rows, host_plan, device_plan
    )
    if D is not None:
        y = y + u_rows.to(y.dtype) * D.to(y.dtype)
    if z is not None:
        y = y * F.silu(z.squeeze(0).transpose(0, 1).to(y.dtype))
    return y.transpose(0, 1).unsqueeze(0)


@torch.library.custom_op("prefix_rewrite::tree_selective_scan", mutates_args=())
def _scan(
    u: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> torch.Tensor:
    with torch.autocast(u.device.type, enabled=False):
        scan = SelectiveScan(u, dt, A, B, C)
        return scan.forward(_PLANNER.read(host_plan, device_plan))


@_scan.register_fake
def _(
    u: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> torch.Tensor:
    return u.new_empty(u.shape, dtype=compute_dtype(u, dt, A, B, C))


@torch.library.custom_op("prefix_rewrite::tree_selective_scan_backward", mutates_args=())
def _scan_backward(
    grad: torch.Tensor,
    u: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> list[torch.Tensor]:
    with torch.autocast(u.device.type, enabled=False):
        scan = SelectiveScan(u, dt, A, B, C)
        grads = scan.backward(grad, _PLANNER.read(host_plan, device_plan))
    return [g.to(t.dtype) for g, t in zip(grads, (u, dt, A, B, C), strict=True)]


@_scan_backward.register_fake
def _(
    grad: torch.Tensor,
    u: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t in (u, dt, A, B, C)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.prefix_rewrite.tree_selective_scan_backward(grad, *ctx.saved_tensors)
    return (*grads, None, None)


_scan.register_autograd(_differentiate, setup_context=_save)
