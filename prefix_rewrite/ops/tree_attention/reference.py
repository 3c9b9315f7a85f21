"""Reference tree attention: one softmax per token over the keys that it sees.

Shapes: T tokens, N query heads, K key heads, G = N / K, D head dim, V value dim,
S keys that a token sees.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_attention_reference(
    q_1NTD: Tensor,
    k_1KTD: Tensor,
    v_1KTV: Tensor,
    parent_token: list[int],
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from every token to itself and to its ancestors, by a plain loop over the tokens.

    softmax(scale * q_t . k_s) over the s found by walking up `parent_token` from t
    (Vaswani et al. 2017, eq. 1). Computed in the inputs' dtype; differentiable by autograd.

    Args:
        q_1NTD: [1, N, T, D] queries.
        k_1KTD: [1, K, T, D] keys; query head n reads key head n // (N / K).
        v_1KTV: [1, K, T, V] values.
        parent_token: [T] the token before each token on its path, -1 for a first token.
        scale: factor of the scores.
        window: tokens that a token sees, itself included; 0 for all its ancestors.
        softcap: scores x become softcap * tanh(x / softcap); 0 for none.
        sinks: [N] a further score of each head, without a value; None for none.

    Returns:
        [1, T, N, V].
    """
    num_groups = q_1NTD.shape[1] // k_1KTD.shape[1]
    k_NTD = k_1KTD[0].repeat_interleave(num_groups, dim=0)
    v_NTV = v_1KTV[0].repeat_interleave(num_groups, dim=0)
    rows = []
    for t in range(q_1NTD.shape[2]):
        path: list[int] = []
        s = t
        while s >= 0 and not (window and len(path) == window):
            path.append(s)
            s = parent_token[s]
        keys = torch.tensor(path, device=q_1NTD.device)
        k_NSD, v_NSV = k_NTD.index_select(1, keys), v_NTV.index_select(1, keys)
        scores_NS = torch.einsum("nd,nsd->ns", q_1NTD[0, :, t], k_NSD) * scale
        if softcap:
            scores_NS = softcap * torch.tanh(scores_NS / softcap)
        if sinks is not None:
            scores_NS = torch.cat([scores_NS, sinks[:, None]], 1)
        probs_NS = scores_NS.softmax(-1)[:, : len(path)]
        rows.append(torch.einsum("ns,nsv->nv", probs_NS, v_NSV))
    return torch.stack(rows)[None]
