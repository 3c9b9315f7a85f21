"""What a model does to its logits after the head: a program of pointwise steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ARITHMETIC = ("mul", "div", "add", "sub")
NAMES = (*ARITHMETIC, "tanh", "float")

Kept = list[Tensor | torch.dtype | None]


class Step(NamedTuple):
    """One step; `constant` is the right operand of an arithmetic step, else 0."""

    name: str
    constant: float


def parse_steps(steps: str, constants: list[float]) -> list[Step]:
    """Read a program such as 'div,tanh,mul' with its constants, e.g. [30.0, 30.0].

    Raises:
        ValueError: an unknown step, or not one constant for each arithmetic step.
    """
    names = steps.split(",") if steps else []
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"steps must be among {', '.join(NAMES)}, got {unknown}; drop them")
    num_constants = sum(name in ARITHMETIC for name in names)
    if num_constants != len(constants):
        raise ValueError(
            f"steps '{steps}' take {num_constants} constants, got {len(constants)}; "
            f"give one for each of {', '.join(ARITHMETIC)}"
        )
    values = iter(constants)
    return [Step(name, next(values) if name in ARITHMETIC else 0.0) for name in names]


def final_dtype(head_dtype: torch.dtype, steps: list[Step]) -> torch.dtype:
    """Return the dtype of the logits after the steps."""
    return torch.float32 if Step("float", 0.0) in steps else head_dtype


def run_steps(logits: Tensor, steps: list[Step], kept: Kept | None = None) -> Tensor:
    """Run the steps, in place where the dtype allows, each in the dtype that the model uses.

    Args:
        logits: any shape; overwritten.
        steps: the program.
        kept: filled, if given, with what `steps_backward` needs.
    """
    for name, constant in steps:
        value: Tensor | torch.dtype | None = None
        if name == "float":
            value, logits = logits.dtype, logits.float()
        elif name == "tanh":
            logits.tanh_()
            value = logits.clone() if kept is not None else None
        else:
            getattr(logits, f"{name}_")(constant)
        if kept is not None:
            kept.append(value)
    return logits


def steps_backward(grad: Tensor, steps: list[Step], kept: Kept) -> Tensor:
    """Return the gradient of the logits before the steps; `grad` is overwritten."""
    for (name, constant), value in zip(reversed(steps), reversed(kept), strict=True):
        if isinstance(value, torch.dtype):
            grad = grad.to(value)
        elif isinstance(value, Tensor):
            grad = torch.ops.aten.tanh_backward(grad, value)
        elif name in ("mul", "div"):
            getattr(grad, f"{name}_")(constant)
    return grad
