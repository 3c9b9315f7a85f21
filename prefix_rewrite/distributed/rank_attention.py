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
from prefix_rewrite.ops.tree_attention.plan import BLOCKS, FULL, SUBTREE_END, Block
from prefix_rewrite.segments import IntArray


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
