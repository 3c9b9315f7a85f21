"""The plan of one rank, as a graph passes it to the mixers' context-parallel forms.

Shapes: T physical tokens, L rows of this rank, F rows fetched, C columns; H of a head-like
dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_rewrite.distributed.collectives import (
    COUNTS,
    RECEIVE_COUNTS,
    SEND_COUNTS,
    SEND_ROWS,
    fetch_rows,
    group_rank,
    group_size,
    to_columns,
    to_rows,
)
from prefix_rewrite.distributed.share import Share
from prefix_rewrite.segments import IntArray

Bounds = list[tuple[int, int]]


def plan_collectives(share: Share) -> Mapping[str, IntArray]:
    """Plan what every rank sends and receives."""
    fields = {COUNTS: share.counts}
    for kind, fetch in (("ancestors", share.ancestors), ("near", share.near)):
        fields[SEND_ROWS[kind]] = fetch.send_rows
        fields[SEND_COUNTS[kind]] = fetch.send_counts
        fields[RECEIVE_COUNTS[kind]] = fetch.receive_counts
    return fields


class RankPlan(NamedTuple):
    """What a context-parallel mixer is given beside its own arguments.

    Attributes:
        host_plan, device_plan: the packed plan.
        order: [T] see `collectives.to_columns`.
        ancestors, near: [F] see `collectives.fetch_rows`.
        group: name of the context-parallel group.
    """

    host_plan: Tensor
    device_plan: Tensor
    order: Tensor
    ancestors: Tensor
    near: Tensor
    group: str

    def fetch(self, rows: Tensor, kind: str) -> Tensor:
        """[L, C] to the fetched rows [F, C]; differentiable."""
        place = self.ancestors if kind == "ancestors" else self.near
        return fetch_rows(rows, place, self.host_plan, self.device_plan, kind, self.group)

    def split(self, count: int) -> Bounds:
        """Divide `count` heads or channels among the ranks, as evenly as can be."""
        size = group_size(self.group)
        return [(count * r // size, count * (r + 1) // size) for r in range(size)]

    def own(self, bounds: Bounds) -> tuple[int, int]:
        """This rank's entry."""
        return bounds[group_rank(self.group)]

    def to_heads(self, parts: Sequence[tuple[Tensor, Bounds]]) -> list[Tensor]:
        """Exchange all heads of this rank's rows for all tokens of this rank's heads.

        Args:
            parts: tensors [L, H, ...] and the bounds in H of what each rank gets; bounds of
                different ranks may overlap.

        Returns:
            the tensors [T, own H, ...] in depth-first order, in one collective a dtype.
        """
        out: list[Tensor] = [torch.empty(0)] * len(parts)
        for dtype in dict.fromkeys(tensor.dtype for tensor, _ in parts):
            same = [i for i, (tensor, _) in enumerate(parts) if tensor.dtype == dtype]
            found = self._to_heads([parts[i] for i in same])
            for i, tensor in zip(same, found, strict=True):
                out[i] = tensor
        return out

    def _to_heads(self, parts: Sequence[tuple[Tensor, Bounds]]) -> list[Tensor]:
        inner = [tensor.shape[2:].numel() for tensor, _ in parts]
        ranges, rank = [], group_rank(self.group)
        for r in range(group_size(self.group)):
            offset = 0
            for (tensor, bounds), width in zip(parts, inner, strict=True):
                ranges += [offset + bound * width for bound in bounds[r]]
                offset += tensor.shape[1] * width
        rows = torch.cat([tensor.flatten(1) for tensor, _ in parts], 1)
        columns = to_columns(rows, self.order, self.host_plan, ranges, self.group)
        heads = [bounds[rank][1] - bounds[rank][0] for _, bounds in parts]
        split = columns.split([n * width for n, width in zip(heads, inner, strict=True)], 1)
        return [
            part.reshape(part.shape[0], n, *tensor.shape[2:])
            for part, n, (tensor, _) in zip(split, heads, parts, strict=True)
        ]

    def to_tokens(self, columns: Tensor, bounds: Bounds, num_rows: int) -> Tensor:
        """Undo `to_heads` for one tensor: [T, own H, ...] to [L, H, ...], filler rows 0."""
        inner = columns.shape[2:].numel()
        count = bounds[-1][1]
        ranges = [bound * inner for pair in bounds for bound in pair]
        rows = to_rows(
            columns.flatten(1),
            self.order,
            self.host_plan,
            num_rows,
            count * inner,
            ranges,
            self.group,
        )
        return rows.view(num_rows, count, *columns.shape[2:])
