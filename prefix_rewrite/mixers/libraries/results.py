"""What the seams of several libraries return beside the mixer's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_extras(out: Tensor, *asked: Any) -> Any:
    """Return the output alone, or with a placeholder for each further result asked for.

    Such a call is refused, but the model must be traced to its end to say so.
    """
    extras = tuple(out.new_zeros(()) for wanted in asked if wanted)
    return (out, *extras) if extras else out


def wide(x: Tensor) -> Tensor:
    """As kernels load their inputs: in fp32, and fp64 as it is."""
    return x if x.dtype == torch.float64 else x.float()
