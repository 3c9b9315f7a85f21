"""The recurrence of RG-LRU: one place of a block, and the scans.

Shapes: T tokens, D channels; n tokens of a place. State: [D].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from prefix_rewrite.ops.chunk_rows import compute_dtype, new_rows
from prefix_rewrite.ops.chunk_tree import ChunkBlock, ChunkTree
from prefix_rewrite.ops.diagonal_scan import scan_backward, scan_forward


class GatedRecurrence:
    """The recurrence over its inputs x and a, both [T, D]."""

    def __init__(self, x: torch.Tensor, a: torch.Tensor):
        self.dtype = compute_dtype(x, a)
        self.x, self.a = x.contiguous(), a.contiguous()

    def forward(self, tree: ChunkTree) -> torch.Tensor:
        """Return h [T, D]."""
        self.h = new_rows(self.x, *self.x.shape[1:], dtype=self.dtype)
        scan_forward(self, tree)
        return self.h[:-1]

    def backward(self, grad: torch.Tensor, tree: ChunkTree) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x and a, in the type of compute, from that of h."""
        self.dh = grad.contiguous()
        shape = self.x.shape[1:]
        self.dx, self.da = (new_rows(self.x, *shape, dtype=self.dtype) for _ in range(2))
        scan_backward(self, tree)
        return self.dx[:-1], self.da[:-1]

    def new_states(self, count: int) -> torch.Tensor:
        return self.x.new_zeros(count, *self.x.shape[1:], dtype=self.dtype)

    def place(self, block: ChunkBlock, index: int) -> GatedPlace:
        return GatedPlace(self, block.tokens[:, index], block.valid[:, index])


@dataclass(frozen=True)
class GatedPlace:
    """The tokens [n] at one place of a block, and which of them are not padding."""

    scan: GatedRecurrence
    tokens: torch.Tensor
    valid: torch.Tensor

    def _rows(self, rows: torch.Tensor, padding: float) -> torch.Tensor:
        picked = rows.index_select(0, self.tokens).to(self.scan.dtype)
        return picked.where(self.valid[:, None], padding)

    @cached_property
    def _targets(self) -> torch.Tensor:
        return self.tokens.where(self.valid, len(self.scan.x))

    def decay(self) -> torch.Tensor:
        return self._rows(self.scan.a, 1)

    def inflow(self) -> torch.Tensor:
        return self._rows(self.scan.x, 0)

    def read(self, state: torch.Tensor) -> None:
        self.scan.h.index_copy_(0, self._targets, state)

    def state_grad(self) -> torch.Tensor:
        return self._rows(self.scan.dh, 0)

    def collect(
        self, before: torch.Tensor, state: torch.Tensor, decay: torch.Tensor, grad: torch.Tensor
    ) -> None:
        self.scan.dx.index_copy_(0, self._targets, grad)
        self.scan.da.index_copy_(0, self._targets, grad * before)
