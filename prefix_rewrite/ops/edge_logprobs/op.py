"""The edge log-probability op: checks, order of the edges and autograd around the tiles.

Shapes: R rows, D hidden size, V vocabulary, E edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.edge_logprobs import tiled
from prefix_rewrite.ops.edge_logprobs.head import Head
from prefix_rewrite.ops.edge_logprobs.steps import final_dtype, parse_steps


@torch.library.custom_op("prefix_rewrite::edge_logprobs", mutates_args=())
def edge_logprobs_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    edge_row: Tensor,
    edge_targets: Tensor,
    temperature: Tensor,
    steps: str,
    constants: list[float],
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [E], entropies [R] (or [0]) and log-sum-exp [R]."""
    _check_targets(edge_targets, len(weight))
    order, head = _sorted_head(
        hidden, weight, bias, edge_row, edge_targets, temperature, steps, constants
    )
    with torch.autocast(hidden.device.type, enabled=False):
        sorted_E, lse_R, entropy_R = tiled.forward(head, entropy)
    return torch.empty_like(sorted_E).index_copy_(0, order, sorted_E), entropy_R, lse_R


@edge_logprobs_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    edge_row: Tensor,
    edge_targets: Tensor,
    temperature: Tensor,
    steps: str,
    constants: list[float],
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = final_dtype(hidden.dtype, parse_steps(steps, constants))
    dtype = torch.float64 if logits == torch.float64 else torch.float32
    num_rows = hidden.shape[1]
    return (
        hidden.new_empty(edge_row.shape[0], dtype=dtype),
        hidden.new_empty(num_rows if entropy else 0, dtype=dtype),
        hidden.new_empty(num_rows, dtype=dtype),
    )


@torch.library.custom_op("prefix_rewrite::edge_logprobs_backward", mutates_args=())
def edge_logprobs_backward_op(
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    edge_row: Tensor,
    edge_targets: Tensor,
    temperature: Tensor,
    entropy: Tensor,
    lse: Tensor,
    steps: str,
    constants: list[float],
    head_trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight and bias; [0] of a frozen head, or no bias."""
    order, head = _sorted_head(
        hidden, weight, bias, edge_row, edge_targets, temperature, steps, constants
    )
    saved = tiled.Saved(lse, entropy, grad_logprobs[order], grad_entropy)
    with torch.autocast(hidden.device.type, enabled=False):
        grads = tiled.backward(head, saved, head_trains)
    grad_RD, grad_VD, grad_V = (weight.new_empty(0) if x is None else x for x in grads)
    return grad_RD[None], grad_VD, grad_V


@edge_logprobs_backward_op.register_fake
def _(
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    edge_row: Tensor,
    edge_targets: Tensor,
    temperature: Tensor,
    entropy: Tensor,
    lse: Tensor,
    steps: str,
    constants: list[float],
    head_trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight, grad_bias = (
        x.new_empty(x.shape) if head_trains and x is not None else weight.new_empty(0)
        for x in (weight, bias)
    )
    return hidden.new_empty(hidden.shape), grad_weight, grad_bias


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.steps, ctx.constants, ctx.entropy = inputs
    _, entropy, lse = output
    ctx.save_for_backward(*tensors, entropy, lse)
    ctx.mark_non_differentiable(lse)


def _backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor, grad_lse: Tensor):
    weight_trains, bias_trains = ctx.needs_input_grad[1:3]
    grad_hidden, grad_weight, grad_bias = torch.ops.prefix_rewrite.edge_logprobs_backward(
        grad_logprobs,
        grad_entropy if ctx.entropy else None,
        *ctx.saved_tensors,
        ctx.steps,
        ctx.constants,
        weight_trains or bias_trains,
    )
    return (
        grad_hidden,
        grad_weight if weight_trains else None,
        grad_bias if bias_trains else None,
        *[None] * 6,
    )


edge_logprobs_op.register_autograd(_backward, setup_context=_save)


def _sorted_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    edge_row: Tensor,
    edge_targets: Tensor,
    temperature: Tensor,
    steps: str,
    constants: list[float],
) -> tuple[Tensor, Head]:
    """Return the edges' order by row, and the head with its edges in that order."""
    order = edge_row.argsort(stable=True)
    program = parse_steps(steps, constants)
    row_E, target_E = edge_row[order], edge_targets[order]
    return order, Head(hidden[0], weight, bias, row_E, target_E, temperature, program)


def _check_targets(edge_targets: Tensor, vocab_size: int) -> None:
    if not len(edge_targets):
        return
    low, high = (int(x) for x in edge_targets.aminmax())
    if low < 0 or high >= vocab_size:
        raise LayoutError(
            f"sampled ids must lie in [0, {vocab_size}), the head's vocabulary, got {low} to "
            f"{high}; give calls sampled with this model's tokenizer"
        )
