"""Mamba-1 as a recurrence with elementwise decay: one place of a block, and the scans.

Shapes: T tokens, D channels, N state width; n tokens of a place. State: [D, N].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from prefix_rewrite.ops.chunk_rows import compute_dtype, new_rows
from prefix_rewrite.ops.chunk_tree import ChunkBlock, ChunkTree
from prefix_rewrite.ops.diagonal_scan import scan_backward, scan_forward


class SelectiveScan:
    """The recurrence over its inputs u, dt [T,D], A [D,N], B and C [T,N]."""

    def __init__(
        self,
        u: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
    ):
        self.dtype = compute_dtype(u, dt, A, B, C)
        self.u, self.dt, self.B, self.C = (t.contiguous() for t in (u, dt, B, C))
        self.A = A.to(self.dtype)

    def forward(self, tree: ChunkTree) -> torch.Tensor:
        """Return y [T, D]."""
        self.y = new_rows(self.u, *self.u.shape[1:], dtype=self.dtype)
        scan_forward(self, tree)
        return self.y[:-1]

    def backward(self, grad: torch.Tensor, tree: ChunkTree) -> tuple[torch.Tensor, ...]:
        """Return the gradients of u, dt, A, B and C, in the type of compute, from that of y."""
        self.dy = grad.contiguous()
        D, N = self.A.shape
        self.du, self.ddt = (new_rows(self.u, D, dtype=self.dtype) for _ in range(2))
        self.dB, self.dC = (new_rows(self.u, N, dtype=self.dtype) for _ in range(2))
        self.dA = torch.zeros_like(self.A)
        scan_backward(self, tree)
        return self.du[:-1], self.ddt[:-1], self.dA, self.dB[:-1], self.dC[:-1]

    def new_states(self, count: int) -> torch.Tensor:
        return self.A.new_zeros(count, *self.A.shape)

    def place(self, block: ChunkBlock, index: int) -> SelectivePlace:
        return SelectivePlace(self, block.tokens[:, index], block.valid[:, index])


@dataclass(frozen=True)
class SelectivePlace:
    """The tokens [n] at one place of a block, and which of them are not padding."""

    scan: SelectiveScan
    tokens: torch.Tensor
    valid: torch.Tensor

    def _rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self.tokens).to(self.scan.dtype)

    @cached_property
    def _targets(self) -> torch.Tensor:
        return self.tokens.where(self.valid, len(self.scan.u))

    @cached_property
    def _dt(self) -> torch.Tensor:
        """[n, D], 0 at padding: decay 1 and no input."""
        return self._rows(self.scan.dt) * self.valid[:, None]

    @property
    def _dy(self) -> torch.Tensor:
        return self._rows(self.scan.dy) * self.valid[:, None]

    def decay(self) -> torch.Tensor:
        return (self._dt[..., None] * self.scan.A).exp_()

    def inflow(self) -> torch.Tensor:
        return (self._dt * self._rows(self.scan.u))[..., None] * self._rows(self.scan.B)[:, None]

    def read(self, state: torch.Tensor) -> None:
        y = torch.bmm(state, self._rows(self.scan.C)[..., None]).squeeze(-1)
        self.scan.y.index_copy_(0, self._targets, y)

    def state_grad(self) -> torch.Tensor:
        return self._dy[..., None] * self._rows(self.scan.C)[:, None]

    def collect(
        self, before: torch.Tensor, state: torch.Tensor, decay: torch.Tensor, grad: torch.Tensor
    ) -> None:
        scan, dt, u = self.scan, self._dt, self._rows(self.scan.u)
        dinput = torch.bmm(grad, self._rows(scan.B)[..., None]).squeeze(-1)  # of dt u
        dexponent = grad * before * decay  # of dt A
        scan.dA += (dexponent * dt[..., None]).sum(0)
        rows = {
            "du": dt * dinput,
            "ddt": u * dinput + (dexponent * scan.A).sum(-1),
            "dB": torch.bmm((dt * u)[:, None], grad).squeeze(1),
            "dC": torch.bmm(self._dy[:, None], state).squeeze(1),
        }
        for name, values in rows.items():
            getattr(scan, name).index_copy_(0, self._targets, values)
