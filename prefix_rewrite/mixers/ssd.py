"""Mamba-2 scan, as transformers' modeling files call it, and lightning attention.

Shapes: T tokens, H heads, P head dimension, G groups, N state size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from prefix_rewrite.distributed.rank_scans import cp_tree_ssd, plan_ssd_share
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
from prefix_rewrite.ops.tree_ssd import plan_ssd, tree_ssd
from prefix_rewrite.passes.nodes import same_size, shape_of


def _fake(x: Tensor, *rest: Any) -> Tensor:
    """The torch reference that the call stands for returns fp32 whatever it is given."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty(x.shape, dtype=dtype, device=x.device)


leaf_ssd = define_leaf(
    "leaf_ssd",
    "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "bool dt_softplus, float dt_min, float dt_max, str unknown) -> Tensor",
    _fake,
)


def _ssd_seam(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Tensor:
    low, high = dt_limit
    return leaf_ssd(
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, float(low), float(high), asked_for(kwargs)
    )


def _lightning_seam(
    module: nn.Module,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for MiniMax's lightning attention, whose loop over blocks has no function.

    Linear attention with one constant decay a head is the scan with time steps of 1: keys, queries
    and values are B, C and x.
    """
    parts: Any = module
    qkv = parts.act_fn(parts.qkv_proj(hidden_states))
    q, k, v = qkv.unflatten(-1, (parts.num_attention_heads, 3, -1)).unbind(-2)
    steps = torch.ones_like(v[..., 0])
    unknown = asked_for({"attention_mask": attention_mask, **kwargs})
    rate = parts.slope_rate.flatten()
    mixed = leaf_ssd(v, steps, -rate, k, q, None, None, None, False, 0.0, math.inf, unknown)
    mixed = parts.norm(mixed.to(v.dtype).flatten(-2))
    return parts.out_proj(torch.sigmoid(parts.output_gate(hidden_states)) * mixed), None


def no_fused_kernel(*args: Any, **kwargs: Any) -> None:
    """A fused call declines, so that the model takes its unfused path: conv and scan apart."""
    return None


def _inspect(call: Call, tokens: Any) -> list[Reason]:
    reasons = unknown_reasons(call)
    shape = shape_of(call["x"])
    if not (len(shape) == 4 and same_size(shape[0], 1) and same_size(shape[1], tokens)):
        reasons.append((f"Mamba-2 scan runs on {shape}", "pass [1, tokens, heads, dim]"))
    return reasons


def _emit(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    return graph.call_function(tree_ssd, (*_tensors(call), *plan, *_limits(call)))


def _emit_rank(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    return graph.call_function(cp_tree_ssd, (*_tensors(call), *_limits(call), *plan))


def _tensors(call: Call) -> tuple[Any, ...]:
    return tuple(call[name] for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"))


def _limits(call: Call) -> tuple[Any, ...]:
    return call["dt_softplus"], call["dt_min"], call["dt_max"]


SSD = Target(
    kind="ssd",
    signatures={leaf_ssd: leaf_signature(leaf_ssd)},
    planner=plan_ssd,
    inspect=_inspect,
    emit=_emit,
    seams={
        "mamba2_chunk_scan": _ssd_seam,
        "mamba2_split_conv1d_scan_combined": no_fused_kernel,
        "MiniMaxLightningAttention.forward": _lightning_seam,
    },
    rank_form=RankForm(plan_ssd_share, _emit_rank),
)
