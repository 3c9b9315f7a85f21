"""Plain causal convolution down the paths of a forest, token by token: the oracle of the fast op.

Shapes: T tokens, C channels, W taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from prefix_rewrite.segments import SegmentTable


def tree_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: SegmentTable,
    silu: bool,
) -> torch.Tensor:
    """Convolve each token with its predecessors; arguments and result as `tree_conv`."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    taps = weight.to(dtype).flip(1).unbind(1)  # tap j belongs to the j-th predecessor
    parents = segments.parent_token.tolist()
    out = []
    for t in range(x.shape[2]):
        y = torch.zeros_like(taps[0]) if bias is None else bias.to(dtype)
        token = t
        for tap in taps:
            if token < 0:
                break
            y = y + x[0, :, token].to(dtype) * tap
            token = parents[token]
        out.append(y)
    y = torch.stack(out, 1)[None] if out else x.to(dtype)
    return (F.silu(y) if silu else y).to(x.dtype)
