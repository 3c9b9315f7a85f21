"""The causal_conv1d package: x [1, C, T], weight [C, W]."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prefix_rewrite.mixers.base import Seams, asked_for
from prefix_rewrite.mixers.conv import leaf_conv
from prefix_rewrite.mixers.libraries.results import with_extras


def causal_conv1d_fn_seam(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    unknown = asked_for(
        {
            "seq_idx": seq_idx,
            "initial_states": initial_states,
            "return_final_states": return_final_states,
            "final_states_out": final_states_out,
        }
    )
    out = leaf_conv(x, weight, bias, activation or "", unknown)
    return with_extras(out, return_final_states)


CAUSAL_CONV1D_SEAMS: Seams = {
    "causal_conv1d.causal_conv1d_interface:causal_conv1d_fn": causal_conv1d_fn_seam,
}
