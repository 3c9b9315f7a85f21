"""The load-balancing loss by ranks: each adds up its own tokens, and all add up the sums.

Shapes: R routed layers, L rows of this rank, X experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from prefix_rewrite.distributed.collectives import sum_over_ranks
from prefix_rewrite.distributed.rank_plan import RankPlan
from prefix_rewrite.distributed.share import Share
from prefix_rewrite.ops.load_balancing import TOKEN_CALLS, load_balancing_loss
from prefix_rewrite.segments import IntArray


def plan_load_balancing_share(share: Share) -> Mapping[str, IntArray]:
    """Plan how many of all calls contain each token of this rank; filler is in none."""
    own = share.segments.token_calls[share.tokens]
    return {TOKEN_CALLS: np.pad(own, (0, share.num_rows - len(own)))}


def cp_load_balancing_loss(gate_logits: Tensor, top_k: int, *plan: Any) -> Tensor:
    """`load_balancing_loss` of the whole forest, on every rank, from this rank's [R, L, X]."""
    rank_plan = RankPlan(*plan)
    return load_balancing_loss(
        gate_logits, *rank_plan[:2], top_k, lambda part: sum_over_ranks(part, rank_plan.group)
    )
