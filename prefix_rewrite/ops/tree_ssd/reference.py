"""Plain Mamba-2 scan down the paths of a forest, token by token: the oracle of the fast op.

Shapes: T tokens, H heads, P head width, G groups, N state width. State h: [H, P, N].
Mamba-2 (Dao and Gu 2024), section 3:
    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  y_t = h_t C_t + D x_t,
where t-1 is the token before t on its own path.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from prefix_rewrite.segments import SegmentTable


def tree_ssd_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    segments: SegmentTable,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> torch.Tensor:
    """Scan each token from its parent's state; arguments and result as `tree_ssd`."""
    _, T, H, P = x.shape
    G, N = B.shape[2:]
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(dt_min, dt_max)
    dtypes = [t.dtype for t in (x, dt, A, B, C, D) if t is not None]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    x, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
    group = torch.arange(H) // (H // G)
    states: list[torch.Tensor] = []
    out: list[torch.Tensor] = []
    for t, parent in enumerate(segments.parent_token.tolist()):
        before = states[parent] if parent >= 0 else x.new_zeros(H, P, N)
        decay = torch.exp(dt[0, t] * A)
        inflow = (dt[0, t, :, None] * x[0, t])[:, :, None] * B[0, t, group][:, None, :]
        states.append(decay[:, None, None] * before + inflow)
        y = torch.einsum("hpn,hn->hp", states[t], C[0, t, group])
        if D is not None:
            y = y + (D[:, None] if D.dim() == 1 else D) * x[0, t]
        out.append(y)
    y = torch.stack(out)[None] if out else x.new_zeros(1, 0, H, P)
    return y if z is None else y * F.silu(z.to(y.dtype))
