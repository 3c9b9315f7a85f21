"""flash-linear-attention: delta rules and its short convolution.

Shapes: q and k [1, T, G, K], v [1, T, H, V], beta [1, T, H], g [1, T, H] or [1, T, H, K] for one
decay a channel. Its convolution has the channels last: x [1, T, C].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prefix_rewrite.mixers.base import Seams, asked_for
from prefix_rewrite.mixers.conv import leaf_conv
from prefix_rewrite.mixers.delta_rule import leaf_channel_delta_rule, leaf_delta_rule
from prefix_rewrite.mixers.libraries.results import wide

# How to compute, or how to lay out a state that no call of ours has.
_HOW = frozenset({"chunk_size", "disable_recompute", "state_v_first", "transpose_state_layout"})


def gated_delta_rule_seam(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stand in for `chunk_gated_delta_rule` and `chunk_kda`, alike up to the decay's shape."""
    asked = {name: value for name, value in options.items() if name not in _HOW}
    asked |= {"initial_state": initial_state, "output_final_state": output_final_state}
    if asked.pop("use_gate_in_kernel", False):
        g = _decay(g, asked.pop("A_log", None), asked.pop("dt_bias", None))
    if asked.pop("use_beta_sigmoid_in_kernel", False):
        beta = torch.sigmoid(wide(beta)) * (2.0 if asked.pop("allow_neg_eigval", False) else 1.0)
    leaf = leaf_delta_rule if g.dim() == 3 else leaf_channel_delta_rule
    out = leaf(q, k, v, g, beta, use_qk_l2norm_in_kernel, asked_for(asked))
    # The leaf's queries are scaled by K^-0.5, and its output is linear in them.
    ratio = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
    out = out if ratio == 1.0 else out * ratio
    return out, out.new_zeros(()) if output_final_state else None


def delta_rule_seam(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stand in for `chunk_delta_rule`, the gated one without decay."""
    rest = (beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel)
    return gated_delta_rule_seam(q, k, v, torch.zeros_like(wide(beta)), *rest, **options)


def short_conv_seam(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = "triton",
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stand in for `causal_conv1d`; the residual is added last."""
    options |= {"initial_state": initial_state, "output_final_state": output_final_state}
    options["no weight"] = weight is None
    weight = x.new_ones(x.shape[-1], 1) if weight is None else weight
    unknown = asked_for(options)
    out = leaf_conv(x.transpose(1, 2), weight, bias, activation or "", unknown).transpose(1, 2)
    out = out if residual is None else out + residual
    return out, out.new_zeros(()) if output_final_state else None


def _decay(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), with A_log [H] and a bias for each number in g."""
    g = wide(g) if dt_bias is None else wide(g) + wide(dt_bias).view(g.shape[2:])
    rate = wide(A_log).exp()
    return -(rate if g.dim() == 3 else rate[:, None]) * F.softplus(g)


FLA_SEAMS: Seams = {
    "fla.ops.gated_delta_rule.chunk:chunk_gated_delta_rule": gated_delta_rule_seam,
    "fla.ops.kda.chunk:chunk_kda": gated_delta_rule_seam,
    "fla.ops.delta_rule.chunk:chunk_delta_rule": delta_rule_seam,
    "fla.modules.causal_conv1d.ops:causal_conv1d": short_conv_seam,
    "fla.modules.conv.causal_conv1d:causal_conv1d": short_conv_seam,
    "fla.modules.convolution:causal_conv1d": short_conv_seam,
}
