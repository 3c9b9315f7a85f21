"""The layout: the tensors by which a rewritten graph knows its forest.

Shapes: T physical tokens, E sampled edges, R distinct edge sources.
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
from prefix_rewrite.segments import IntArray, SegmentTable

# A compiler specialises on lengths of 0 and 1. Filler tokens and edges keep every length at 2 or
# more; no filler edge reaches the result, so filler gets exactly no gradient.
_MIN_LENGTH = 2


@dataclass(frozen=True)
class Layout:
    """One forest on one device, for one set of ops.

    Attributes:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64, the depth of each token.
        host_plan, device_plan: the ops' plans, see `plan.py`.
        edge_source: [R] int64 distinct physical tokens that an edge starts from.
        edge_row: [E] int64 index into `edge_source` of each edge.
        edge_target: [E] int64 sampled token id of each edge.
        num_edges: edges that belong to the forest; the rest is filler.
    """

    input_ids: Tensor
    position_ids: Tensor
    host_plan: Tensor
    device_plan: Tensor
    edge_source: Tensor
    edge_row: Tensor
    edge_target: Tensor
    num_edges: int


def _pad(values: IntArray, fill: int = 0) -> IntArray:
    missing = max(0, _MIN_LENGTH - len(values))
    return np.concatenate([values, np.full(missing, fill, dtype=np.int64)])


def _pad_segments(segments: SegmentTable) -> SegmentTable:
    """Append one-token roots until there are enough tokens."""
    missing = max(0, _MIN_LENGTH - segments.num_tokens)
    if not missing:
        return segments
    parent = [*segments.parent.tolist(), *[-1] * missing]
    return SegmentTable.from_parents(parent, [*segments.length.tolist(), *[1] * missing])


def _check_ids(forest: PrefixForest, num_embeddings: int, vocab_size: int) -> None:
    for kind, ids, size in (
        ("token", forest.token_ids, num_embeddings),
        ("sampled", forest.edges.target, vocab_size),
    ):
        if len(ids) and int(ids.max()) >= size:
            raise LayoutError(
                f"every {kind} id must be below the model's vocabulary of {size}, "
                f"got {int(ids.max())}; check that model and calls use one tokenizer"
            )


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
    _check_ids(forest, num_embeddings, vocab_size)
    segments = _pad_segments(forest.segments)
    fields: dict[str, IntArray] = {}
    for planner in planners:
        fields.update(planner(segments))
    host_plan, device_plan = pack_plan(fields, device)
    sources, rows = np.unique(forest.edges.source, return_inverse=True)

    def put(values: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

    return Layout(
        input_ids=put(_pad(forest.token_ids))[None],
        position_ids=put(segments.position_ids)[None],
        host_plan=host_plan,
        device_plan=device_plan,
        edge_source=put(_pad(sources)),
        edge_row=put(_pad(rows)),
        edge_target=put(_pad(forest.edges.target)),
        num_edges=forest.num_edges,
    )
