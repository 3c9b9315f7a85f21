"""A little model that adds to its hidden states whatever is tried on it.

Shapes: T tokens, D = 12 features, H = 2 attention heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from families import VOCAB
from torch import Tensor, nn

WIDTH, HEADS = 12, 2


class Given(NamedTuple):
    """What a leak may use beside the hidden states: the model, its ids and positions [1,T]."""

    m: Probe
    ids: Tensor
    at: Tensor


@dataclass(frozen=True)
class Pair:
    """A leak between tokens and its twin without it.

    Attributes:
        names: what the error must name: the op, or what the model does.
        leak, clean: what each adds to hidden states x [1,T,D], or returns where it is last.
        last: whether it makes the model's output.
    """

    names: str
    leak: Callable[[Tensor, Given], Any]
    clean: Callable[[Tensor, Given], Any]
    last: bool = False

    def build(self, *, leak: bool) -> Probe:
        torch.manual_seed(0)
        return Probe(self.leak if leak else self.clean, last=self.last).train()


class Probe(nn.Module):
    """Embedding, causal attention, what is tried, a head; and modules to try it with."""

    def __init__(self, tried: Callable[[Tensor, Given], Any], *, last: bool = False):
        super().__init__()
        self.tried, self.last = tried, last
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.next_head = nn.Linear(WIDTH, VOCAB)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(64, WIDTH)
        self.square = nn.Parameter(torch.randn(64, 64))
        self.eleven = nn.Linear(11, 11)  # as many as the tokens that a capture runs on
        self.memory = nn.Parameter(torch.randn(1, HEADS, 5, WIDTH // HEADS))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)
        self.narrow = nn.Conv1d(WIDTH, WIDTH, 1)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.frozen_norm = nn.BatchNorm1d(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * WIDTH**-0.5)
        self.router = nn.Linear(WIDTH, 4)
        self.register_buffer("cache", torch.randn(64, WIDTH))
        self.register_buffer("count", torch.ones(()))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each [1,H,T,D/H]."""
        qkv = self.qkv(x).view(1, x.shape[1], 3, HEADS, -1)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    def attend(self, x: Tensor, **arguments: Any) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(x), **arguments)
        return mixed.transpose(1, 2).flatten(2)

    def train(self, mode: bool = True) -> Probe:
        super().train(mode)
        self.frozen_norm.eval()
        return self

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        one_head = self.linear(x)[:, None]
        x = x + F.scaled_dot_product_attention(one_head, one_head, one_head, is_causal=True)[:, 0]
        tried = self.tried(x, Given(self, input_ids, position_ids))
        return tried if self.last else self.head(x + tried)
