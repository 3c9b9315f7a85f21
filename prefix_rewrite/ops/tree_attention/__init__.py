"""Causal attention on a prefix forest: every token sees its ancestors and itself."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_rewrite.ops.tree_attention.op import attention_backend
from prefix_rewrite.ops.tree_attention.plan import plan_attention

__all__ = ["attention_backend", "plan_attention", "tree_attention"]


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    host_plan: Tensor,
    device_plan: Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from every token to itself and to its ancestors.

    softmax(scale * q_t . k_s) over the ancestors s of t, t included, computed in fp32 (fp64 if an
    input is). Any strides; differentiable once, in q, k, v and sinks.

    Args:
        q: [1, N, T, D] queries.
        k: [1, K, S, D] keys, S >= T; query head n reads key head n // (N / K).
        v: [1, K, S, V] values.
        host_plan, device_plan: the forest's packed plan, with the fields of `plan_attention` for
            the window.
        scale: factor of the scores.
        window: see only the ancestors less than this many tokens above on the path, itself
            included (Longformer, Beltagy et al. 2020, with distances of the path); 0 for all.
        softcap: x becomes softcap * tanh(x / softcap) (Gemma 2, 2024, section 2); 0 for none.
        sinks: [N] a further score of each head that takes its share of the softmax and has no
            value (gpt-oss, 2025; Xiao et al. 2023); None for none.

    Returns:
        [1, T, N, V] contiguous, in v's dtype.

    Raises:
        LayoutError: shapes do not fit each other or the plan.
    """
    out, _ = torch.ops.prefix_rewrite.tree_attention(
        q, k, v, sinks, host_plan, device_plan, scale, window, softcap
    )
    return out
