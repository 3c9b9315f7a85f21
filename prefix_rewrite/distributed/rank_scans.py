"""Recurrent mixers by heads: each rank scans the whole forest for its share of the heads.

Tokens are exchanged for heads, the plain tree op runs, and heads are exchanged for tokens. That is
balanced whatever the partition, and moves each element once each way; states stay where they are.

Shapes: T physical tokens, L rows of this rank, H heads, G groups of them that share a tensor's
head, P head width, N state width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prefix_rewrite.distributed.rank_plan import Bounds, RankPlan
from prefix_rewrite.distributed.share import Share
from prefix_rewrite.ops.tree_delta_rule import (
    plan_channel_delta_rule,
    plan_delta_rule,
    tree_delta_rule,
)
from prefix_rewrite.ops.tree_rglru import plan_rglru, tree_rglru
from prefix_rewrite.ops.tree_selective_scan import plan_selective_scan, tree_selective_scan
from prefix_rewrite.ops.tree_ssd import plan_ssd, tree_ssd
from prefix_rewrite.segments import IntArray


def plan_ssd_share(share: Share) -> Mapping[str, IntArray]:
    return plan_ssd(share.segments)


def plan_selective_scan_share(share: Share) -> Mapping[str, IntArray]:
    return plan_selective_scan(share.segments)


def plan_delta_rule_share(share: Share) -> Mapping[str, IntArray]:
    return plan_delta_rule(share.segments)


def plan_channel_delta_rule_share(share: Share) -> Mapping[str, IntArray]:
    return plan_channel_delta_rule(share.segments)


def plan_rglru_share(share: Share) -> Mapping[str, IntArray]:
    return plan_rglru(share.segments)


def cp_tree_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    *plan: Any,
) -> Tensor:
    """`tree_ssd` of this rank's rows."""
    rank_plan = RankPlan(*plan)
    settings = (*rank_plan[:2], dt_softplus, dt_min, dt_max)

    def scan(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, *rest: Any) -> Tensor:
        D, dt_bias = rest
        return tree_ssd(x, dt, A, B, C, D, None, dt_bias, *settings)

    y = _by_heads(scan, rank_plan, x.shape[2], [x, dt], [B, C], [A, D, dt_bias])
    return y if z is None else y * F.silu(z.to(y.dtype))


def cp_tree_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalise: bool, *plan: Any
) -> Tensor:
    """`tree_delta_rule` of this rank's rows."""
    rank_plan = RankPlan(*plan)
    plans = rank_plan[:2]

    def scan(v: Tensor, g: Tensor, beta: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return tree_delta_rule(q, k, v, g, beta, *plans, normalise)

    return _by_heads(scan, rank_plan, v.shape[2], [v, g, beta], [q, k], []).to(q.dtype)


def cp_tree_rglru(x: Tensor, a: Tensor, *plan: Any) -> Tensor:
    """`tree_rglru` of this rank's rows: channels are its heads."""
    rank_plan = RankPlan(*plan)

    def scan(x: Tensor, a: Tensor) -> Tensor:
        return tree_rglru(x, a, *rank_plan[:2])

    return _by_heads(scan, rank_plan, x.shape[2], [x, a], [], []).to(x.dtype)


def cp_tree_selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    *plan: Any,
) -> Tensor:
    """`tree_selective_scan` of this rank's rows: channels are its heads, B and C one group."""
    rank_plan = RankPlan(*plan)
    plans = rank_plan[:2]
    by_channel = [t.transpose(1, 2) for t in (u, dt)]
    shared = [t.transpose(1, 2)[:, :, None] for t in (B, C)]  # [1, L, one group, N]

    def scan(u: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, *rest: Any) -> Tensor:
        D, dt_bias = rest
        u, dt, B, C = (t.transpose(1, 2) for t in (u, dt, B[:, :, 0], C[:, :, 0]))
        y = tree_selective_scan(u, dt, A, B, C, D, None, dt_bias, *plans, dt_softplus)
        return y.transpose(1, 2)

    y = _by_heads(scan, rank_plan, u.shape[1], by_channel, shared, [A, D, dt_bias])
    y = y.transpose(1, 2)
    return y if z is None else y * F.silu(z.to(y.dtype))


def _by_heads(
    scan: Callable[..., Tensor],
    rank_plan: RankPlan,
    num_heads: int,
    by_head: Sequence[Tensor],
    by_group: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
) -> Tensor:
    """Run a scan on all tokens for this rank's heads, and return this rank's rows for all heads.

    Args:
        scan: takes the other arguments' parts, in their order, batch of 1 first.
        num_heads: H, divided among the ranks.
        by_head: [1, L, H, ...]; the result has the shape of the first.
        by_group: [1, L, G, ...], G a divisor of H.
        parameters: [H, ...] or None.
    """
    heads = rank_plan.split(num_heads)
    first, end = rank_plan.own(heads)
    parts = [(tensor[0], heads) for tensor in by_head]
    for tensor in by_group:
        parts.append((tensor[0], _group_bounds(heads, num_heads // tensor.shape[2])))
    own = [tensor[None] for tensor in rank_plan.to_heads(parts)]
    sliced = [None if t is None else t[first:end] for t in parameters]
    if first == end:
        y = _tie(own[0].to(torch.promote_types(own[0].dtype, torch.float32)), [*own, *sliced])
    else:
        count = len(by_head)
        picked = [
            _pick_groups(mine, first, end, num_heads // tensor.shape[2])
            for mine, tensor in zip(own[count:], by_group, strict=True)
        ]
        y = scan(*own[:count], *picked, *sliced)
    return rank_plan.to_tokens(y[0], heads, by_head[0].shape[1])[None]


def _group_bounds(heads: Bounds, per_group: int) -> Bounds:
    return [(a // per_group, -(-b // per_group) if b > a else a // per_group) for a, b in heads]


def _pick_groups(rows: Tensor, first: int, end: int, per_group: int) -> Tensor:
    """Make groups of equal numbers of heads out of those [1, T, G, ...] of heads [first, end).

    A group that the bounds cut has fewer heads than others; it and they are repeated for pieces
    of the largest size that divides all.
    """
    cuts = [first, *range((first // per_group + 1) * per_group, end, per_group), end]
    piece = gcd(*(b - a for a, b in zip(cuts[:-1], cuts[1:], strict=True)))
    groups = [head // per_group - first // per_group for head in range(first, end, piece)]
    if groups == list(range(rows.shape[2])):
        return rows
    return torch.stack([rows[:, :, group] for group in groups], 2)


def _tie(y: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
    """Make y depend on tensors that add nothing to it.

    A rank without heads then meets the same collectives and parameters in its backward as others.
    """
    empty = [tensor.flatten()[:0].to(y.dtype) for tensor in tensors if tensor is not None]
    return y + torch.cat(empty).sum()
