"""What a model asks of its attention by a mask, in words instead of a tensor.

Under transformers' own attention functions a sliding window lives in the mask; under flash
attention in an argument of the call. Traced for us, the functions that make masks return None for
plain causal attention, as they do for SDPA, and else one of the words below, which the attention
seam reads. A model that does anything else with the word than hand it to its attention can't be
captured: it is no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_WINDOW = "window "
# Of a mask function's arguments: nothing that asks for another pattern.
_PLAIN = frozenset({"cache", "past_key_values", "cache_position", "position_ids", "layer_idx"})


def causal_mask_seam(
    config: Any,
    inputs_embeds: Any = None,
    attention_mask: Any = None,
    *rest: Any,
    allow_is_causal_skip: bool = True,
    **asked: Any,
) -> str | None:
    """Stand in for `create_causal_mask`."""
    if not allow_is_causal_skip:
        return "a mask given as a tensor"
    if not getattr(config, "is_causal", True):
        return "attention that is not causal"
    if attention_mask is not None:
        return "a mask of its own"
    # By position come caches and positions, three at most; then other patterns.
    others = [x for i, x in enumerate(rest) if x is not None and (i > 2 or i == 2 and callable(x))]
    asked["arguments by position"] = others or None
    names = [name for name, value in asked.items() if name not in _PLAIN and value is not None]
    return f"a mask with {', '.join(sorted(names))}" if names else None


def window_mask_seam(config: Any, *arguments: Any, **asked: Any) -> str:
    """Stand in for `create_sliding_window_causal_mask`."""
    return causal_mask_seam(config, *arguments, **asked) or f"{_WINDOW}{config.sliding_window}"


def chunk_mask_seam(*arguments: Any, **asked: Any) -> str:
    """Stand in for `create_chunked_causal_mask`."""
    return "attention in chunks of the sequence"


def bidirectional_mask_seam(*arguments: Any, **asked: Any) -> str:
    """Stand in for the functions that make masks which are not causal."""
    return "attention that is not causal"


MASK_SEAMS: dict[str, Callable[..., str | None]] = {
    "create_causal_mask": causal_mask_seam,
    "create_sliding_window_causal_mask": window_mask_seam,
    "create_chunked_causal_mask": chunk_mask_seam,
    "create_bidirectional_mask": bidirectional_mask_seam,
    "create_bidirectional_sliding_window_mask": bidirectional_mask_seam,
}


def read_mask(mask: Any) -> tuple[Any, int, str]:
    """Return the mask where it is a tensor, the window that it asks for, and what else it does."""
    if not isinstance(mask, str):
        return mask, 0, ""
    if mask.startswith(_WINDOW):
        return None, int(mask.removeprefix(_WINDOW)), ""
    return None, 0, mask
