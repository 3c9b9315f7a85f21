"""Edge log-probabilities tile by tile: [R, V] never exists, in either direction.

Shapes: R rows, D hidden size, V vocabulary, E edges; r rows and v vocabulary entries of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_rewrite.ops.edge_logprobs.head import Head
from prefix_rewrite.ops.edge_logprobs.steps import Kept, final_dtype, steps_backward


def forward(head: Head, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [E], log-sum-exp [R] and, if asked for, entropies [R] (else [0]).

    Tiles of the vocabulary merge by their log-sum-exp: with w a tile's share of the probability
    and h the entropy within it, the whole entropy is the sum of w (h - log w).
    """
    hidden_RD = head.hidden_RD.to(head.product_dtype)
    logit_E = hidden_RD.new_zeros(len(head.row_E), dtype=head.softmax_dtype)
    nothing = torch.finfo(logit_E.dtype).min / 2  # log of no probability; finite, unlike -inf
    lse_R = logit_E.new_full((len(hidden_RD),), nothing)
    entropy_R = torch.zeros_like(lse_R) if entropy else logit_E.new_empty(0)
    row_tiles = head.row_tiles()
    for entries in head.vocab_tiles():
        weights = head.weights(entries)
        for rows, edges in row_tiles:
            z_rv = head.logits(hidden_RD[rows], weights)
            row, entry, inside = head.edges_in(rows, edges, entries)
            logit_E[edges] = torch.where(inside, z_rv[row, entry], logit_E[edges])
            tile_r, before_r = z_rv.logsumexp(-1), lse_R[rows]
            after_r = torch.logaddexp(before_r, tile_r)
            if entropy:
                log_probs_rv = z_rv.sub_(tile_r.unsqueeze(1))
                inner_r = (log_probs_rv.exp() * log_probs_rv).sum(-1).neg_()
                outer_r = entropy_R[rows] + (after_r - before_r)
                share_r = torch.sigmoid(tile_r - before_r)
                entropy_R[rows] = outer_r.lerp(inner_r + (after_r - tile_r), share_r)
            lse_R[rows] = after_r
    return logit_E - lse_R[head.row_E], lse_R, entropy_R


@dataclass(frozen=True)
class Saved:
    """What the forward leaves, and the gradients of its results; edges ascend by row.

    Attributes:
        lse_R, entropy_R: as `forward` returned them.
        grad_E: gradient of the log-probabilities.
        grad_entropy_R: gradient of the entropies, None where there are none.
    """

    lse_R: Tensor
    entropy_R: Tensor
    grad_E: Tensor
    grad_entropy_R: Tensor | None


def backward(
    head: Head, saved: Saved, head_trains: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the rows, the weight and the bias; logits are recomputed."""
    hidden_RD = head.hidden_RD.to(head.product_dtype)
    sum_dtype = torch.promote_types(head.product_dtype, torch.float32)
    grad_R = torch.zeros_like(saved.lse_R).index_add_(0, head.row_E, saved.grad_E)
    grad_hidden_RD = torch.zeros_like(hidden_RD, dtype=sum_dtype)
    grad_weight_VD, grad_bias_V = (
        torch.empty_like(x) if head_trains and x is not None else None
        for x in (head.weight_VD, head.bias_V)
    )
    row_tiles = head.row_tiles()
    for entries in head.vocab_tiles():
        weights = head.weights(entries)
        grad_weight_vD = torch.zeros_like(weights[0], dtype=sum_dtype)
        grad_bias_v = grad_weight_vD.new_zeros(len(grad_weight_vD))
        for rows, edges in row_tiles:
            tile = (rows, edges, entries)
            grad_rv = _grad_logits(head, saved, grad_R, hidden_RD[rows], weights, tile)
            grad_hidden_RD[rows].add_(grad_rv @ weights[0])
            if head_trains:
                grad_weight_vD.add_(grad_rv.t() @ hidden_RD[rows])
                grad_bias_v.add_(grad_rv.sum(0, dtype=sum_dtype))
        if grad_weight_VD is not None:
            grad_weight_VD[entries] = grad_weight_vD
        if grad_bias_V is not None:
            grad_bias_V[entries] = grad_bias_v
    return grad_hidden_RD.to(head.hidden_RD.dtype), grad_weight_VD, grad_bias_V


def _grad_logits(
    head: Head,
    saved: Saved,
    grad_R: Tensor,
    hidden_rD: Tensor,
    weights: tuple[Tensor, Tensor | None],
    tile: tuple[slice, slice, slice],
) -> Tensor:
    """Return the gradient [r, v] of a tile of the head's own output.

    With z the logits over the temperature, g_r the sum of a row's edge gradients and h_r the
    gradient of its entropy H_r:
    dz_rj = sum over the row's edges to j of g - p_rj (g_r + h_r (log p_rj + H_r)).
    """
    rows, edges, entries = tile
    kept: Kept = []
    log_probs_rv = head.logits(hidden_rD, weights, kept).sub_(saved.lse_R[rows].unsqueeze(1))
    factor_rv = grad_R[rows].unsqueeze(1)
    if saved.grad_entropy_R is not None:
        entropy_r1 = saved.entropy_R[rows].unsqueeze(1)
        share_r1 = saved.grad_entropy_R[rows].unsqueeze(1)
        factor_rv = (log_probs_rv + entropy_r1).mul_(share_r1).add_(factor_rv)
    grad_z_rv = log_probs_rv.exp_().mul_(factor_rv).neg_()
    row, entry, inside = head.edges_in(rows, edges, entries)
    hit_e = torch.where(inside, saved.grad_E[edges], 0)
    grad_z_rv.index_put_((row, entry), hit_e, accumulate=True)
    # From here in the dtypes of the model's own backward.
    grad_rv = grad_z_rv.div_(head.temperature_1)
    grad_rv = grad_rv.to(final_dtype(head.hidden_RD.dtype, head.steps))
    return steps_backward(grad_rv, head.steps, kept).to(head.product_dtype)
