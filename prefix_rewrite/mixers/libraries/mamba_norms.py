"""The norms of mamba_ssm in plain torch. No mixers: their kernels can't be proven to be none.

Shapes: x, z and residual [1, T, E]. Statistics are in fp32, the result has the type of x.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prefix_rewrite.mixers.base import Seams, asked_for
from prefix_rewrite.mixers.libraries.results import wide


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """norm(x) silu(z), or norm(x silu(z)), over groups of the last dimension."""
    given, x = x.dtype, wide(x)
    gate = 1.0 if z is None else F.silu(wide(z))
    x = x if norm_before_gate else x * gate
    normed = _rms(x.unflatten(-1, (-1, group_size or x.shape[-1])), eps).flatten(-2)
    out = _affine(normed, weight, bias)
    return (out * gate if norm_before_gate else out).to(given)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """norm(x + residual), and with `prenorm` the sum as well, in the residual's type."""
    asked = {"x1": x1, "weight1": weight1, "bias1": bias1, "rowscale": rowscale}
    if unknown := asked_for({**asked, "return_dropout_mask": return_dropout_mask}):
        # There is no leaf to carry it: a capture of one graph ends here, with these words.
        torch._dynamo.graph_break(msg=f"mamba_ssm's layer norm asks for {unknown}: leave it out")
    kept = torch.float32 if residual_in_fp32 else x.dtype
    kept = kept if residual is None else residual.dtype
    total = F.dropout(wide(x), dropout_p) if dropout_p else wide(x)
    total = total if residual is None else total + wide(residual)
    shift = 0.0 if is_rms_norm else total.mean(-1, keepdim=True)
    out = _affine(_rms(total - shift, eps), weight, bias).to(x.dtype)
    return (out, total.to(kept)) if prenorm else out


def rms_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    sums = (residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32)
    return layer_norm(x, weight, bias, *sums, True, return_dropout_mask)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = x * wide(weight)
    return x if bias is None else x + wide(bias)


MAMBA_NORM_SEAMS: Seams = {
    "mamba_ssm.ops.triton.layer_norm:layer_norm_fn": layer_norm,
    "mamba_ssm.ops.triton.layer_norm:rms_norm_fn": rms_norm,
    "mamba_ssm.ops.triton.layernorm_gated:rmsnorm_fn": gated_rms_norm,
}
