"""Tree attention by plain tensor ops: any device, any head dims, the same blocks.

Shapes: T tokens, N query heads, K key heads, G = N / K, D head dim, V value dim, X either;
C equal squares of a block, R queries of each, M keys of each. Scores are [C, K, G * R, M].
Computes and returns fp32, or fp64 if an input is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_rewrite.ops.tree_attention.blocks import FULL, Block
from prefix_rewrite.ops.tree_attention.scores import Scores, compute_dtype

MAX_SCORES = 2**22  # scores held at once: bounds memory whatever the forest


def forward(
    q_NTD: Tensor, k_KTD: Tensor, v_KTV: Tensor, blocks: list[Block], rule: Scores
) -> tuple[Tensor, Tensor]:
    """Return the output [T, N, V] and the log-sum-exp [T, N] of every query's scores."""
    num_heads, num_tokens, _ = q_NTD.shape
    num_groups = num_heads // len(k_KTD)
    dtype = compute_dtype(q_NTD, k_KTD, v_KTV)
    out_TNV = q_NTD.new_zeros(num_tokens, num_heads, v_KTV.shape[-1], dtype=dtype)
    lse_TN = q_NTD.new_full((num_tokens, num_heads), -torch.inf, dtype=dtype)
    for chunk in _chunks(blocks, num_heads):
        out_view = chunk.queries(out_TNV.transpose(0, 1), num_groups)
        lse_view = chunk.queries(lse_TN.t().unsqueeze(-1), num_groups)
        q = chunk.queries(q_NTD, num_groups).flatten(2, 3).to(dtype)
        k, v = (chunk.keys(x).to(dtype) for x in (k_KTD, v_KTV))
        scores = chunk.hide(_scores(q, k, rule), num_groups, rule)
        lse = scores.logsumexp(-1, keepdim=True)
        out = (scores.sub_(lse).exp_() @ v).view(out_view.shape)
        lse = lse.view(lse_view.shape)
        out_view.lerp_(out, torch.sigmoid(lse - lse_view))
        lse_view.copy_(torch.logaddexp(lse_view, lse))
    return out_TNV, lse_TN


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

    FlashAttention's backward (Dao et al. 2022, algorithm 4): scores are recomputed, and every
    block takes the log-sum-exp of the whole attention.
    """
    num_groups, dtype = len(q_NTD) // len(k_KTD), lse_TN.dtype
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=dtype) for x in (q_NTD, k_KTD, v_KTV))
    delta_TN1 = (grad_TNV.to(dtype) * out_TNV).sum(-1, keepdim=True)
    per_query = [x.transpose(0, 1) for x in (grad_TNV, delta_TN1, lse_TN.unsqueeze(-1))]
    for chunk in _chunks(blocks, len(q_NTD)):
        q, grad, delta, lse = (
            chunk.queries(x, num_groups).flatten(2, 3).to(dtype) for x in (q_NTD, *per_query)
        )
        k, v = (chunk.keys(x).to(dtype) for x in (k_KTD, v_KTV))
        scores = _scores(q, k, rule)
        slope = rule.slope(scores)
        probs = chunk.hide(scores, num_groups, rule).sub_(lse).exp_()
        chunk.keys(grad_v).add_(probs.mT @ grad)
        grad_scores = (grad @ v.mT).sub_(delta).mul_(probs).mul_(slope)
        chunk.keys(grad_k).add_(grad_scores.mT @ q)
        grad_q_view = chunk.queries(grad_q, num_groups)
        grad_q_view.add_((grad_scores @ k).view(grad_q_view.shape))
    return grad_q.transpose(0, 1), grad_k.transpose(0, 1), grad_v.transpose(0, 1)


class _Chunk(NamedTuple):
    """Queries [first, end) of each of the block's squares, against each one's first M keys."""

    block: Block
    first: int
    end: int
    num_keys: int

    def queries(self, x_NTX: Tensor, num_groups: int) -> Tensor:
        """View as [C, K, G, R, X]."""
        rows = x_NTX[:, self.block.q0 : self.block.q1].unflatten(1, (self.block.num_squares, -1))
        return (
            rows[:, :, self.first : self.end].unflatten(0, (-1, num_groups)).permute(2, 0, 1, 3, 4)
        )

    def keys(self, x_KTX: Tensor) -> Tensor:
        """View as [C, K, M, X]."""
        rows = x_KTX[:, self.block.k0 : self.block.k1].unflatten(1, (self.block.num_squares, -1))
        return rows[:, :, : self.num_keys].transpose(0, 1)

    def hide(self, scores: Tensor, num_groups: int, rule: Scores) -> Tensor:
        """Set the scores of keys that their query does not see to -inf."""
        if self.block.kind != FULL or self.block.windowed:
            hidden = self._hidden(rule)[:, None, None]
            scores.unflatten(2, (num_groups, -1)).masked_fill_(hidden, -torch.inf)
        return scores

    def _hidden(self, rule: Scores) -> Tensor:
        """Return [C, R, M]: whether the query does not see the key."""
        block, num_squares = self.block, self.block.num_squares
        device = rule.end_S.device
        query = torch.arange(block.q0, block.q1, device=device).view(num_squares, -1, 1)
        key = torch.arange(block.k0, block.k1, device=device).view(num_squares, 1, -1)
        query, key = query[:, self.first : self.end], key[..., : self.num_keys]
        hidden = torch.zeros((), dtype=torch.bool, device=device)
        if block.kind != FULL:
            hidden = (key > query) | rule.ended(query, key)
        return hidden | rule.too_far(query, key) if block.windowed else hidden


def _scores(q: Tensor, k: Tensor, rule: Scores) -> Tensor:
    """Return the scores [C, K, G * R, M] of all pairs, whoever sees whom."""
    return rule.cap_((q @ k.mT).mul_(rule.scale))


def _chunks(blocks: list[Block], num_heads: int) -> Iterator[_Chunk]:
    for block in blocks:
        num_queries = (block.q1 - block.q0) // block.num_squares
        num_keys = (block.k1 - block.k0) // block.num_squares
        step = max(1, MAX_SCORES // (block.num_squares * num_heads * num_keys))
        for first in range(0, num_queries, step):
            end = min(first + step, num_queries)
            yield _Chunk(block, first, end, num_keys if block.kind == FULL else end)
