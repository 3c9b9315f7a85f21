"""Whether a sharded parameter has changed since it was saved.

Tensors count their changes in place, and autograd compares the counts. But foreach and fused
optimisers change a DTensor's local part and count nothing, so optimisers' steps are counted too.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

_steps: Any = WeakTensorKeyDictionary()


@functools.cache
def watch_optimisers() -> None:
    """Count every optimiser's steps from now on."""
    register_optimizer_step_post_hook(_count_step)


def changes_of(shard: DTensor) -> tuple[int, ...]:
    """Return counts that differ once the parameter has changed."""
    return shard._version, shard.to_local()._version, _steps.get(shard, 0)


def _count_step(optimiser: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor):
                _steps[parameter] = _steps.get(parameter, 0) + 1
