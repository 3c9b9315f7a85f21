"""Plans: what an op must know of a forest, packed in two flat tensors.

Every tree op takes the same two tensors, `host_plan` (CPU) and `device_plan` (the model's device),
and reads its own named fields out of them. A plan is data, so one rewritten graph serves every
forest; two flat tensors, so no length of 0 or 1 ever shows as a shape that the compiler would
specialise on; and a new op adds fields without touching the graph or the other ops.

Layout of `host_plan`: the number of fields, then one header row a field
`(field index, on device, offset, ndim, dim 0, dim 1, dim 2)`, then the host fields' values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.segments import IntArray, SegmentTable

Place = Literal["host", "device"]
Planner = Callable[[SegmentTable], Mapping[str, IntArray]]

MAX_DIMS = 3
HEADER = 4 + MAX_DIMS
PAD = 16  # keeps both tensors longer than any size that a compiler specialises on

_FIELDS: list[tuple[str, Place]] = []
_INDEX: dict[str, int] = {}


def register_field(name: str, place: Place) -> str:
    """Declare a plan field, once per process, and return its name.

    Args:
        name: unique name, prefixed by the op's (`attention_blocks`).
        place: 'host' for what Python loops read, 'device' for what tensor ops index with.
    """
    if name in _INDEX:
        assert _FIELDS[_INDEX[name]][1] == place, f"plan field {name} registered twice"
        return name
    _INDEX[name] = len(_FIELDS)
    _FIELDS.append((name, place))
    return name


def pack_plan(
    fields: Mapping[str, IntArray], device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack named int64 arrays of at most 3 dimensions into `(host_plan, device_plan)`."""
    offset: dict[Place, int] = {"host": 1 + HEADER * len(fields), "device": 0}
    parts: dict[Place, list[np.ndarray]] = {"host": [], "device": []}
    header: list[int] = [len(fields)]
    for name, values in fields.items():
        index = _INDEX[name]
        place = _FIELDS[index][1]
        array = np.ascontiguousarray(values, dtype=np.int64)
        assert array.ndim <= MAX_DIMS, f"plan field {name} has {array.ndim} dimensions"
        dims = [*array.shape, *([0] * (MAX_DIMS - array.ndim))]
        header += [index, int(place == "device"), offset[place], array.ndim, *dims]
        parts[place].append(array.reshape(-1))
        offset[place] += array.size
    padding = np.zeros(PAD, dtype=np.int64)
    host = np.concatenate([np.asarray(header, dtype=np.int64), *parts["host"], padding])
    device_values = np.concatenate([*parts["device"], padding])
    return torch.from_numpy(host), torch.from_numpy(device_values).to(device)


class PlanView:
    """Read named fields back out of a packed plan; fields are views, never copies."""

    def __init__(self, host_plan: torch.Tensor, device_plan: torch.Tensor):
        self._plans = (host_plan, device_plan)
        count = int(host_plan[0])
        header = host_plan[1 : 1 + HEADER * count].view(count, HEADER).tolist()
        self._rows = {row[0]: row for row in header}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the field.

        Raises:
            LayoutError: the plan was packed without it.
        """
        row = self._rows.get(_INDEX[name])
        if row is None:
            raise LayoutError(f"the plan must hold '{name}'; plan the forest for this model's ops")
        _, on_device, offset, ndim, *dims = row
        shape = dims[:ndim]
        return self._plans[on_device][offset : offset + math.prod(shape)].view(shape)
