"""The mamba_ssm package: its scans, and its fused calls taken apart.

Shapes: T tokens, H heads, P head dimension, G groups, N state size, E channels. A kernel loads
its inputs in fp32 and returns the type of x; so do these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prefix_rewrite.mixers.base import Seams, asked_for
from prefix_rewrite.mixers.conv import leaf_conv
from prefix_rewrite.mixers.libraries.mamba_norms import gated_rms_norm
from prefix_rewrite.mixers.libraries.results import wide, with_extras
from prefix_rewrite.mixers.selective_scan import leaf_selective_scan
from prefix_rewrite.mixers.ssd import leaf_ssd

_NO_LIMIT = (0.0, float("inf"))


def chunk_scan_seam(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """x [1,T,H,P], dt [1,T,H], A [H], B and C [1,T,G,N], D [H] or [H,P], z [1,T,H,P]."""
    unknown = asked_for(
        {
            "initial_states": initial_states,
            "seq_idx": seq_idx,
            "cu_seqlens": cu_seqlens,
            "return_final_states": return_final_states,
            "return_varlen_states": return_varlen_states,
        }
    )
    low, high = dt_limit
    steps = (dt_softplus, float(low), float(high))
    out = leaf_ssd(x, wide(dt), A, B, C, D, z, dt_bias, *steps, unknown).to(x.dtype)
    return with_extras(out, return_final_states, return_varlen_states)


def split_conv1d_scan_seam(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """Split, convolve, scan, gate and project: zxbcdt holds MLP halves, z, x, B, C and dt."""
    heads = D.shape[0]
    dim = heads * (D.shape[1] if headdim is None else headdim)
    states = (conv1d_weight.shape[0] - dim) // 2  # G * N
    mlp = zxbcdt.shape[-1] - 2 * dim - 2 * states - heads
    zx, z, xBC, dt = zxbcdt.split([mlp, dim, dim + 2 * states, heads], dim=-1)
    asked = asked_for({"seq_idx": seq_idx, "initial_states": initial_states})
    mixed = leaf_conv(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, activation or "", asked)
    x, B, C = mixed.transpose(1, 2).split([dim, states, states], dim=-1)
    x, z = (part.unflatten(-1, (heads, -1)) for part in (x, z))
    B, C = (part.unflatten(-1, (ngroups, -1)) for part in (B, C))
    gate = z if rmsnorm_weight is None else None
    rest = (initial_states, seq_idx, None, True, dt_limit, return_final_states)
    out = chunk_scan_seam(x, dt, A, B, C, chunk_size, D, gate, dt_bias, *rest)
    out = (out[0] if return_final_states else out).flatten(-2)
    if rmsnorm_weight is not None:
        sizes = (rmsnorm_eps, dim // ngroups, norm_before_gate)
        out = gated_rms_norm(out, rmsnorm_weight, None, z.flatten(-2), *sizes)
    if mlp > 0:
        left, right = zx.chunk(2, dim=-1)
        out = torch.cat([(F.silu(wide(left)) * wide(right)).to(zx.dtype), out], dim=-1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
    return with_extras(out, return_final_states)


def selective_scan_seam(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **asked: Any,
) -> Any:
    """u, delta and z [1,E,T], A [E,N], B and C [1,N,T] or [1,1,N,T], D and delta_bias [E]."""
    asked["return_last_state"] = return_last_state
    asked["complex A"] = A.is_complex()
    B, C = (x.squeeze(1) if x.dim() == 4 and x.shape[1] == 1 else x for x in (B, C))
    asked["B or C that is constant, or in groups"] = B.dim() != 3 or C.dim() != 3
    unknown = asked_for(asked)
    steps = (delta_bias, delta_softplus)
    out = leaf_selective_scan(u, wide(delta), A, B, C, D, z, *steps, unknown).to(u.dtype)
    return with_extras(out, return_last_state)


def mamba_inner_seam(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    **options: Any,
) -> Tensor:
    """Mamba-1 but for its input projection, xz [1, 2 E, T]: convolve, project, scan, project."""
    rank, states = delta_proj_weight.shape[1], A.shape[-1]
    asked = {name: value for name, value in options.items() if name not in ("checkpoint_lvl",)}
    asked.pop("b_c_dt_rms_eps", None)  # of norms that are asked for by their weights
    asked |= {"a constant B": B, "a constant C": C}
    x, z = xz.chunk(2, dim=1)
    x = leaf_conv(x, conv1d_weight.squeeze(1), conv1d_bias, "silu", "")
    rows = F.linear(x.transpose(1, 2), x_proj_weight)
    delta, B, C = rows.split([rank, states, states], dim=-1)
    B = B if B_proj_bias is None else B + B_proj_bias.to(B.dtype)
    C = C if C_proj_bias is None else C + C_proj_bias.to(C.dtype)
    delta = F.linear(delta, delta_proj_weight)
    delta, B, C = (part.transpose(1, 2) for part in (delta, B, C))
    out = selective_scan_seam(x, delta, A, B, C, D, z, delta_bias, delta_softplus, **asked)
    return F.linear(out.transpose(1, 2), out_proj_weight, out_proj_bias)


_SSD = "mamba_ssm.ops.triton.ssd_combined"
_SELECTIVE = "mamba_ssm.ops.selective_scan_interface"

MAMBA_SSM_SEAMS: Seams = {
    f"{_SSD}:mamba_chunk_scan_combined": chunk_scan_seam,
    f"{_SSD}:mamba_split_conv1d_scan_combined": split_conv1d_scan_seam,
    f"{_SELECTIVE}:selective_scan_fn": selective_scan_seam,
    f"{_SELECTIVE}:mamba_inner_fn": mamba_inner_seam,
}
