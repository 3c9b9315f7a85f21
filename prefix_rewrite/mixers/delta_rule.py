"""Gated delta rule and Kimi delta attention, as transformers' modeling files call them.

Shapes: T tokens, H value heads, K and V head widths.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from prefix_rewrite.distributed.rank_scans import (
    cp_tree_delta_rule,
    plan_channel_delta_rule_share,
    plan_delta_rule_share,
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
from prefix_rewrite.ops.tree_delta_rule import (
    plan_channel_delta_rule,
    plan_delta_rule,
    tree_delta_rule,
)
from prefix_rewrite.passes.nodes import same_size, shape_of

_SCHEMA = "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool normalise, str unknown)"


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(v.shape, dtype=q.dtype)


leaf_delta_rule = define_leaf("leaf_delta_rule", f"{_SCHEMA} -> Tensor", _fake)
leaf_channel_delta_rule = define_leaf("leaf_channel_delta_rule", f"{_SCHEMA} -> Tensor", _fake)


def _delta_rule_seam(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The decay's own shape says which of the two rules it is."""
    leaf = leaf_delta_rule if g.dim() == 3 else leaf_channel_delta_rule
    out = leaf(query, key, value, g, beta, use_qk_l2norm_in_kernel, asked_for(kwargs))
    return out, None


def _inspect(call: Call, tokens: Any) -> list[Reason]:
    reasons = unknown_reasons(call)
    shape = shape_of(call["v"])
    if not (len(shape) == 4 and same_size(shape[0], 1) and same_size(shape[1], tokens)):
        reasons.append((f"delta rule runs on {shape}", "pass [1, tokens, heads, dim]"))
    return reasons


def _emit(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    return graph.call_function(tree_delta_rule, (*_tensors(call), *plan, call["normalise"]))


def _emit_rank(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    return graph.call_function(cp_tree_delta_rule, (*_tensors(call), call["normalise"], *plan))


def _tensors(call: Call) -> tuple[Any, ...]:
    return tuple(call[name] for name in ("q", "k", "v", "g", "beta"))


DELTA_RULE = Target(
    kind="gated delta rule",
    signatures={leaf_delta_rule: leaf_signature(leaf_delta_rule)},
    planner=plan_delta_rule,
    inspect=_inspect,
    emit=_emit,
    seams={"torch_chunk_gated_delta_rule": _delta_rule_seam},
    rank_form=RankForm(plan_delta_rule_share, _emit_rank),
)

CHANNEL_DELTA_RULE = Target(
    kind="Kimi delta attention",
    signatures={leaf_channel_delta_rule: leaf_signature(leaf_channel_delta_rule)},
    planner=plan_channel_delta_rule,
    inspect=_inspect,
    emit=_emit,
    seams={"chunk_kimi_delta_attention": _delta_rule_seam},
    rank_form=RankForm(plan_channel_delta_rule_share, _emit_rank),
)
