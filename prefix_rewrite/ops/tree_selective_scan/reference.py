"""Plain Mamba-1 scan down the paths of a forest, token by token: the oracle of the fast op.

Shapes: T tokens, D channels, N state width. State h: [D, N].
Mamba (Gu and Dao 2023), section 3 and algorithm 2:
    h_t = exp(dt_t A) h_{t-1} + (dt_t u_t) B_t^T;  y_t = h_t C_t + D u_t,
where t-1 is the token before t on its own path.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from prefix_rewrite.segments import SegmentTable


def tree_selective_scan_reference(
    u: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    segments: SegmentTable,
    dt_softplus: bool = True,
) -> torch.Tensor:
    """Scan each token from its parent's state; arguments and result as `tree_selective_scan`."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)[:, None]
    if dt_softplus:
        dt = F.softplus(dt)
    dtypes = [t.dtype for t in (u, dt, A, B, C, D) if t is not None]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    u, dt, A, B, C = (t.to(dtype) for t in (u, dt, A, B, C))
    states: list[torch.Tensor] = []
    out: list[torch.Tensor] = []
    for t, parent in enumerate(segments.parent_token.tolist()):
        before = states[parent] if parent >= 0 else torch.zeros_like(A)
        decay = torch.exp(dt[0, :, t, None] * A)
        states.append(decay * before + (dt[0, :, t] * u[0, :, t])[:, None] * B[0, :, t])
        y = states[t] @ C[0, :, t]
        out.append(y if D is None else y + D * u[0, :, t])
    y = torch.stack(out, -1)[None] if out else torch.zeros_like(u)
    return y if z is None else y * F.silu(z.to(y.dtype))
