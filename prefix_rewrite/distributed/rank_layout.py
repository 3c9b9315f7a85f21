"""The layout of one rank's share of a forest."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from prefix_rewrite.distributed.partition import partition_tokens
from prefix_rewrite.distributed.rank_plan import plan_collectives
from prefix_rewrite.distributed.share import Share, SharePlanner
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.layout import EdgeOrder, Layout, check_ids, lay_out, to_device
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import with_filler


def take_share(forest: PrefixForest, rank: int, num_ranks: int) -> Share:
    """Partition a forest, filler included, and return a rank's share; the same on every rank."""
    segments = with_filler(forest.segments)
    sources = np.unique(forest.edges.source)
    return Share(segments, partition_tokens(segments, num_ranks, sources), rank)


def build_rank_layout(
    forest: PrefixForest,
    planners: Iterable[SharePlanner],
    device: torch.device | str,
    *,
    rank: int,
    num_ranks: int,
    num_embeddings: int,
    vocab_size: int,
) -> Layout:
    """Lay out a rank's share for the ops whose planners are given.

    A rank projects the edges that start at its own tokens.

    Raises:
        LayoutError: a token id does not exist in the model's vocabulary.
    """
    check_ids(forest, num_embeddings, vocab_size)
    share = take_share(forest, rank, num_ranks)
    fields = dict(plan_collectives(share))
    for planner in planners:
        fields.update(planner(share))
    shapes = (share.order, share.ancestors.place, share.near.place)
    edges, tokens = forest.edges, share.tokens[share.tokens < forest.num_tokens]
    edge_owner = share.partition.owner[edges.source]
    mine = np.flatnonzero(edge_owner == rank)
    place = np.argsort(np.argsort(edge_owner, kind="stable"))
    counts = np.bincount(edge_owner, minlength=num_ranks).tolist()
    return lay_out(
        token_ids=np.append(forest.token_ids[tokens], [0] * (len(share.tokens) - len(tokens))),
        position_ids=share.segments.position_ids[share.tokens],
        plan=(*pack_plan(fields, device), *(to_device(shape, device) for shape in shapes)),
        source=np.searchsorted(share.tokens, edges.source[mine]),
        target=edges.target[mine],
        device=device,
        edge_order=EdgeOrder(counts, to_device(place, device)),
    )
