"""The load-balancing loss of experts, as transformers' modeling files call it.

It mixes tokens, but into a loss of the whole batch: no token's logits may depend on it.

Shapes: R routed layers, T tokens, X experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from prefix_rewrite.distributed.rank_load_balancing import (
    cp_load_balancing_loss,
    plan_load_balancing_share,
)
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
from prefix_rewrite.ops.load_balancing import load_balancing_loss, plan_load_balancing
from prefix_rewrite.passes.nodes import same_size, shape_of

leaf_load_balancing = define_leaf(
    "leaf_load_balancing",
    "(Tensor gate_logits, int num_experts, int top_k, str unknown) -> Tensor",
    lambda gate_logits, *rest: gate_logits.new_empty((), dtype=torch.float32),
)


def _load_balancing_seam(
    gate_logits: Any,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | int:
    """Gate logits are a tuple of R tensors [T, X]; without one there is no loss."""
    if not isinstance(gate_logits, tuple):
        return 0
    unknown = asked_for({"attention_mask": attention_mask, **kwargs})
    return leaf_load_balancing(torch.stack(gate_logits), num_experts, top_k, unknown)


def _inspect(call: Call, tokens: Any) -> list[Reason]:
    shape = shape_of(call["gate_logits"])
    reasons = unknown_reasons(call)
    if not (same_size(shape[1], tokens) and same_size(shape[2], call["num_experts"])):
        what = f"load-balancing loss of {call['num_experts']} experts runs on {shape}"
        reasons.append((what, "pass a tuple of [tokens, experts]"))
    return reasons


def _emit(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    arguments = (call["gate_logits"], *plan, call["top_k"])
    return graph.call_function(load_balancing_loss, arguments)


def _emit_rank(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    arguments = (call["gate_logits"], call["top_k"], *plan)
    return graph.call_function(cp_load_balancing_loss, arguments)


LOAD_BALANCING = Target(
    kind="load-balancing loss",
    signatures={leaf_load_balancing: leaf_signature(leaf_load_balancing)},
    planner=plan_load_balancing,
    inspect=_inspect,
    emit=_emit,
    seams={"load_balancing_loss_func": _load_balancing_seam},
    rank_form=RankForm(plan_load_balancing_share, _emit_rank),
    is_total=True,
)
