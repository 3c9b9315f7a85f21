"""The tree attention op: shapes, dtypes and autograd around the executors.

Shapes: T tokens, S of their keys, N query heads, K key heads, D head dim, V value dim.
Keys past the T-th are those of tokens without a query here: other ranks'. Else S = T.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.tree_attention import blockwise, cpu_flash, cuda_flash
from prefix_rewrite.ops.tree_attention.blocks import Block
from prefix_rewrite.ops.tree_attention.plan import DEPTH, SUBTREE_END, blocks_field
from prefix_rewrite.ops.tree_attention.scores import Scores, compute_dtype
from prefix_rewrite.plan import PlanView

_EXECUTORS: dict[str, ModuleType] = {
    "cpu_flash": cpu_flash,
    "cuda_flash": cuda_flash,
    "blockwise": blockwise,
}


def attention_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    softcap: float = 0.0,
) -> str:
    """Name the executor that runs tree attention on such tensors.

    Args:
        device: where the queries, keys and values are.
        dtype: what their dtypes promote to.
        head_dim: size of a query or key.
        value_dim: size of a value.
        softcap: what the scores are capped at, 0 for none; the flash kernels can't.

    Returns:
        'cpu_flash', 'cuda_flash' (in half precision, once it has agreed with plain tensor ops on
        that device) or 'blockwise', plain tensor ops.
    """
    device = torch.device(device)
    if softcap:
        return "blockwise"
    if device.type == "cpu":
        return "cpu_flash"
    is_taken = device.type == "cuda" and cuda_flash.takes(device, dtype, max(head_dim, value_dim))
    return "cuda_flash" if is_taken else "blockwise"


@torch.library.custom_op("prefix_rewrite::tree_attention", mutates_args=())
def tree_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    host_plan: Tensor,
    device_plan: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return the output [1, T, N, V] in v's dtype and the fp32 or fp64 log-sum-exp [T, N]."""
    _check(q, k, v, sinks, scale, window, softcap)
    plan = PlanView(host_plan, device_plan)
    blocks = _read_blocks(plan, window, q.shape[2], k.shape[2])
    with torch.autocast(q.device.type, enabled=False):
        rule = Scores(plan[SUBTREE_END], plan[DEPTH], scale, window, softcap)
        out_TNV, lse_TN = _executor(q, k, v, softcap).forward(q[0], k[0], v[0], blocks, rule)
        if sinks is not None:
            sinks_N = sinks.to(lse_TN.dtype)
            out_TNV = out_TNV * torch.sigmoid(lse_TN - sinks_N).unsqueeze(-1)
            lse_TN = torch.logaddexp(lse_TN, sinks_N)
    return out_TNV[None].to(v.dtype), lse_TN


@tree_attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    host_plan: Tensor,
    device_plan: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    _, num_heads, num_tokens, _ = q.shape
    out = v.new_empty(1, num_tokens, num_heads, v.shape[-1])
    return out, q.new_empty(num_tokens, num_heads, dtype=compute_dtype(q, k, v))


@torch.library.custom_op("prefix_rewrite::tree_attention_backward", mutates_args=())
def tree_attention_backward_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    host_plan: Tensor,
    device_plan: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in their shapes and dtypes.

    Sinks need nothing here: they are in the output and in the log-sum-exp.
    """
    plan = PlanView(host_plan, device_plan)
    blocks = _read_blocks(plan, window, q.shape[2], k.shape[2])
    inputs = (x[0] for x in (grad_out, q, k, v, out))
    with torch.autocast(q.device.type, enabled=False):
        rule = Scores(plan[SUBTREE_END], plan[DEPTH], scale, window, softcap)
        executor = _executor(q, k, v, softcap)
        grads = executor.backward(*inputs, lse, blocks, rule)
    grad_q, grad_k, grad_v = (
        grad.to(x.dtype).contiguous().transpose(0, 1)[None]
        for grad, x in zip(grads, (q, k, v), strict=True)
    )
    return grad_q, grad_k, grad_v


@tree_attention_backward_op.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    host_plan: Tensor,
    device_plan: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (
        x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v)
    )
    return grad_q, grad_k, grad_v


def _save(ctx, inputs, output) -> None:
    q, k, v, sinks, host_plan, device_plan, *ctx.rule = inputs
    ctx.save_for_backward(q, k, v, *output, host_plan, device_plan, sinks)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out: Tensor | None, grad_lse: None):
    if grad_out is None:
        return (None,) * 9
    *saved, sinks = ctx.saved_tensors
    grads = torch.ops.prefix_rewrite.tree_attention_backward(grad_out, *saved, *ctx.rule)
    grad_sinks = None
    if sinks is not None and ctx.needs_input_grad[3]:
        grad_sinks = _sinks_gradient(grad_out, saved[3], saved[4], sinks)
    return *grads, grad_sinks, None, None, None, None, None


tree_attention_op.register_autograd(_backward, setup_context=_save)


def _sinks_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[N]: a sink takes its share of the softmax and gives nothing, so it only lowers the rest."""
    share_TN = torch.exp(sinks.to(lse.dtype) - lse)
    delta_TN = (grad_out[0].to(lse.dtype) * out[0].to(lse.dtype)).sum(-1)
    return -(share_TN * delta_TN).sum(0).to(sinks.dtype)


def _executor(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> ModuleType:
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return _EXECUTORS[attention_backend(q.device, dtype, q.shape[-1], v.shape[-1], softcap)]


def _read_blocks(plan: PlanView, window: int, num_queries: int, num_keys: int) -> list[Block]:
    blocks = [Block(*row) for row in plan[blocks_field(window)].tolist()]
    num_planned = max((block.q1 for block in blocks), default=0)
    for name, planned, given in (
        ("queries", num_planned, num_queries),
        ("keys", len(plan[SUBTREE_END]), num_keys),
    ):
        if planned != given:
            raise LayoutError(
                f"the plan must be of as many tokens as the {name}, got {planned} and {given}; "
                "give the model the layout of the forest that it runs"
            )
    return blocks


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    if not scale > 0:  # the kernels scale masked scores, which are -inf
        raise LayoutError(f"attention's scale must be positive, got {scale}; negate the queries")
    if not (window >= 0 and 0 <= softcap < float("inf")):
        raise LayoutError(
            "attention's window and softcap must be positive, or 0 for none, "
            f"got {window} and {softcap}"
        )
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and q.shape[0] == k.shape[0] == v.shape[0] == 1
        and q.shape[2] <= k.shape[2] == v.shape[2]
        and k.shape[1] == v.shape[1]
        and q.shape[3] == k.shape[3]
        and q.shape[1] % max(k.shape[1], 1) == 0
        and (sinks is None or sinks.shape == (q.shape[1],))
    )
    if not fits:
        raise LayoutError(
            "tree attention needs q [1, N, T, D], k [1, K, S, D], v [1, K, S, V], S >= T, N a "
            f"multiple of K, sinks [N], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            f"{'' if sinks is None else f', {tuple(sinks.shape)}'}; run one forest at a time"
        )
