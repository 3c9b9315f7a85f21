"""One block of chunks of the tree scan: its inputs gathered, and its decays.

Shapes: as in `chunked`. T tokens, H = G*R heads, P head width, N state width, I state rows;
n chunks of the block, Q their padded size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from prefix_rewrite.ops.chunk_rows import ChunkRows, compute_dtype, new_rows
from prefix_rewrite.ops.chunk_tree import ChunkBlock, ChunkTree

# Most elements of a block's [n, H, Q, Q] weights; on CPU they stay in the cache.
MAX_WEIGHTS = {"cpu": 1 << 18}
MAX_WEIGHTS_ELSEWHERE = 1 << 26

# Below it exp2 is 0 in any type; without it, a token that forgets all would blur the sums.
LEAST_EXPONENT = -1100.0


@dataclass(frozen=True)
class SsdInputs:
    """The scan's inputs: x [T,H,P], dt [T,H], A [H], B and C [T,G,N], D [H], [H,P] or None."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of compute, of states and of the output."""
        return compute_dtype(self.x, self.dt, self.A, self.B, self.C, self.D)

    @cached_property
    def D_rows(self) -> torch.Tensor:
        """D as [H, 1] or [H, P], in the type of compute."""
        assert self.D is not None, "D_rows needs a D"
        D = self.D.to(self.dtype)
        return D[:, None] if D.dim() == 1 else D

    def blocks(self, tree: ChunkTree) -> Iterator[Block]:
        most = MAX_WEIGHTS.get(self.x.device.type, MAX_WEIGHTS_ELSEWHERE)
        for chunks in tree.blocks(most // (tree.chunk_size * self.x.shape[1])):
            yield Block(self, chunks)

    def new_states(self, tree: ChunkTree) -> torch.Tensor:
        """Uninitialised [I, G, R, N, P]."""
        G, N = self.B.shape[1:]
        H, P = self.x.shape[1:]
        return self.x.new_empty(tree.num_states, G, H // G, N, P, dtype=self.dtype)

    def new_rows(self, *shape: int) -> torch.Tensor:
        """Uninitialised [T + 1, ..]."""
        return new_rows(self.x, *shape, dtype=self.dtype)


class Block(ChunkRows):
    """A block's view of the inputs: [n, Q, ..] by token, [n, G, R, Q, ..] by head."""

    def __init__(self, inputs: SsdInputs, chunks: ChunkBlock):
        super().__init__(chunks, len(inputs.x), inputs.dtype)
        self.inputs, self.G = inputs, inputs.B.shape[1]

    def by_head(self, values: torch.Tensor) -> torch.Tensor:
        """[n, Q, H, ..] to [n, G, R, Q, ..]."""
        return values.transpose(1, 2).contiguous().unflatten(1, (self.G, -1))

    def by_token(self, values: torch.Tensor) -> torch.Tensor:
        """[n, G, R, Q, ..] to [n, Q, H, ..], a view."""
        return values.flatten(1, 2).transpose(1, 2)

    def groups(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, G, N] to [n, G, 1, Q, N]."""
        return self.by_head(self.gather(rows))

    def inflow(self, x: torch.Tensor) -> torch.Tensor:
        """u = dt x, from [n, Q, H, P] to [n, G, R, Q, P]."""
        n, Q, H, P = x.shape
        u = x.new_empty(n, H, Q, P)
        torch.mul(x.transpose(1, 2), self.dt.transpose(1, 2)[..., None], out=u)
        return u.unflatten(1, (self.G, -1))

    @cached_property
    def dt(self) -> torch.Tensor:
        """[n, Q, H], 0 at padding: decay 1 and no inflow."""
        return self.gather(self.inputs.dt) * self.chunks.valid[..., None]

    @cached_property
    def visible(self) -> torch.Tensor:
        """[n, Q, Q] 1 where the key is the query or its ancestor, else 0."""
        return self.chunks.visible.to(self.dtype)

    @cached_property
    def exponent(self) -> torch.Tensor:
        """[n, G, R, Q] base-2 logarithm of the decay from the chunk's entry through each token.

        In fp64, since differences of these sums count, and strong decays make the sums large.
        """
        # NOTE [Base 2]: exp2 is equally fast for all values; exp takes 5 to 30 times longer where
        # the exponent is -inf, as in half of each weight matrix, or the result subnormal.
        a = self.dt.double() * (self.inputs.A.double() * math.log2(math.e))
        return self.by_head(torch.bmm(self.visible.double(), a.clamp_(min=LEAST_EXPONENT)))

    @cached_property
    def last_exponent(self) -> torch.Tensor:
        """[n, G, R, 1] the same, through the whole chunk."""
        last = self.chunks.last[:, None, None, None].expand(*self.exponent.shape[:3], 1)
        return self.exponent.gather(3, last)

    def decay(self, exponent: torch.Tensor) -> torch.Tensor:
        """[.., 1] in the type of compute."""
        return exponent.clamp(max=0).exp2_().to(self.dtype)[..., None]

    @cached_property
    def decay_in(self) -> torch.Tensor:
        """[n, G, R, Q, 1] decay from the chunk's entry through each token."""
        return self.decay(self.exponent)

    @cached_property
    def decay_out(self) -> torch.Tensor:
        """[n, G, R, Q, 1] decay from after each token to the chunk's end."""
        return self.decay(self.last_exponent - self.exponent)

    @cached_property
    def decay_through(self) -> torch.Tensor:
        """[n, G, R, 1, 1] decay through the whole chunk."""
        return self.decay(self.last_exponent)

    def decays(self) -> torch.Tensor:
        """[n, G, R, Q, Q] decay from after the key to the query, 0 where it is not visible."""
        coarse = self.exponent.to(self.dtype)
        fine = (self.exponent - coarse).to(self.dtype)
        exponents = coarse[..., :, None] - coarse[..., None, :]
        exponents.add_(fine[..., :, None]).sub_(fine[..., None, :])
        bound = torch.zeros_like(self.visible).masked_fill_(~self.chunks.visible, -torch.inf)
        return torch.minimum(exponents, bound[:, None, None], out=exponents).exp2_()

    def entering(self, states: torch.Tensor) -> torch.Tensor:
        """[n, G, R, N, P] the states that enter the chunks."""
        assert self.chunks.parents is not None, "no state enters a block of roots"
        return states.index_select(0, self.chunks.parents)

    def sum_over_descendants(self, values: torch.Tensor) -> torch.Tensor:
        """[n, G, R, Q]: for each token, over the chunk's tokens that see it."""
        return (values.flatten(1, 2) @ self.visible).view_as(values)

    def sum_over_ancestors(self, values: torch.Tensor) -> torch.Tensor:
        """[n, G, R, Q]: for each token, over the chunk's tokens before it on its path."""
        return (values.flatten(1, 2) @ self.visible.tril(-1).mT).view_as(values)

    def sum_over_pairs(self, values: torch.Tensor) -> torch.Tensor:
        """[n, G, R, Q, Q] to [n, G, R, Q]: for each token, over the pairs whose decay it is in.

        These are the pairs of a query that sees the token, and a key before it on its path.
        Values are 0 where the query does not see the key, so the keys before the token in
        storage will do.
        """
        # NOTE [Pair sums]: row sums less column sums, summed over descendants, would be cheaper;
        # they cancel only up to rounding, and what is left where the decay is strong is rounding.
        sums = values.cumsum(-1)[..., :-1].mul_(self.visible[:, None, None, :, 1:]).sum(-2)
        return torch.nn.functional.pad(sums, (1, 0))
