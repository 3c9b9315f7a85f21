"""Edge log-probabilities of a head whose vocabulary is sharded over a tensor-parallel group.

Each rank runs the tiles of its own vocabulary entries; what is exchanged is a few numbers for each
row and edge, never logits. With l_s and H_s the log-sum-exp and the entropy within shard s:
l = logsumexp_s l_s, log p = log p_s + (l_s - l), H = sum_s exp(l_s - l) (H_s + l - l_s).

Shapes: R rows, D hidden size, V vocabulary of this rank, E edges, S shards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from prefix_rewrite.distributed.collectives import process_group
from prefix_rewrite.ops.edge_logprobs import tiled
from prefix_rewrite.ops.edge_logprobs.head import Head
from prefix_rewrite.ops.edge_logprobs.steps import final_dtype, parse_steps


@torch.library.custom_op("prefix_rewrite::sharded_edge_logprobs", mutates_args=())
def sharded_edge_logprobs_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    edge_row: Tensor,
    edge_targets: Tensor,
    temperature: Tensor,
    steps: str,
    constants: list[float],
    entropy: bool,
    first_entry: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `edge_logprobs_op`, on all ranks of a group.

    Args:
        hidden, edge_row, edge_targets, temperature: the same on every rank.
        weight, bias: this rank's vocabulary entries.
        first_entry: the first of them.
    """
    order, head = _own_head(
        hidden, weight, bias, edge_row, edge_targets, temperature, steps, constants, first_entry
    )
    own_E, own_lse_R, own_entropy_R = tiled.forward(head, entropy)
    lse_SR = _gather(own_lse_R, group)
    lse_R = lse_SR.logsumexp(0)
    shift_R = own_lse_R - lse_R
    inside_E = (head.target_E >= 0) & (head.target_E < len(weight))
    sorted_E = torch.where(inside_E, own_E + shift_R[head.row_E], 0)
    dist.all_reduce(sorted_E, group=process_group(group))
    entropy_R = (own_entropy_R - shift_R) * shift_R.exp() if entropy else own_entropy_R
    if entropy:
        dist.all_reduce(entropy_R, group=process_group(group))
    return torch.empty_like(sorted_E).index_copy_(0, order, sorted_E), entropy_R, lse_R


@sharded_edge_logprobs_op.register_fake
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
    first_entry: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = final_dtype(hidden.dtype, parse_steps(steps, constants))
    dtype = torch.float64 if logits == torch.float64 else torch.float32
    num_rows = hidden.shape[1]
    return (
        hidden.new_empty(edge_row.shape[0], dtype=dtype),
        hidden.new_empty(num_rows if entropy else 0, dtype=dtype),
        hidden.new_empty(num_rows, dtype=dtype),
    )


@torch.library.custom_op("prefix_rewrite::sharded_edge_logprobs_backward", mutates_args=())
def sharded_edge_logprobs_backward_op(
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
    first_entry: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, added up over the shards, and of this rank's entries."""
    order, head = _own_head(
        hidden, weight, bias, edge_row, edge_targets, temperature, steps, constants, first_entry
    )
    saved = tiled.Saved(lse, entropy, grad_logprobs[order], grad_entropy)
    grad_RD, grad_VD, grad_V = tiled.backward(head, saved, head_trains=True)
    dist.all_reduce(grad_RD, group=process_group(group))
    assert grad_VD is not None, "a head that trains has a gradient"
    return grad_RD[None], grad_VD, weight.new_empty(0) if grad_V is None else grad_V


@sharded_edge_logprobs_backward_op.register_fake
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
    first_entry: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.steps, ctx.constants, ctx.entropy, ctx.first_entry, ctx.group = inputs
    _, entropy, lse = output
    ctx.save_for_backward(*tensors, entropy, lse)
    ctx.mark_non_differentiable(lse)


def _backward(
    ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_lse: Tensor
) -> tuple[Tensor | None, ...]:
    grad_hidden, grad_weight, grad_bias = torch.ops.prefix_rewrite.sharded_edge_logprobs_backward(
        grad_logprobs,
        grad_entropy if ctx.entropy else None,
        *ctx.saved_tensors,
        ctx.steps,
        ctx.constants,
        ctx.first_entry,
        ctx.group,
    )
    bias = ctx.saved_tensors[2]
    return grad_hidden, grad_weight, None if bias is None else grad_bias, *[None] * 8


sharded_edge_logprobs_op.register_autograd(_backward, setup_context=_save)


def sharded_edge_logprobs(
    hidden: Tensor,
    weight: Any,
    bias: Any,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the op on the shards of a head that `is_sharded`; `rest` as the op's `edge_row` on."""
    mesh = weight.device_mesh
    # DTensor cuts a dimension as torch.chunk does.
    first_entry = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
    return torch.ops.prefix_rewrite.sharded_edge_logprobs(
        hidden,
        weight.to_local(),
        None if bias is None else bias.to_local(),
        *rest,
        first_entry,
        mesh.get_group().group_name,
    )


def is_sharded(weight: Any) -> bool:
    """Say whether a head's weight [V, D] is sharded by vocabulary over a mesh of one dimension."""
    return isinstance(weight, DTensor) and tuple(weight.placements) == (Shard(0),)


def _own_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    edge_row: Tensor,
    edge_targets: Tensor,
    temperature: Tensor,
    steps: str,
    constants: list[float],
    first_entry: int,
) -> tuple[Tensor, Head]:
    """Return the edges' order by row, and this rank's head; other shards' targets lie outside."""
    order = edge_row.argsort(stable=True)
    program = parse_steps(steps, constants)
    row_E, target_E = edge_row[order], edge_targets[order] - first_entry
    return order, Head(hidden[0], weight, bias, row_E, target_E, temperature, program)


def _gather(values: Tensor, group: str) -> Tensor:
    """[...] to [S, ...]"""
    size = dist.get_world_size(process_group(group))
    parts = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(parts, values.contiguous(), group=process_group(group))
    return torch.stack(parts)
