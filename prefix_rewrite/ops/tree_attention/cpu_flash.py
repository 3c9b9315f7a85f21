"""Tree attention on CPU: PyTorch's flash kernel block by block, merged by log-sum-exp.

Shapes: T tokens, N query heads, K key heads, D head dim, V value dim, P = max(D, V).
The kernel checks little. What it needs, or dies, or is silently wrong: equal head dims and unit
stride in the last one (`padded`), N % K == 0 (the op checks), no empty block and no query without
a key in a block (the plan). Computes and returns fp32, or fp64 if an input is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_rewrite.ops.tree_attention.block_views import padded, rows, tokens
from prefix_rewrite.ops.tree_attention.blocks import ANCESTOR, Block
from prefix_rewrite.ops.tree_attention.scores import Scores, compute_dtype

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q_NTD: Tensor, k_KTD: Tensor, v_KTV: Tensor, blocks: list[Block], rule: Scores
) -> tuple[Tensor, Tensor]:
    """Return the output [T, N, V] and the log-sum-exp [T, N] of every query's scores."""
    dtype = compute_dtype(q_NTD, k_KTD, v_KTV)
    q_NTP, k_KTP, v_KTP = padded(*(x.to(dtype) for x in (q_NTD, k_KTD, v_KTV)))
    num_heads, num_tokens, padded_dim = q_NTP.shape
    out_TNP = q_NTP.new_empty(num_tokens, num_heads, padded_dim)
    lse_TN = q_NTP.new_empty(num_tokens, num_heads)
    for block in blocks:
        out, lse = flash_forward(
            rows(q_NTP, block.q0, block.q1, block.num_squares),
            rows(k_KTP, block.k0, block.k1, block.num_squares),
            rows(v_KTP, block.k0, block.k1, block.num_squares),
            0.0,
            block.on_diagonal,
            attn_mask=_mask(block, rule, q_NTP.dtype),
            scale=rule.scale,
        )
        out, lse = tokens(out), tokens(lse)
        out_so_far, lse_so_far = out_TNP[block.q0 : block.q1], lse_TN[block.q0 : block.q1]
        if not block.on_diagonal:
            out_so_far.lerp_(out, torch.sigmoid(lse - lse_so_far).unsqueeze(-1))
            torch.logaddexp(lse_so_far, lse, out=lse_so_far)
        elif len(out) == num_tokens:
            out_TNP, lse_TN = out, lse  # a lone chain is spared the copy
        else:
            out_so_far.copy_(out)
            lse_so_far.copy_(lse)
    return out_TNP[..., : v_KTV.shape[-1]].contiguous(), lse_TN


def backward(
    grad_TNV: Tensor,
    q_NTD: Tensor,
    k_KTD: Tensor,
    v_KTV: Tensor,
    out_TNV: Tensor,
    lse_TN: Tensor,
    blocks: list[Block],
    rule: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q [T, N, D], k [T, K, D] and v [T, K, V].

    A block's flash backward, given the *whole* attention's output and log-sum-exp, returns
    exactly the block's share of each gradient (Liu et al. 2023, Ring Attention).
    """
    per_query = (grad_TNV.transpose(0, 1), out_TNV.transpose(0, 1))
    q_NTP, k_KTP, v_KTP, grad_NTP, out_NTP = padded(
        *(x.to(lse_TN.dtype) for x in (q_NTD, k_KTD, v_KTV, *per_query))
    )
    grads = [x.new_empty(x.shape[1], x.shape[0], x.shape[2]) for x in (q_NTP, k_KTP, v_KTP)]
    for grad in grads[1:]:
        grad[q_NTD.shape[1] :].zero_()  # no diagonal block writes the keys of other ranks
    lse_NT1 = lse_TN.t().unsqueeze(-1)
    for block in blocks:
        q_side = (block.q0, block.q1, block.num_squares)
        k_side = (block.k0, block.k1, block.num_squares)
        shares = flash_backward(
            rows(grad_NTP, *q_side),
            rows(q_NTP, *q_side),
            rows(k_KTP, *k_side),
            rows(v_KTP, *k_side),
            rows(out_NTP, *q_side),
            rows(lse_NT1, *q_side).squeeze(-1),
            0.0,
            block.on_diagonal,
            attn_mask=_mask(block, rule, q_NTP.dtype),
            scale=rule.scale,
        )
        for i, (first, end, _) in enumerate((q_side, k_side, k_side)):
            share, here = tokens(shares[i]), grads[i][first:end]
            if not block.on_diagonal:
                here.add_(share)
            elif len(share) == len(grads[i]):
                grads[i] = share
            else:
                here.copy_(share)
    grad_q, grad_k, grad_v = grads
    dim, value_dim = q_NTD.shape[-1], v_KTV.shape[-1]
    return grad_q[..., :dim], grad_k[..., :dim], grad_v[..., :value_dim]


def _mask(block: Block, rule: Scores, dtype: torch.dtype) -> Tensor | None:
    """Return what `is_causal` leaves to mask: keys of ended subtrees, and those out of reach."""
    if not block.is_masked:
        return None
    query = torch.arange(block.q0, block.q1).unsqueeze(1)
    key = torch.arange(block.k0, block.k1)
    hidden = rule.ended(query, key) if block.kind == ANCESTOR else rule.too_far(query, key)
    if block.kind == ANCESTOR and block.windowed:
        hidden |= rule.too_far(query, key)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
