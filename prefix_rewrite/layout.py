"""The layout: the tensors by which a rewritten graph knows its forest.

Shapes: T physical tokens, E sampled edges, R distinct edge sources; with context parallel, those
of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.plan import Planner, pack_plan
from prefix_rewrite.segments import MIN_LENGTH, IntArray, with_filler


@dataclass(frozen=True)
class EdgeOrder:
    """How the edges of all ranks make up the caller's.

    Attributes:
        counts: edges of each rank.
        place: [all E] where each edge is in the ranks' results, one rank after the other.
    """

    counts: list[int]
    place: Tensor


@dataclass(frozen=True)
class Layout:
    """One forest, or a rank's share of it, on one device, for one set of ops.

    Filler tokens and edges keep every length at `MIN_LENGTH` or more; no filler edge reaches the
    result, so filler gets exactly no gradient.

    Attributes:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64, the depth of each token.
        plan: the ops' packed plan, `host_plan` and `device_plan` of `plan.py`; with context
            parallel, the tensors of `RankPlan`.
        edge_source: [R] int64 distinct physical tokens that an edge starts from.
        edge_row: [E] int64 index into `edge_source` of each edge.
        edge_target: [E] int64 sampled token id of each edge.
        num_edges: edges that belong to the forest; the rest is filler.
        edge_order: with context parallel, where the ranks' edges go.
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: tuple[Tensor, ...]
    edge_source: Tensor
    edge_row: Tensor
    edge_target: Tensor
    num_edges: int
    edge_order: EdgeOrder | None = None


def build_layout(
    forest: PrefixForest,
    planners: Iterable[Planner],
    device: torch.device | str,
    *,
    num_embeddings: int,
    vocab_size: int,
) -> Layout:
    """Lay out a forest for the ops whose planners are given.

    Raises:
        LayoutError: a token id does not exist in the model's vocabulary.
    """
    check_ids(forest, num_embeddings, vocab_size)
    segments = with_filler(forest.segments)
    fields: dict[str, IntArray] = {}
    for planner in planners:
        fields.update(planner(segments))
    return lay_out(
        token_ids=forest.token_ids,
        position_ids=forest.segments.position_ids,
        plan=pack_plan(fields, device),
        source=forest.edges.source,
        target=forest.edges.target,
        device=device,
    )


def lay_out(
    *,
    token_ids: IntArray,
    position_ids: IntArray,
    plan: tuple[Tensor, ...],
    source: IntArray,
    target: IntArray,
    device: torch.device | str,
    edge_order: EdgeOrder | None = None,
) -> Layout:
    """Pad, and move to the device: tokens [T], edges [E]."""
    sources, rows = np.unique(source, return_inverse=True)
    return Layout(
        input_ids=to_device(_pad(token_ids), device)[None],
        position_ids=to_device(_pad(position_ids), device)[None],
        plan=plan,
        edge_source=to_device(_pad(sources), device),
        edge_row=to_device(_pad(rows), device),
        edge_target=to_device(_pad(target), device),
        num_edges=len(target),
        edge_order=edge_order,
    )


def check_ids(forest: PrefixForest, num_embeddings: int, vocab_size: int) -> None:
    """Check that the model has the forest's token ids.

    Raises:
        LayoutError: it has not.
    """
    for kind, ids, size in (
        ("token", forest.token_ids, num_embeddings),
        ("sampled", forest.edges.target, vocab_size),
    ):
        if len(ids) and int(ids.max()) >= size:
            raise LayoutError(
                f"every {kind} id must be below the model's vocabulary of {size}, "
                f"got {int(ids.max())}; check that model and calls use one tokenizer"
            )


def to_device(values: IntArray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def _pad(values: IntArray) -> IntArray:
    return np.pad(values, (0, max(0, MIN_LENGTH - len(values))))
