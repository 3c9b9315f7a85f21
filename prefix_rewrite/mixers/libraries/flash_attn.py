"""The flash_attn package, version 2: q [1, T, H, D], k and v [1, T, K, D]; packed, without the 1.

A window (left, right) lets a token see `left` tokens before itself, so it is a window of left + 1
in our count; -1 is no window. A causal call looks at no token to the right, whatever it gives.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prefix_rewrite.mixers.attention import leaf_attention
from prefix_rewrite.mixers.base import Seams, asked_for
from prefix_rewrite.mixers.libraries.results import with_extras


def flash_attn_func_seam(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **asked: Any,
) -> Any:
    """`deterministic` is about the order of a backward's sums: it asks nothing here."""
    left, right = window_size
    window = left + 1 if left >= 0 else 0
    asked["alibi_slopes"] = alibi_slopes
    asked["return_attn_probs"] = return_attn_probs
    asked[f"a window of {right} tokens to the right"] = right > 0
    out = leaf_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        None,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        float(dropout_p),
        window,
        window,
        max(float(softcap or 0.0), 0.0),
        bool(causal) or right == 0,
        asked_for(asked),
    )
    return with_extras(out, return_attn_probs, return_attn_probs)


def flash_attn_varlen_func_seam(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """A call on one sequence is attention over all its tokens; several can't be told apart."""
    one = cu_seqlens_q.shape[0] == 2 and cu_seqlens_k.shape[0] == 2
    result = flash_attn_func_seam(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        block_table=block_table,
        **{"cu_seqlens of several sequences": not one},
    )
    if return_attn_probs:
        return result[0].squeeze(0), *result[1:]
    return result.squeeze(0)


FLASH_ATTN_SEAMS: Seams = {
    "flash_attn.flash_attn_interface:flash_attn_func": flash_attn_func_seam,
    "flash_attn.flash_attn_interface:flash_attn_varlen_func": flash_attn_varlen_func_seam,
}
