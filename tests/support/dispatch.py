"""Watch every op that really runs, below autograd and below the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Calls `seen(function, arguments, result)` for each op, in forward and backward."""

    def __init__(self, seen: Callable[[Any, tuple[Any, ...], Any], None]):
        super().__init__()
        self.seen = seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else Dynamo would not capture while the mode is on

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen(func, args, out)
        return out
