"""RG-LRU's recurrence, as RecurrentGemma's recurrent block runs it: x and a [1, T, D].

The block calls its convolution as a module and its recurrence as a method; a convolution padded on
both sides and cut to the tokens is a causal one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from prefix_rewrite.distributed.rank_scans import cp_tree_rglru, plan_rglru_share
from prefix_rewrite.mixers.base import (
    Call,
    RankForm,
    Reason,
    Target,
    asked_for,
    define_leaf,
    leaf_signature,
    unknown_reasons,
)
from prefix_rewrite.mixers.conv import leaf_conv
from prefix_rewrite.ops.tree_rglru import plan_rglru, tree_rglru
from prefix_rewrite.passes.nodes import same_size, shape_of

leaf_rglru = define_leaf(
    "leaf_rglru",
    "(Tensor x, Tensor a, str unknown) -> Tensor",
    lambda x, *rest: torch.empty_like(x),
)


def _scan_seam(
    module: nn.Module,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, None]:
    """A first token, at position 0, starts from nothing; no state is kept for a next call."""
    asked = {"recurrent_states": recurrent_states, "acc_dtype": acc_dtype != torch.float32}
    gate = recurrent_gate * ~reset
    return leaf_rglru(hidden_states, gate.to(hidden_states.dtype), asked_for(asked)), None


def _conv_seam(module: nn.Conv1d, x: Tensor) -> Tensor:
    """The causal convolution [1, C, T] that the block cuts out of a padded one."""
    taps = module.kernel_size[0]
    plain = (
        (module.groups, module.padding, module.stride, module.dilation)
        == (module.in_channels, (taps - 1,), (1,), (1,))
        and module.padding_mode == "zeros"
    )  # fmt: skip
    unknown = asked_for({"another convolution than a causal depthwise one": not plain})
    return leaf_conv(x, module.weight.squeeze(1), module.bias, "", unknown)


def _inspect(call: Call, tokens: Any) -> list[Reason]:
    reasons = unknown_reasons(call)
    shape = shape_of(call["x"])
    if not (len(shape) == 3 and same_size(shape[0], 1) and same_size(shape[1], tokens)):
        reasons.append((f"gated recurrence runs on {shape}", "pass [1, tokens, channels]"))
    return reasons


def _emit(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    return graph.call_function(tree_rglru, (call["x"], call["a"], *plan))


def _emit_rank(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    return graph.call_function(cp_tree_rglru, (call["x"], call["a"], *plan))


RGLRU = Target(
    kind="gated recurrence",
    signatures={leaf_rglru: leaf_signature(leaf_rglru)},
    planner=plan_rglru,
    inspect=_inspect,
    emit=_emit,
    method_seams={
        "RecurrentGemmaRglru._rnn_scan": _scan_seam,
        "RecurrentGemmaRecurrentBlock.conv_1d.forward": _conv_seam,
    },
    rank_form=RankForm(plan_rglru_share, _emit_rank),
)
