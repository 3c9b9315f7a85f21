"""Attention of one rank's queries: against its own keys, and those it fetches.

Shapes: L rows of this rank, F rows fetched, N query heads, K key heads, D head dim, V value dim,
B blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefix_rewrite.distributed.rank_plan import RankPlan
from prefix_rewrite.distributed.share import Share, visible_from
from prefix_rewrite.ops.tree_attention import plan_attention, tree_attention
from prefix_rewrite.ops.tree_attention.blocks import FULL, blocks_array
from prefix_rewrite.ops.tree_attention.plan import (
    BLOCKS,
    DEPTH,
    SUBTREE_END,
    blocks_field,
)
from prefix_rewrite.ops.tree_attention.window import best_span, cut_to_window
from prefix_rewrite.segments import IntArray


def plan_attention_share(share: Share, window: int = 0) -> Mapping[str, IntArray]:
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
    rectangles = blocks_array(FULL, first[a], end[a], a + share.num_rows, b + share.num_rows)
    blocks = np.concatenate([plan[BLOCKS], rectangles])
    depth = _depths(share)
    if window:
        blocks = cut_to_window(blocks, depth, window, best_span(window))
    return {
        blocks_field(window): blocks,
        SUBTREE_END: np.append(plan[SUBTREE_END], np.zeros(fetched.num_rows, dtype=np.int64)),
        DEPTH: depth,
    }


def _depths(share: Share) -> IntArray:
    """Return the depth in the whole forest of each row: own, filler, fetched, filler."""
    depths = np.zeros(share.num_rows + share.ancestors.num_rows, dtype=np.int64)
    for first, tokens in ((0, share.tokens), (share.num_rows, share.ancestors.tokens)):
        depths[first : first + len(tokens)] = share.segments.position_ids[tokens]
    return depths


def cp_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *plan: Any, **modifiers: Any
) -> Tensor:
    """`tree_attention` of this rank's queries; k and v [1, K, L, D] are fetched as one."""
    rank_plan = RankPlan(*plan)
    dim = k.shape[3]
    own = torch.cat([k, v], 3)[0].transpose(0, 1)  # [L, K, D + V]
    fetched = rank_plan.fetch(own.flatten(1), "ancestors").unflatten(1, own.shape[1:])
    keys, values = torch.cat([own, fetched]).transpose(0, 1)[None].split([dim, v.shape[3]], 3)
    plans = (rank_plan.host_plan, rank_plan.device_plan)
    return tree_attention(q, keys, values, *plans, scale, **modifiers)
