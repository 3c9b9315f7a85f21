"""Views of tokens as the batch rows that flash kernels take, and back.

Shapes: T tokens, N heads, D head dim, P the dim that all are padded to, C rows of L tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def padded(*tensors: Tensor, multiple: int = 1) -> list[Tensor]:
    """Give all tensors the last dim of the widest, by zeros, and unit stride in it.

    Zeros add nothing to a score, and make columns of the output that are zero. With `multiple`,
    that dim, the other strides and the offset are multiples of it: what wide loads need.
    """
    widest = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    pads = [widest - x.shape[-1] for x in tensors]
    wide = [F.pad(x, (0, n)) if n else x for x, n in zip(tensors, pads, strict=True)]
    return [x if _is_aligned(x, multiple) else x.contiguous() for x in wide]


def _is_aligned(x: Tensor, multiple: int) -> bool:
    steps = (*x.stride()[:-1], x.storage_offset())
    return x.stride(-1) == 1 and not any(step % multiple for step in steps)


def rows(x_NTD: Tensor, first: int, end: int, count: int) -> Tensor:
    """View tokens [first, end) as `count` batch rows: [count, N, (end - first) / count, D]."""
    part = x_NTD[:, first:end]
    return part.unsqueeze(0) if count == 1 else part.unflatten(1, (count, -1)).transpose(0, 1)


def tokens(x: Tensor) -> Tensor:
    """Undo `rows` and put the tokens first: [C, N, L, ...] to [C * L, N, ...]."""
    return x.transpose(1, 2).flatten(0, 1)
