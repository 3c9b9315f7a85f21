"""What a forest and a model ask of attention's scores.

Shapes: S tokens (keys; the first of them are the queries too).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return what scores of such inputs are computed in: fp64 if any input is, else fp32."""
    is_wide = any(x.dtype == torch.float64 for x in tensors)
    return torch.float64 if is_wide else torch.float32


class Scores(NamedTuple):
    """How scores are made of dot products, and which of them a query sees.

    Attributes:
        end_S: one past the last token that sees each token.
        depth_S: depth of each token.
        scale: factor of the dot products.
        window: tokens that a token sees, itself included; 0 for all its ancestors.
        softcap: x becomes softcap * tanh(x / softcap) (Gemma 2, 2024, section 2); 0 for none.
    """

    end_S: Tensor
    depth_S: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0

    def cap_(self, scores: Tensor) -> Tensor:
        """Cap scaled scores, in place."""
        if not self.softcap:
            return scores
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def slope(self, capped: Tensor) -> Tensor | float:
        """Return the derivative of capped scores by their dot products."""
        if not self.softcap:
            return self.scale
        return (capped / self.softcap).square_().neg_().add_(1).mul_(self.scale)

    def ended(self, query: Tensor, key: Tensor) -> Tensor:
        """Say which keys' subtrees have ended before which queries; indices that broadcast."""
        return query >= self.end_S[key]

    def too_far(self, query: Tensor, key: Tensor) -> Tensor:
        """Say which keys are a window or more above which queries; indices that broadcast."""
        return self.depth_S[query] - self.depth_S[key] >= self.window
