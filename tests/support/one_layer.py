"""A one-layer decoder whose attention, feed-forward and head a test can replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from families import VOCAB
from torch import Tensor, nn

WIDTH, HEADS = 16, 2


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, attend: Callable[..., Tensor], kv_heads: int = HEADS):
        super().__init__()
        self.attend = attend
        self.sizes = [HEADS, kv_heads, kv_heads]
        self.qkv = nn.Linear(WIDTH, sum(self.sizes) * WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        return self.out(self.attend(*heads.split(self.sizes, 1)).transpose(1, 2).flatten(2))


class OneLayer(nn.Module):
    """Token ids [1,T] in, logits [1,T,V] out, or what `finish(self, hidden)` returns.

    Args:
        attend: attention over q [1,H,T,D], k and v [1,K,T,D].
        finish: makes the output of the last hidden states; `self.head` by default.
        between: what comes between attention and head.
        kv_heads: heads of k and v.
    """

    def __init__(
        self,
        attend: Callable[..., Tensor] = causal,
        finish: Callable[[Any, Tensor], Any] | None = None,
        between: nn.Module | None = None,
        kv_heads: int = HEADS,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attention = Attention(attend, kv_heads)
        self.between = between or nn.Identity()
        self.head = nn.Linear(WIDTH, VOCAB)
        self.finish = finish or (lambda model, x: model.head(x))

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        x = x + self.attention(x)
        return self.finish(self, self.between(x))
