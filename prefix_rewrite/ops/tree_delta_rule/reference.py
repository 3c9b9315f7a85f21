"""Plain gated delta rule down the paths of a forest, token by token: the oracle of the fast op.

Shapes: T tokens, G query/key heads, H value heads, K and V head widths. State S: [H, K, V].
Gated delta networks (Yang et al. 2024), equation 10; the per-channel decay is Kimi delta
attention (Kimi Linear, 2025), equation 1:
    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T;  o_t = S_t^T q_t,
where t-1 is the token before t on its own path.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from prefix_rewrite.segments import SegmentTable


def tree_delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    segments: SegmentTable,
    normalise: bool = True,
) -> torch.Tensor:
    """Update each token's state from its parent's; arguments and result as `tree_delta_rule`."""
    given = q.dtype
    dtype = torch.float64 if torch.float64 in (q.dtype, g.dtype) else torch.float32
    q, k, v, g, beta = (t[0].to(dtype) for t in (q, k, v, g, beta))
    if normalise:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    T, H, V = v.shape
    head = torch.arange(H) // (H // q.shape[1])
    q, k = q[:, head] / q.shape[2] ** 0.5, k[:, head]
    decay = g.exp() if g.dim() == 3 else g.exp()[..., None]
    states: list[torch.Tensor] = []
    out: list[torch.Tensor] = []
    for t, parent in enumerate(segments.parent_token.tolist()):
        before = states[parent] if parent >= 0 else v.new_zeros(H, q.shape[2], V)
        faded = decay[t][..., None] * before
        held = torch.einsum("hkv,hk->hv", faded, k[t])
        write = beta[t][:, None] * (v[t] - held)
        states.append(faded + k[t][:, :, None] * write[:, None, :])
        out.append(torch.einsum("hkv,hk->hv", states[t], q[t]))
    return (torch.stack(out)[None] if out else F.pad(v, (0, 0))[None]).to(given)
