"""Causal conv of one rank's rows: the few rows above its own are fetched.

Shapes: L rows of this rank, F rows fetched, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefix_rewrite.distributed.rank_plan import RankPlan
from prefix_rewrite.distributed.share import Share
from prefix_rewrite.ops.tree_conv import plan_rows, tree_conv
from prefix_rewrite.segments import IntArray


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
