"""The mixers' context-parallel forms: a collective, the plain tree op, a collective.

Each returns what its plain form would for this rank's rows. A planner turns a `Share` into the
fields of the plan that its form reads.

Shapes: T physical tokens, L rows of this rank, F rows fetched, N query heads, K key heads, D head
dim, C channels, W taps, H heads, P head width, G groups, S state width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prefix_rewrite.distributed.collectives import COUNTS, RECEIVE_COUNTS, SEND_COUNTS, SEND_ROWS
from prefix_rewrite.distributed.rank_plan import Bounds, RankPlan
from prefix_rewrite.distributed.share import Share, visible_from
from prefix_rewrite.ops.tree_attention import plan_attention, tree_attention
from prefix_rewrite.ops.tree_attention.plan import BLOCKS, FULL, SUBTREE_END, Block
from prefix_rewrite.ops.tree_conv import plan_rows, tree_conv
from prefix_rewrite.ops.tree_ssd import plan_ssd, tree_ssd
from prefix_rewrite.segments import IntArray

SharePlanner = Callable[[Share], Mapping[str, IntArray]]


def plan_collectives(share: Share) -> Mapping[str, IntArray]:
    """Plan what every rank sends and receives."""
    fields = {COUNTS: share.counts}
    for kind, fetch in (("ancestors", share.ancestors), ("near", share.near)):
        fields[SEND_ROWS[kind]] = fetch.send_rows
        fields[SEND_COUNTS[kind]] = fetch.send_counts
        fields[RECEIVE_COUNTS[kind]] = fetch.receive_counts
    return fields


def plan_attention_share(share: Share) -> Mapping[str, IntArray]:
    """Plan attention of this rank's queries against its own keys, then those fetched.

    Among a rank's own tokens it is tree attention on their induced forest. A fetched token is
    seen from one interval of them, so neighbours with the same interval make one full rectangle.
    """
    plan = plan_attention(share.forest)
    fetched = share.ancestors
    first, end = (x[fetched.tokens] for x in visible_from(share.segments, share.tokens))
    edges = np.diff(first, prepend=-1) | np.diff(end, prepend=-1)
    a = np.flatnonzero(edges)
    b = np.append(a[1:], len(first))[: len(a)]
    rows = zip(
        first[a].tolist(), end[a].tolist(), (a + share.num_rows).tolist(), b - a, strict=True
    )
    blocks = [Block(FULL, q0, q1, k0, k0 + int(n), num_squares=1) for q0, q1, k0, n in rows]
    blocks_B6 = np.asarray(blocks, dtype=np.int64).reshape(-1, len(Block._fields))
    return {
        BLOCKS: np.concatenate([plan[BLOCKS], blocks_B6]),
        SUBTREE_END: np.append(plan[SUBTREE_END], np.zeros(fetched.num_rows, dtype=np.int64)),
    }


def cp_tree_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *plan: Any) -> Tensor:
    """`tree_attention` of this rank's queries; k and v [1, K, L, D] are fetched as one."""
    rank_plan = RankPlan(*plan)
    dim = k.shape[3]
    own = torch.cat([k, v], 3)[0].transpose(0, 1)  # [L, K, D + V]
    fetched = rank_plan.fetch(own.flatten(1), "ancestors").unflatten(1, own.shape[1:])
    keys, values = torch.cat([own, fetched]).transpose(0, 1)[None].split([dim, v.shape[3]], 3)
    return tree_attention(q, keys, values, rank_plan.host_plan, rank_plan.device_plan, scale)


def plan_conv_share(share: Share) -> Mapping[str, IntArray]:
    """Plan a conv of this rank's rows, then those fetched; the latter's own results are unused."""
    num_rows = share.num_rows + share.near.num_rows
    row_of = np.full(share.segments.num_tokens + 1, -1)
    row_of[share.tokens] = np.arange(len(share.tokens))
    row_of[share.near.tokens] = share.num_rows + np.arange(len(share.near.tokens))
    parent = np.full(num_rows, -1)
    for tokens in (share.tokens, share.near.tokens):
        parent[row_of[tokens]] = row_of[share.segments.parent_token[tokens]]
    return plan_rows(parent)


def cp_tree_conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, *plan: Any) -> Tensor:
    """`tree_conv` of this rank's rows, x [1, C, L]; the few rows above them are fetched."""
    rank_plan = RankPlan(*plan)
    own = x[0].transpose(0, 1)
    rows = torch.cat([own, rank_plan.fetch(own, "near")]).transpose(0, 1)[None]
    plans = rank_plan.host_plan, rank_plan.device_plan
    return tree_conv(rows, weight, bias, *plans, silu)[:, :, : x.shape[2]]


def plan_ssd_share(share: Share) -> Mapping[str, IntArray]:
    """A rank scans the whole forest, for its heads."""
    return plan_ssd(share.segments)


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
    """`tree_ssd` of this rank's rows: all tokens for its heads, then back to its rows."""
    rank_plan = RankPlan(*plan)
    num_rows, num_heads = x.shape[1:3]
    heads = rank_plan.split(num_heads)
    first, end = rank_plan.own(heads)
    per_group = num_heads // B.shape[2]
    groups = [(a // per_group, -(-b // per_group) if b > a else a // per_group) for a, b in heads]
    parts: list[tuple[Tensor, Bounds]] = [(x[0], heads), (dt[0], heads)]
    parts += [(B[0], groups), (C[0], groups)]
    own_x, own_dt, own_B, own_C = (t[None] for t in rank_plan.to_heads(parts))
    own_D, own_bias = (None if t is None else t[first:end] for t in (D, dt_bias))
    if first == end:
        y = _no_heads(own_x, own_dt, own_B, own_C, A[first:end], own_D, own_bias)
    else:
        group_of = _even_groups(first, end, per_group)
        y = tree_ssd(
            own_x,
            own_dt,
            A[first:end],
            _pick_groups(own_B, group_of),
            _pick_groups(own_C, group_of),
            own_D,
            None,
            own_bias,
            rank_plan.host_plan,
            rank_plan.device_plan,
            dt_softplus,
            dt_min,
            dt_max,
        )
    y = rank_plan.to_tokens(y[0], heads, num_rows)[None]
    return y if z is None else y * F.silu(z.to(y.dtype))


def _even_groups(first: int, end: int, per_group: int) -> list[int]:
    """Return the group, counted from the first one's, of each equal piece of heads [first, end).

    A group that is cut by the bounds has fewer heads than others; pieces are the largest that
    divide all.
    """
    cuts = [first, *range((first // per_group + 1) * per_group, end, per_group), end]
    piece = gcd(*(b - a for a, b in zip(cuts[:-1], cuts[1:], strict=True)))
    return [head // per_group - first // per_group for head in range(first, end, piece)]


def _pick_groups(rows: Tensor, group_of: list[int]) -> Tensor:
    """[1, T, G, S] to the pieces' groups."""
    if group_of == list(range(rows.shape[2])):
        return rows
    return torch.stack([rows[:, :, group] for group in group_of], 2)


def _no_heads(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor | None, bias: Tensor | None
) -> Tensor:
    """An empty result [1, T, 0, P] that still depends on all inputs.

    The backward then meets the same collectives and parameters as on every other rank.
    """
    per_head = [t[:, None] if t.dim() == 1 else t for t in (A, D, bias) if t is not None]
    y = x + dt[..., None] + sum(per_head) + B[..., :1] + C[..., :1]
    return y.to(torch.promote_types(y.dtype, torch.float32))
