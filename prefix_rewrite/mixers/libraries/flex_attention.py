"""torch.nn.attention.flex_attention: q [1, H, T, D], k and v [1, K, T, D].

What a block mask lets through is known from the code of the function that it is made of. The mask
itself is never made: traced for us, `create_block_mask` returns a word, as the functions do that
make transformers' masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prefix_rewrite.mixers.attention import leaf_attention
from prefix_rewrite.mixers.base import Seams, asked_for
from prefix_rewrite.mixers.libraries.results import with_extras

_CAUSAL = "a causal block mask"
_OTHER = "a block mask whose function is not q_idx >= kv_idx alone"
_MADE_ELSEWHERE = "a block mask that the model did not make itself, by create_block_mask"


def flex_attention_seam(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """`kernel_options` say how to compute, not what."""
    grouped = query.shape[1] != key.shape[1]
    unknown = asked_for(
        {
            "score_mod": score_mod is not None,
            "return_lse": return_lse,
            "return_aux": return_aux is not None,
            "grouped queries without enable_gqa": grouped and not enable_gqa,
            _word_of(block_mask): block_mask is not None and _word_of(block_mask) != _CAUSAL,
        }
    )
    out = leaf_attention(
        query,
        key,
        value,
        None,
        None,
        query.shape[-1] ** -0.5 if scale is None else scale,
        0.0,
        0,
        0,
        0.0,
        block_mask is not None,
        unknown,
    )
    return with_extras(out.transpose(1, 2), return_lse or return_aux is not None)


def create_block_mask_seam(mask_mod: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Stand in for `create_block_mask`: whatever its sizes, the function says what is seen."""
    return _CAUSAL if _is_causal(mask_mod) else _OTHER


def _word_of(block_mask: Any) -> str:
    return block_mask if isinstance(block_mask, str) else _MADE_ELSEWHERE


_CAUSAL_CODES = tuple(
    function.__code__.co_code
    for function in (lambda b, h, q, k: q >= k, lambda b, h, q, k: k <= q)
)


@torch.compiler.assume_constant_result
def _is_causal(mask_mod: Callable[..., Any]) -> bool:
    """Compare instructions: these name neither constants nor anything outside the arguments."""
    code = getattr(mask_mod, "__code__", None)
    return code is not None and code.co_argcount == 4 and code.co_code in _CAUSAL_CODES


FLEX_ATTENTION_SEAMS: Seams = {
    "torch.nn.attention.flex_attention:flex_attention": flex_attention_seam,
    "torch.nn.attention.flex_attention:create_block_mask": create_block_mask_seam,
}
