"""Attention: transformers' attention interface, and plain scaled_dot_product_attention.

Shapes: T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

from prefix_rewrite.distributed.rank_attention import cp_tree_attention, plan_attention_share
from prefix_rewrite.mixers.base import (
    Call,
    RankForm,
    Reason,
    Signature,
    Target,
    asked_for,
    define_leaf,
    leaf_signature,
    unknown_reasons,
)
from prefix_rewrite.ops.tree_attention import plan_attention, tree_attention
from prefix_rewrite.passes.nodes import same_size, shape_of

ATTENTION_NAME = "prefix_rewrite"  # of our seam in transformers' attention interface

leaf_attention = define_leaf(
    "leaf_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, float dropout, "
    "int window, float softcap, bool causal, str unknown) -> Tensor",
    lambda q, k, v, *rest: v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]),
)


def attention_seam(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for a transformers attention function: q [B,H,T,D], k and v [B,K,T,D]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = leaf_attention(
        query,
        key,
        value,
        attention_mask,
        s_aux,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        float(dropout),
        0 if sliding_window is None else sliding_window,
        0.0 if softcap is None else softcap,
        bool(causal),
        asked_for(kwargs),
    )
    return out, None


def _inspect(call: Call, tokens: Any) -> list[Reason]:
    reasons: list[Reason] = []
    if call["mask"] is not None:
        reasons.append(
            ("attention is given a mask", "pass none: the forest says what each token sees")
        )
    if call["dropout"]:
        reasons.append(
            (f"attention dropout is {call['dropout']} in training", "set it to 0 or call eval()")
        )
    if call.get("window"):
        reasons.append(
            (f"attention has a sliding window of {call['window']}", "use full attention layers")
        )
    if call.get("softcap"):
        reasons.append(
            (f"attention scores are soft-capped at {call['softcap']}", "use a model without it")
        )
    if call.get("sinks") is not None:
        reasons.append(("attention has sinks", "use a model without them"))
    if not call["causal"]:
        reasons.append(
            ("attention is not causal", "pass is_causal=True or use a causal language model")
        )
    return reasons + unknown_reasons(call) + _inspect_shapes(call, tokens)


def _inspect_shapes(call: Call, tokens: Any) -> list[Reason]:
    q, k, v = (shape_of(call[name]) for name in "qkv")
    if len(q) != 4:
        return [
            (f"attention gets a query of {len(q)} dimensions", "pass [batch, heads, tokens, dim]")
        ]
    reasons: list[Reason] = []
    if not same_size(q[0], 1):
        reasons.append((f"attention runs on a batch of {q[0]}", "keep the batch dimension of 1"))
    for name, shape in zip("qkv", (q, k, v), strict=True):
        if not same_size(shape[2], tokens):
            reasons.append(
                (
                    f"attention's {name} has {shape[2]} positions where the model has {tokens} "
                    "tokens",
                    "only self-attention over the model's own tokens can follow a forest",
                )
            )
    if not same_size(q[1], k[1]) and call.get("enable_gqa") is False:
        reasons.append(("grouped-query attention without enable_gqa", "pass enable_gqa=True"))
    return reasons


def _emit(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    arguments = (call["q"], call["k"], call["v"], *plan, _scale(call))
    return _as_called(graph, node, graph.call_function(tree_attention, arguments))


def _emit_rank(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    arguments = (call["q"], call["k"], call["v"], _scale(call), *plan)
    return _as_called(graph, node, graph.call_function(cp_tree_attention, arguments))


def _scale(call: Call) -> Any:
    scale = call["scale"]
    return int(shape_of(call["q"])[-1]) ** -0.5 if scale is None else scale


def _as_called(graph: Graph, node: Node, out: Node) -> Node:
    """A leaf call returns [1,T,H,D], as tree attention does; SDPA returns [1,H,T,D]."""
    if node.target is leaf_attention:
        return out
    return graph.call_method("transpose", (out, 1, 2))


ATTENTION = Target(
    kind="attention",
    signatures={
        leaf_attention: leaf_signature(leaf_attention),
        F.scaled_dot_product_attention: Signature(
            names=("q", "k", "v", "mask", "dropout", "causal", "scale", "enable_gqa"),
            defaults={"dropout": 0.0, "causal": False, "enable_gqa": False},
            keywords={
                "query": "q",
                "key": "k",
                "value": "v",
                "attn_mask": "mask",
                "dropout_p": "dropout",
                "is_causal": "causal",
            },
        ),
    },
    planner=plan_attention,
    inspect=_inspect,
    emit=_emit,
    rank_form=RankForm(plan_attention_share, _emit_rank),
)
