"""Attention: transformers' attention interface, and plain scaled_dot_product_attention.

Shapes: T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

from prefix_rewrite.distributed.rank_attention import (
    cp_tree_attention,
    plan_attention_share,
)
from prefix_rewrite.mixers.attention_masks import MASK_SEAMS, read_mask
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
SDPA_NAME = "prefix_rewrite_sdpa"  # of the one that stands for SDPA, which knows less

leaf_attention = define_leaf(
    "leaf_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, float dropout, "
    "int mask_window, int window, float softcap, bool causal, str unknown) -> Tensor",
    lambda q, k, v, *rest: v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]),
)


def attention_seam(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | str | None,
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
    mask, mask_window, pattern = read_mask(attention_mask)
    asked = asked_for(kwargs)
    out = leaf_attention(
        query,
        key,
        value,
        mask,
        s_aux,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        float(dropout),
        mask_window,
        0 if sliding_window is None else sliding_window,
        0.0 if softcap is None else softcap,
        bool(causal),
        ",".join(name for name in (asked, pattern) if name),
    )
    return out, None


def sdpa_seam(
    module: nn.Module,
    *arguments: Any,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attention_seam` for transformers' SDPA, which has neither soft caps nor sinks."""
    if softcap is not None:
        kwargs["a soft cap under SDPA (set_attn_implementation('eager') has it)"] = True
    if s_aux is not None:
        kwargs["sinks under SDPA (set_attn_implementation('eager') has them)"] = True
    return attention_seam(module, *arguments, **kwargs)


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
    if not call["causal"]:
        reasons.append(
            ("attention is not causal", "pass is_causal=True or use a causal language model")
        )
    return reasons + _inspect_window(call) + unknown_reasons(call) + _inspect_shapes(call, tokens)


def _inspect_window(call: Call) -> list[Reason]:
    by_mask, by_call = call.get("mask_window") or 0, _window(call)
    if isinstance(by_call, Node) or by_call < 0:
        return [(f"attention has a sliding window of {by_call}", "set a constant of 1 or more")]
    if by_mask != by_call:
        what = f"attention has a sliding window of {by_call or None} where its mask has one of "
        remedy = "attention functions differ in which they follow: set both alike"
        return [(f"{what}{by_mask or None}", remedy)]
    return []


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
    out = graph.call_function(tree_attention, arguments, _modifiers(call))
    return _as_called(graph, node, out)


def _emit_rank(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    arguments = (call["q"], call["k"], call["v"], _scale(call), *plan)
    out = graph.call_function(cp_tree_attention, arguments, _modifiers(call))
    return _as_called(graph, node, out)


def _modifiers(call: Call) -> dict[str, Any]:
    """What a call asks for beyond plain attention."""
    asked = {"window": _window(call), "softcap": call.get("softcap"), "sinks": call.get("sinks")}
    return {name: value for name, value in asked.items() if isinstance(value, Node) or value}


def _window(call: Call) -> Any:
    return call.get("window") or 0


def _scale(call: Call) -> Any:
    scale = call["scale"]
    return int(shape_of(call["q"])[-1]) ** -0.5 if scale is None else scale


def _as_called(graph: Graph, node: Node, out: Node) -> Node:
    """A leaf call returns [1,T,H,D], as tree attention does; SDPA returns [1,H,T,D]."""
    if node.target is leaf_attention:
        return out
    return graph.call_method("transpose", (out, 1, 2))


@functools.cache
def for_window(planner: Callable[..., Any], window: int) -> Callable[..., Any]:
    """Return a planner for a window: one object a window, so that layers share a plan."""
    return functools.partial(planner, window=window)


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
    seams=MASK_SEAMS,
    rank_form=RankForm(
        plan_attention_share,
        _emit_rank,
        planner_for=lambda call: for_window(plan_attention_share, _window(call)),
    ),
    planner_for=lambda call: for_window(plan_attention, _window(call)),
)
