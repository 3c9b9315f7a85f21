"""A vocabulary projection, cut in tiles of rows and vocabulary entries.

Shapes: R rows, D hidden size, V vocabulary, E edges; r rows and v vocabulary entries of a tile,
e edges whose row is in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from prefix_rewrite.ops.edge_logprobs.steps import Kept, Step, final_dtype, run_steps

TILE_ROWS = 512
MAX_LOGITS_CPU = 2**20  # of one tile: stays in cache
MAX_LOGITS_DEVICE = 2**25  # fills a large accelerator


@dataclass(frozen=True)
class Head:
    """The projection, what follows it, and the edges that read it.

    Attributes:
        hidden_RD: rows, in the dtype that the model's head computes in.
        weight_VD: in any dtype; cast to the rows' dtype, as by `F.linear` under autocast.
        bias_V: likewise, or None.
        row_E: row of each edge, ascending.
        target_E: token id of each edge.
        temperature_1: divides the logits, in the softmax's dtype.
        steps: what the model does to its logits.
    """

    hidden_RD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    row_E: Tensor
    target_E: Tensor
    temperature_1: Tensor
    steps: list[Step]

    @property
    def softmax_dtype(self) -> torch.dtype:
        """fp64 if the model's logits are, else fp32."""
        is_double = final_dtype(self.hidden_RD.dtype, self.steps) == torch.float64
        return torch.float64 if is_double else torch.float32

    @property
    def product_dtype(self) -> torch.dtype:
        """Dtype of the matrix products' operands: halves go as fp32 on CPU, which is as exact.

        A product of halves sums in fp32 and is rounded once, either way; CPUs without half
        instructions take 3 to 60 times as long for it.
        """
        half_on_cpu = self.hidden_RD.dtype.itemsize < 4 and self.hidden_RD.device.type == "cpu"
        return torch.float32 if half_on_cpu else self.hidden_RD.dtype

    def row_tiles(self) -> list[tuple[slice, slice]]:
        """Return (rows, their edges) of each tile of rows."""
        num_rows = len(self.hidden_RD)
        firsts = range(0, num_rows, TILE_ROWS)
        cuts = torch.tensor([*firsts, num_rows], device=self.row_E.device)
        edges = torch.searchsorted(self.row_E, cuts).tolist()
        return [
            (slice(first, min(first + TILE_ROWS, num_rows)), slice(edges[i], edges[i + 1]))
            for i, first in enumerate(firsts)
        ]

    def vocab_tiles(self) -> list[slice]:
        """Return the vocabulary entries of each tile."""
        on_cpu = self.hidden_RD.device.type == "cpu"
        max_logits = MAX_LOGITS_CPU if on_cpu else MAX_LOGITS_DEVICE
        num_rows, num_entries = min(len(self.hidden_RD), TILE_ROWS), len(self.weight_VD)
        step = max(1, max_logits // max(1, num_rows))
        return [slice(v, min(v + step, num_entries)) for v in range(0, num_entries, step)]

    def weights(self, entries: slice) -> tuple[Tensor, Tensor | None]:
        """Return weight [v, D] and bias [v] of a tile, rounded as the model's head would."""
        dtype, product = self.hidden_RD.dtype, self.product_dtype
        weight = self.weight_VD[entries].to(dtype).to(product)
        bias = None if self.bias_V is None else self.bias_V[entries].to(dtype).to(product)
        return weight, bias

    def logits(
        self, hidden_rD: Tensor, weights: tuple[Tensor, Tensor | None], kept: Kept | None = None
    ) -> Tensor:
        """Return the tile [r, v] of logits / temperature, in the softmax's dtype."""
        logits_rv = F.linear(hidden_rD, *weights).to(self.hidden_RD.dtype)
        logits_rv = run_steps(logits_rv, self.steps, kept).to(self.softmax_dtype)
        return logits_rv.div_(self.temperature_1)

    def edges_in(self, rows: slice, edges: slice, entries: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, entry, is inside) [e] of the edges in a tile; entries are clamped to it."""
        entry = self.target_E[edges] - entries.start
        num_entries = entries.stop - entries.start
        inside = (entry >= 0) & (entry < num_entries)
        return self.row_E[edges] - rows.start, entry.clamp(0, num_entries - 1), inside
