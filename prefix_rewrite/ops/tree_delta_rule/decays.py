"""Scores between the tokens of a chunk under a decay: `s_ij = sum_k a_ik b_jk exp(c_ik - c_jk)`.

`c` is the sum of a path's log decays from the chunk's entry through a token, here in base 2. No
positive exponent is ever taken: splitting it into exp(c_i) exp(-c_j) would overflow.

Shapes: b chunks times heads, Q places of a chunk, K channels.
"""

from __future__ import annotations

from functools import cached_property

import torch

from prefix_rewrite.ops.chunk_rows import decay_between


class HeadDecay:
    """One decay for all channels of a head, in chunks of any shape.

    Args:
        exponents: c, [b, Q, 1].
        visible: [n, Q, Q] whether the key is the query or its ancestor, b a multiple of n.
    """

    def __init__(self, exponents: torch.Tensor, visible: torch.Tensor):
        self.exponents, self.visible = exponents, visible

    @cached_property
    def _decays(self) -> torch.Tensor:
        """[b, Q, Q], 0 where the key is not visible."""
        c, (n, Q, _) = self.exponents, self.visible.shape
        hidden = torch.zeros_like(self.visible, dtype=c.dtype)
        hidden.masked_fill_(~self.visible, -torch.inf)
        differences = (c - c.mT).view(n, -1, Q, Q)
        return torch.minimum(differences, hidden[:, None], out=differences).exp2_().view(-1, Q, Q)

    def scores(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[b, Q, Q] of rows a and columns b [b, Q, K]; 0 where the key is not visible."""
        return torch.bmm(a, b.mT).mul_(self._decays)

    def scores_grad(
        self, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of a, of b and of the exponents, in base e."""
        faded = grad * self._decays
        # A pair i = j holds no decay; it would cancel, but for rounding.
        dexponents = grad * scores
        dexponents.diagonal(dim1=1, dim2=2).zero_()
        dsum = (dexponents.sum(2) - dexponents.sum(1)).unsqueeze(-1)
        return torch.bmm(faded, b), torch.bmm(faded.mT, a), dsum

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum per-channel gradients [.., K] to the decay's own width."""
        return values.sum(-1, keepdim=True)


class ChannelDecay:
    """A decay for every channel, in chunks that are one path: each token sees all before it.

    The lower triangle is tiled by rectangles of rows after columns. With the decay up to the last
    column as the point between, both factors of a rectangle have exponents of at most 0.

    Args:
        exponents: c, [b, Q, K], Q a multiple of 16.
    """

    tile = 16  # below it rectangles are halves of halves, batched over all of one size

    def __init__(self, exponents: torch.Tensor):
        assert exponents.shape[1] % self.tile == 0, f"places {exponents.shape[1]}"
        self.exponents = exponents

    def _pairs(self, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views [b, m, rows, K] and [b, m, columns, K] of [b, Q, K] for each kind of rectangle."""
        b, Q, K = x.shape
        pairs = [
            (x[:, None, lo : lo + self.tile], x[:, None, :lo])
            for lo in range(self.tile, Q, self.tile)
        ]
        for half in (8, 4, 2, 1):
            halves = x.view(b, -1, 2, half, K)
            pairs.append((halves[:, :, 1], halves[:, :, 0]))
        return pairs

    def _rectangles(self, scores: torch.Tensor) -> list[torch.Tensor]:
        """Views [b, m, rows, columns] of [b, Q, Q] for the same rectangles."""
        b, Q, _ = scores.shape
        views = [
            scores[:, None, lo : lo + self.tile, :lo] for lo in range(self.tile, Q, self.tile)
        ]
        for half in (8, 4, 2, 1):
            m = Q // (2 * half)
            squares = scores.view(b, m, 2, half, m, 2, half).diagonal(dim1=1, dim2=4)
            views.append(squares[:, 1, :, 0].permute(0, 3, 1, 2))
        return views

    @cached_property
    def _factors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Decays from the last column to each row, and from each column to the last one."""
        return [
            (
                decay_between(columns[..., -1:, :], rows),
                decay_between(columns, columns[..., -1:, :]),
            )
            for rows, columns in self._pairs(self.exponents)
        ]

    def scores(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(*a.shape[:2], a.shape[1], dtype=a.dtype, device=a.device)
        for view, (rows, _), (_, columns), (row_decay, column_decay) in zip(
            self._rectangles(out), self._pairs(a), self._pairs(b), self._factors, strict=True
        ):
            view.copy_((rows * row_decay) @ (columns * column_decay).mT)
        out.diagonal(dim1=1, dim2=2).copy_((a * b).sum(-1))
        return out

    def scores_grad(
        self, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        da, db = torch.zeros_like(a), torch.zeros_like(b)
        for view, (rows, _), (_, columns), (row_decay, column_decay), (da_rows, _), (
            _,
            db_columns,
        ) in zip(
            self._rectangles(grad),
            self._pairs(a),
            self._pairs(b),
            self._factors,
            self._pairs(da),
            self._pairs(db),
            strict=True,
        ):
            da_rows += (view @ (columns * column_decay)) * row_decay
            db_columns += (view.mT @ (rows * row_decay)) * column_decay
        dsum = a * da - b * db  # the diagonal, which holds no decay, is still left out
        own = grad.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        return da.addcmul_(own, b), db.addcmul_(own, a), dsum

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values
