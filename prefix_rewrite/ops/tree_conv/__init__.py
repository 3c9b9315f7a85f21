"""Tree causal convolution: every token is convolved with its predecessors on its own path.

Shapes: T tokens, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.tree_conv.shifted import (
    JUMPS,
    PARENT,
    STRETCHES,
    ConvInputs,
    conv_backward,
    conv_forward,
)
from prefix_rewrite.segments import IntArray, SegmentTable

__all__ = ["plan_conv", "tree_conv"]


def plan_conv(segments: SegmentTable) -> Mapping[str, IntArray]:
    """Plan `tree_conv` of any width: the jumps, the stretches between them, each token's parent.

    A jump is a token whose predecessor on its path is not the token stored before it.
    """
    return plan_rows(segments.parent_token)


def plan_rows(parent: IntArray) -> Mapping[str, IntArray]:
    """Plan rows [T] stored in any order, given the row before each on its path, -1 for none."""
    T = len(parent)
    jumps = np.flatnonzero(parent != np.arange(-1, T - 1))
    stretches = np.diff(jumps, append=T)
    order = np.argsort(-stretches, kind="stable")
    return {
        JUMPS: jumps[order],
        STRETCHES: stretches[order],
        PARENT: np.append(np.where(parent < 0, T, parent), T),
    }


def tree_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """Convolve down every path of the forest; before a root there are zeros.

    Args:
        x: [1, C, T]; fastest as the transposed view of a [1, T, C] tensor, as models pass it.
        weight: [C, W]; the last tap is the token's own.
        bias: [C] or None.
        host_plan, device_plan: a packed plan with the fields of `plan_conv`.
        silu: whether SiLU follows.

    Returns:
        [1, C, T] in the type of x, the transposed view of a contiguous [1, T, C] tensor. Compute
        is in fp32 (fp64 if x or weight is), rounded once.

    Raises:
        LayoutError: the batch is not 1.
    """
    if x.shape[0] != 1:
        raise LayoutError(
            f"a forest is one row, got batch {x.shape[0]}; pass x of shape [1, C, T]"
        )
    rows = x.squeeze(0).transpose(0, 1)
    y = torch.ops.prefix_rewrite.tree_conv(rows, weight, bias, host_plan, device_plan, silu)
    return y.transpose(0, 1).unsqueeze(0)


@torch.library.custom_op("prefix_rewrite::tree_conv", mutates_args=())
def _conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return conv_forward(ConvInputs(x, weight, bias), silu, host_plan, device_plan)


@_conv.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("prefix_rewrite::tree_conv_backward", mutates_args=())
def _conv_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        inputs = ConvInputs(x, weight, bias)
        dx, dweight, dbias = conv_backward(grad, inputs, silu, host_plan, device_plan)
    dbias = dbias.to(weight.dtype if bias is None else bias.dtype)
    return dx.to(x.dtype), dweight.to(weight.dtype).contiguous(), dbias


@_conv_backward.register_fake
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dbias = weight.new_empty(weight.shape[:1]) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, bias, host_plan, device_plan = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.prefix_rewrite.tree_conv_backward(
        grad, x, weight, bias, host_plan, device_plan, ctx.silu
    )
    return dx, dweight, None if bias is None else dbias, None, None, None


_conv.register_autograd(_differentiate, setup_context=_save)
