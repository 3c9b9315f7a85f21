"""Token-locality of DTensors: how tensor parallel spreads what each token has over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Shard

from prefix_rewrite.passes.locality_call import Call
from prefix_rewrite.passes.locality_layout import Refusal, State
from prefix_rewrite.passes.locality_rules import rule
from prefix_rewrite.passes.nodes import shape_of, value_of


@rule(
    "torch.distributed.tensor._api.from_local",
    args="input mesh placements run_check shape stride",
)
@rule("redistribute", args="input mesh placements async_op")
@rule("to_local", "full_tensor", args="input grad_placements")
def reshard(call: Call) -> State:
    """The same elements elsewhere, unless it is the tokens that are spread over ranks."""
    state = call.only("input")
    placements: Sequence[Any] = call.get("placements", ())
    given = getattr(value_of(call.get("input")), "placements", ())
    ndim = len(shape_of(call.get("input")))
    for placement in (*placements, *given):
        if isinstance(placement, Shard) and placement.dim % ndim == state.dim:
            raise Refusal(
                "shards the tokens over a mesh", "shard features; for tokens pass cp_mesh"
            )
    return state
