"""Causal depthwise convolution, as transformers' modeling files call it: x [1, C, T]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from prefix_rewrite.distributed.rank_conv import cp_tree_conv, plan_conv_share
from prefix_rewrite.distributed.share import REACH
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
from prefix_rewrite.ops.tree_conv import plan_conv, tree_conv
from prefix_rewrite.passes.nodes import same_size, shape_of

leaf_conv = define_leaf(
    "leaf_conv",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, str unknown) -> Tensor",
    lambda x, *rest: torch.empty_like(x),
)


def _conv_seam(
    x: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    hidden_states: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    x = hidden_states if x is None else x
    return leaf_conv(x, weight, bias, activation or "", asked_for(kwargs))


def _inspect(call: Call, tokens: Any) -> list[Reason]:
    reasons = unknown_reasons(call)
    if call["activation"] not in ("", "silu", "swish"):
        reasons.append((f"causal conv activation is {call['activation']!r}", "use 'silu' or none"))
    shape = shape_of(call["x"])
    if not (len(shape) == 3 and same_size(shape[0], 1) and same_size(shape[2], tokens)):
        reasons.append((f"causal conv runs on {shape}", "pass [1, channels, tokens]"))
    return reasons


def _emit(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    silu = call["activation"] != ""
    return graph.call_function(tree_conv, (call["x"], call["weight"], call["bias"], *plan, silu))


def _emit_rank(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    silu = call["activation"] != ""
    inputs = (call["x"], call["weight"], call["bias"])
    return graph.call_function(cp_tree_conv, (*inputs, silu, *plan))


def _inspect_rank(call: Call) -> list[Reason]:
    taps = int(shape_of(call["weight"])[-1])
    if taps <= REACH + 1:
        return []
    what = f"causal conv has {taps} taps, context parallel fetches rows for {REACH + 1}"
    return [(what, "pass cp_mesh=None")]


CONV = Target(
    kind="conv",
    signatures={leaf_conv: leaf_signature(leaf_conv)},
    planner=plan_conv,
    inspect=_inspect,
    emit=_emit,
    seams={"causal_conv1d_fn": _conv_seam},
    rank_form=RankForm(plan_conv_share, _emit_rank, _inspect_rank),
)
