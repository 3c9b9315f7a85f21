"""Edge log-probabilities tile by tile: [R, V] never exists, in either direction.

Shapes: R rows, D hidden size, V vocabulary, E edges; r rows and v vocabulary entries of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_rewrite.ops.edge_logprobs.head import Head
from prefix_rewrite.ops.edge_logprobs.steps import Saved, final_dtype, steps_backward


def forward(head: Head, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [E], log-sum-exp [R] and, if asked for, entropies [R] (else [0]).

    With z the logits over the temperature: log p(t) = z_t - lse, H = lse - sum_j p_j z_j; both
    sums run over the vocabulary tile by tile, by log-sum-exp.
    """
    hidden_RD = head.hidden_RD.to(head.product_dtype)
    logit_E = hidden_RD.new_zeros(len(head.row_E), dtype=head.softmax_dtype)
    lse_R = logit_E.new_full((len(hidden_RD),), -torch.inf)
    mean_R = logit_E.new_zeros(len(hidden_RD) if entropy else 0)
    row_tiles = head.row_tiles()
    for entries in head.vocab_tiles():
        weights = head.weights(entries)
        for rows, edges in row_tiles:
            z_rv = head.logits(hidden_RD[rows], weights)
            row, entry, inside = head.edges_in(rows, edges, entries)
            logit_E[edges] = torch.where(inside, z_rv[row, entry], logit_E[edges])
            lse_r = z_rv.logsumexp(-1)
            if entropy:
                mean_r = (z_rv - lse_r.unsqueeze(1)).exp_().mul_(z_rv).sum(-1)
                mean_R[rows].lerp_(mean_r, torch.sigmoid(lse_r - lse_R[rows]))
            torch.logaddexp(lse_R[rows], lse_r, out=lse_R[rows])
    entropy_R = lse_R - mean_R if entropy else mean_R
    return logit_E - lse_R[head.row_E], lse_R, entropy_R


def backward(
    head: Head, lse_R: Tensor, entropy_R: Tensor, grad_E: Tensor, grad_entropy_R: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the rows, the weight and the bias; logits are recomputed.

    With g_r the sum of a row's edge gradients and h_r its entropy's:
    dz_rj = sum over the row's edges to j of g - p_rj (g_r + h_r (log p_rj + H_r)).
    """
    hidden_RD = head.hidden_RD.to(head.product_dtype)
    grad_R = torch.zeros_like(lse_R).index_add_(0, head.row_E, grad_E)
    sum_dtype = torch.promote_types(head.product_dtype, torch.float32)
    grad_hidden_RD = torch.zeros_like(hidden_RD, dtype=sum_dtype)
    grad_weight_VD = torch.empty_like(head.weight_VD)
    grad_bias_V = None if head.bias_V is None else torch.empty_like(head.bias_V)
    row_tiles = head.row_tiles()
    for entries in head.vocab_tiles():
        weights = head.weights(entries)
        grad_weight_vD = torch.zeros_like(weights[0], dtype=sum_dtype)
        grad_bias_v = grad_weight_vD.new_zeros(len(grad_weight_vD))
        for rows, edges in row_tiles:
            saved: Saved = []
            log_probs_rv = head.logits(hidden_RD[rows], weights, saved)
            log_probs_rv.sub_(lse_R[rows].unsqueeze(1))
            factor_rv = grad_R[rows].unsqueeze(1)
            if grad_entropy_R is not None:
                entropy_r1, share_r1 = entropy_R[rows, None], grad_entropy_R[rows, None]
                factor_rv = (log_probs_rv + entropy_r1).mul_(share_r1).add_(factor_rv)
            grad_z_rv = log_probs_rv.exp_().mul_(factor_rv).neg_()
            row, entry, inside = head.edges_in(rows, edges, entries)
            hit = torch.where(inside, grad_E[edges], 0)
            grad_z_rv.index_put_((row, entry), hit, accumulate=True)
            grad_rv = _through_steps(head, grad_z_rv, saved)
            grad_hidden_RD[rows] += grad_rv @ weights[0]
            grad_weight_vD += grad_rv.t() @ hidden_RD[rows]
            grad_bias_v += grad_rv.sum(0, dtype=sum_dtype)
        grad_weight_VD[entries] = grad_weight_vD
        if grad_bias_V is not None:
            grad_bias_V[entries] = grad_bias_v
    return grad_hidden_RD.to(head.hidden_RD.dtype), grad_weight_VD, grad_bias_V


def _through_steps(head: Head, grad_z_rv: Tensor, saved: Saved) -> Tensor:
    """Return the gradient of the head's own output, rounded where the model rounds it."""
    grad_rv = grad_z_rv.div_(head.temperature_1)
    grad_rv = grad_rv.to(final_dtype(head.hidden_RD.dtype, head.steps))
    grad_rv = steps_backward(grad_rv, head.steps, saved)
    return grad_rv.to(head.product_dtype)
