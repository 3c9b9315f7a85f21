"""Rows of a block of chunks: token tensors gathered by chunk, and results put back.

Shapes: T tokens, n chunks of a block, Q their padded size.
"""

from __future__ import annotations

from functools import cached_property

import torch

from prefix_rewrite.ops.chunk_tree import ChunkBlock

# Below it exp2 is exactly 0, so a token that forgets all before it keeps sums of exponents small.
LEAST_EXPONENT = {torch.float32: -150.0, torch.float64: -1080.0}


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """The type of compute and of states: fp32, or fp64 if any input is."""
    is_double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if is_double else torch.float32


def decay_between(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Decay from one token to a later one, given the base-2 exponents of both."""
    # NOTE [Base 2]: exp2 is vectorised for all values; exp takes 5 to 30 times longer where the
    # result is subnormal.
    return (after - before).clamp_(max=0).exp2_()


def new_rows(like: torch.Tensor, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """[T + 1, ...]: padding is written to the last row, which is dropped in the end."""
    return like.new_empty(like.shape[0] + 1, *shape, dtype=dtype)


class ChunkRows:
    """Gather rows [T, ...] as [n, Q, ...] in the type of compute, and scatter them back."""

    def __init__(self, chunks: ChunkBlock, num_tokens: int, dtype: torch.dtype):
        self.chunks, self.dtype = chunks, dtype
        self.n, self.Q = chunks.tokens.shape
        self._num_tokens = num_tokens

    @cached_property
    def targets(self) -> torch.Tensor:
        """[n, Q] the row each place is written to: T for padding."""
        return self.chunks.tokens.masked_fill(~self.chunks.valid, self._num_tokens)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] to [n, Q, ...]; padding repeats the chunk's last token."""
        picked = rows.index_select(0, self.chunks.tokens.reshape(-1)).to(self.dtype)
        return picked.view(self.n, self.Q, *rows.shape[1:])

    def gather_valid(self, rows: torch.Tensor) -> torch.Tensor:
        """The same, 0 at padding."""
        picked = self.gather(rows)
        if self.chunks.ragged:
            hidden = ~self.chunks.valid
            picked.masked_fill_(hidden.view(*hidden.shape, *[1] * (picked.dim() - 2)), 0)
        return picked

    def scatter(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """[n, Q, ...] to the block's rows of [T + 1, ...]."""
        out.index_copy_(0, self.targets.reshape(-1), values.reshape(-1, *out.shape[1:]))
