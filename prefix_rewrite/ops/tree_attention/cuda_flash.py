"""Tree attention on CUDA: PyTorch's flash kernel block by block, merged by log-sum-exp.

Shapes: T tokens, N query heads, K key heads, D head dim, V value dim, P = max(D, V), padded.
The kernel takes no mask, so masked blocks (few and small) go by plain tensor ops. It takes half
precision, and returns it; blocks are merged in fp32.

This project's tests have no GPU: they run this file over a stand-in for the kernel. So `is_right`
compares with plain tensor ops on the device itself, once, before anything is trusted to it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from prefix_rewrite.ops.tree_attention import blockwise
from prefix_rewrite.ops.tree_attention.block_views import padded, rows, tokens
from prefix_rewrite.ops.tree_attention.blocks import CAUSAL, FULL, Block
from prefix_rewrite.ops.tree_attention.scores import Scores

MAX_DIM = 256
WIDE_LOAD = 8  # elements that the kernel loads at once

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


def forward(
    q_NTD: Tensor, k_KTD: Tensor, v_KTV: Tensor, blocks: list[Block], rule: Scores
) -> tuple[Tensor, Tensor]:
    """Return the fp32 output [T, N, V] and the fp32 log-sum-exp [T, N] of every query's scores."""
    masked, plain = _by_mask(blocks)
    out_TNV, lse_TN = blockwise.forward(q_NTD, k_KTD, v_KTV, masked, rule)
    q_NTP, k_KTP, v_KTP = padded(q_NTD, k_KTD, v_KTV, multiple=WIDE_LOAD)
    for block in plain:
        k_side = (block.k0, block.k1, block.num_squares)
        out, lse, *_ = flash_forward(
            rows(q_NTP, block.q0, block.q1, block.num_squares),
            rows(k_KTP, *k_side),
            rows(v_KTP, *k_side),
            0.0,
            block.on_diagonal,
            scale=rule.scale,
        )
        out, lse = tokens(out)[..., : v_KTV.shape[-1]].float(), tokens(lse)
        out_so_far, lse_so_far = out_TNV[block.q0 : block.q1], lse_TN[block.q0 : block.q1]
        out_so_far.lerp_(out, torch.sigmoid(lse - lse_so_far).unsqueeze(-1))
        lse_so_far.copy_(torch.logaddexp(lse_so_far, lse))
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
    """Return the fp32 gradients of q [T, N, D], k [T, K, D] and v [T, K, V].

    A block's flash backward, given the *whole* attention's output and log-sum-exp, returns
    exactly the block's share of each gradient (Liu et al. 2023, Ring Attention).
    """
    masked, plain = _by_mask(blocks)
    grads = blockwise.backward(grad_TNV, q_NTD, k_KTD, v_KTV, out_TNV, lse_TN, masked, rule)
    q_NTP, k_KTP, v_KTP, grad_NTP, out_NTP = padded(
        q_NTD,
        k_KTD,
        v_KTV,
        grad_TNV.transpose(0, 1),
        out_TNV.transpose(0, 1),
        multiple=WIDE_LOAD,
    )
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_NTD.device)
    for block in plain:
        q_side = (block.q0, block.q1, block.num_squares)
        k_side = (block.k0, block.k1, block.num_squares)
        shares = flash_backward(
            rows(grad_NTP, *q_side),
            rows(q_NTP, *q_side),
            rows(k_KTP, *k_side),
            rows(v_KTP, *k_side),
            rows(out_NTP, *q_side),
            rows(lse_TN.t().unsqueeze(-1), *q_side).squeeze(-1).contiguous(),
            None,
            None,
            (block.q1 - block.q0) // block.num_squares,
            (block.k1 - block.k0) // block.num_squares,
            0.0,
            block.on_diagonal,
            no_dropout,
            no_dropout[0],
            scale=rule.scale,
        )
        for grad, share, (first, end, _) in zip(
            grads, shares, (q_side, k_side, k_side), strict=True
        ):
            grad[first:end].add_(tokens(share)[..., : grad.shape[-1]])
    return grads


def _by_mask(blocks: list[Block]) -> tuple[list[Block], list[Block]]:
    masked = [block for block in blocks if block.is_masked]
    return masked, [block for block in blocks if not block.is_masked]


@functools.cache
def takes(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Say whether the kernel is there for such tensors, and right."""
    fits = dtype in (torch.float16, torch.bfloat16) and dim <= MAX_DIM
    return fits and torch.cuda.is_available() and is_right(device, dtype, dim)


def is_right(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Say whether the kernel agrees with plain tensor ops on this device, and warn if it doesn't.

    Args:
        device: the CUDA device.
        dtype: fp16 or bf16.
        dim: head dim, at most `MAX_DIM`.
    """
    try:
        error = max(_errors(device, dtype, dim))
    except RuntimeError as failure:
        problem = f"fails: {failure}"
    else:
        if error <= 4 * torch.finfo(dtype).eps:
            return True
        problem = f"differs from plain tensor ops by {error:.1e}, relative L2"
    warnings.warn(
        f"PyTorch's flash attention on {device} in {dtype} with head dim {dim} {problem}; tree "
        "attention runs by plain tensor ops there, exactly and slower",
        stacklevel=2,
    )
    return False


def _errors(device: torch.device, dtype: torch.dtype, dim: int) -> Sequence[float]:
    """Return the relative L2 error of the output, the log-sum-exp and each gradient.

    On a prompt with two equal answers: batched squares, a rectangle, grouped heads, sizes that
    are no multiple of a tile.
    """
    blocks = [
        Block(CAUSAL, 0, 150, 0, 150),
        Block(CAUSAL, 150, 284, 150, 284, num_squares=2),
        Block(FULL, 150, 284, 0, 150),
    ]
    end = torch.tensor([284] * 150 + [217] * 67 + [284] * 67, device=device)
    rule = Scores(end, end, dim**-0.5)
    random = torch.Generator(device).manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(heads, 284, dim, generator=random, device=device).to(dtype)
        for heads in (4, 2, 2, 4)
    )
    found = []
    for run_forward, run_backward in (
        (blockwise.forward, blockwise.backward),
        (forward, backward),
    ):
        out, lse = run_forward(q, k, v, blocks, rule)
        back = (grad_out.transpose(0, 1), q, k, v, out.to(dtype), lse)
        found.append([out, lse, *run_backward(*back, blocks, rule)])
    return [float((got - true).norm() / true.norm()) for true, got in zip(*found, strict=True)]
