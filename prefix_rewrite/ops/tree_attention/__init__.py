"""Causal attention on a prefix forest: every token sees its ancestors and itself."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_rewrite.ops.tree_attention.op import attention_backend
from prefix_rewrite.ops.tree_attention.plan import plan_attention

__all__ = ["attention_backend", "plan_attention", "tree_attention"]


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, host_plan: Tensor, device_plan: Tensor, scale: float
) -> Tensor:
    """Attend from every token to itself and to its ancestors.

    softmax(scale * q_t . k_s) over the ancestors s of t, t included, computed in fp32 (fp64 if an
    input is). Any strides; differentiable once, in q, k and v.

    Args:
        q: [1, N, T, D] queries.
        k: [1, K, S, D] keys, S >= T; query head n reads key head n // (N / K).
        v: [1, K, S, V] values.
        host_plan, device_plan: the forest's packed plan, with the fields of `plan_attention`.
        scale: factor of the scores.

    Returns:
        [1, T, N, V] contiguous, in v's dtype.

    Raises:
        LayoutError: shapes do not fit each other or the plan.
    """
    out, _ = torch.ops.prefix_rewrite.tree_attention(q, k, v, host_plan, device_plan, scale)
    return out
