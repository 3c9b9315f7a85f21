"""Plain gated linear recurrence down the paths of a forest, token by token: the fast op's oracle.

Shapes: T tokens, D channels. The recurrence inside RG-LRU (De et al. 2024, Griffin, equation 4),
whose gates are per token:
    h_t = a_t h_{t-1} + x_t,
where t-1 is the token before t on its own path.
"""

from __future__ import annotations

import torch

from prefix_rewrite.segments import SegmentTable


def tree_rglru_reference(x: torch.Tensor, a: torch.Tensor, segments: SegmentTable) -> torch.Tensor:
    """Update each token's state from its parent's; arguments and result as `tree_rglru`."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, a.dtype), torch.float32)
    states: list[torch.Tensor] = []
    for t, parent in enumerate(segments.parent_token.tolist()):
        before = states[parent] if parent >= 0 else torch.zeros_like(x[0, t], dtype=dtype)
        states.append(a[0, t].to(dtype) * before + x[0, t].to(dtype))
    return (torch.stack(states)[None] if states else torch.zeros_like(x)).to(x.dtype)
