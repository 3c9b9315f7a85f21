"""Hostile parts of models, in pairs: each a leak between tokens, and a near part that is none."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from probe import WIDTH, Pair, Probe
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def _relative(m: Probe, x: Tensor) -> Tensor:
    """Hand-written attention scores with a bias by distance."""
    q, k, _ = m.heads(x)
    place = torch.arange(x.shape[1])
    distance = (place[:, None] - place[None, :]).clamp(0, 63)
    return q @ k.transpose(-1, -2) + m.square[0][distance]


def _waves(at: Tensor) -> Tensor:
    """[1,T] -> [1,T,D]"""
    angles = at[..., None].float() / 10.0 ** torch.arange(0, WIDTH // 2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each token's heads attend to each other: [1,T,H,D/H]."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).flatten(2)


def _flat(mixed: Tensor) -> Tensor:
    """[1,H,T,D/H] -> [1,T,D]"""
    return mixed.transpose(1, 2).flatten(2)


def _halved(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).mean(-1)


def _updated(buffer: Tensor, change: Tensor) -> Tensor:
    buffer.add_(change)
    return buffer


def _averaged(m: Probe, x: Tensor) -> Tensor:
    m.cache = 0.9 * m.cache + 0.1 * x.detach().mean((0, 1))
    return m.cache[0]


def _replaced(m: Probe) -> Tensor:
    m.count = m.count + 1
    return m.count


def _written(m: Probe, x: Tensor) -> Tensor:
    m.cache[: x.shape[1]] = x[0].detach()
    return m.cache.mean(0)


PRODUCTS = {
    "handwritten_attention": Pair(
        "matmul",
        lambda x, t: (x @ x.mT).tril().softmax(-1) @ x,
        lambda x, t: _over_heads(*t.m.heads(x)),
    ),
    "relative_position_bias": Pair(
        "matmul",
        lambda x, t: _flat(_relative(t.m, x).softmax(-1) @ t.m.heads(x)[2]),
        lambda x, t: t.m.attend(x, is_causal=True),
    ),
    "bidirectional_attention": Pair(
        "attention is not causal",
        lambda x, t: t.m.attend(x),
        lambda x, t: t.m.attend(x, is_causal=True, scale=0.3),
    ),
    "masked_attention": Pair(
        "attention is given a mask",
        lambda x, t: t.m.attend(x, attn_mask=torch.ones(x.shape[1], x.shape[1]).tril().log()),
        lambda x, t: t.m.attend(x, is_causal=True),
    ),
    "cross_attention": Pair(
        "attention",
        lambda x, t: _flat(
            F.scaled_dot_product_attention(t.m.heads(x)[0], t.m.memory, t.m.memory)
        ),
        lambda x, t: (
            ((t.m.heads(x)[0] @ t.m.memory.mT).softmax(-1) @ t.m.memory).transpose(1, 2).flatten(2)
        ),
    ),
    "multihead_attention": Pair(
        "attention",
        lambda x, t: t.m.attention(x, x, x, need_weights=False)[0],
        lambda x, t: t.m.attention.out_proj(t.m.attend(x, is_causal=True)),
    ),
    "recurrence": Pair("GRU", lambda x, t: t.m.gru(x)[0], lambda x, t: torch.tanh(t.m.linear(x))),
    "mixing_mlp": Pair(
        "getitem",
        lambda x, t: t.m.square[: x.shape[1], : x.shape[1]] @ x,
        lambda x, t: x @ t.m.square[:WIDTH, :WIDTH],
    ),
    "mixing_mlp_of_one_length": Pair(
        "F.linear",
        lambda x, t: t.m.eleven(x.mT).mT,
        lambda x, t: F.pad(t.m.eleven(x[..., :11]), (0, 1)),
    ),
    "gram_matrix": Pair("matmul", lambda x, t: x @ (x.mT @ x), lambda x, t: x @ t.m.linear.weight),
    "einsum_over_tokens": Pair(
        "einsum",
        lambda x, t: torch.einsum("btd,bte->bde", x, x).sum(1, True),
        lambda x, t: torch.einsum("btd,de->bte", x, t.m.linear.weight),
    ),
    "products_of_tokens": Pair(
        "mul",
        lambda x, t: (x[..., :1] * x[..., 1].unsqueeze(1)).sum(-1, True),
        lambda x, t: (x.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1),
    ),
    "convolution": Pair(
        "conv1d",
        lambda x, t: t.m.conv(x.mT)[..., :-2].mT,
        lambda x, t: t.m.narrow(x.mT).mT,
    ),
    "average_pool": Pair(
        "avg_pool1d",
        lambda x, t: F.avg_pool1d(x.mT, 3, 1, 1).mT,
        lambda x, t: F.avg_pool1d(x, 3, 1, 1),
    ),
    "max_pool": Pair(
        "max_pool1d",
        lambda x, t: F.max_pool1d(x.mT, 3, 1, 1).mT,
        lambda x, t: F.max_pool1d(x, 3, 1, 1),
    ),
    "interpolation": Pair(
        "interpolate",
        lambda x, t: _halved(F.interpolate(x.mT, scale_factor=2.0, mode="linear")).mT,
        lambda x, t: _halved(F.interpolate(x, scale_factor=2.0, mode="linear")),
    ),
    "bag_of_embeddings": Pair(
        "embedding_bag",
        lambda x, t: F.embedding_bag(t.ids, t.m.table.weight.repeat(2, 1))[None],
        lambda x, t: F.embedding(t.ids, t.m.table.weight.repeat(2, 1)),
    ),
}

PLACES = {
    "positions_by_storage": Pair(
        "arange",
        lambda x, t: t.m.table(torch.arange(x.shape[1]))[None],
        lambda x, t: t.m.table(t.at),
    ),
    "positions_by_slice": Pair(
        "getitem",
        lambda x, t: t.m.table.weight[: x.shape[1]][None],
        lambda x, t: t.m.table.weight[t.at],
    ),
    "positions_by_counting": Pair(
        "cumsum",
        lambda x, t: t.m.table(torch.ones_like(t.ids).cumsum(1)),
        lambda x, t: t.m.table(torch.ones_like(t.ids) + t.at),
    ),
    "waves_by_storage": Pair(
        "arange",
        lambda x, t: _waves(torch.arange(x.shape[1])[None]),
        lambda x, t: _waves(t.at),
    ),
    "mask_by_storage": Pair(
        "arange",
        lambda x, t: torch.where((torch.arange(x.shape[1]) % 2 == 0)[:, None], x, 0.0),
        lambda x, t: torch.where((t.at % 2 == 0)[..., None], x, 0.0),
    ),
    "triangle_of_ones": Pair(
        "ones",
        lambda x, t: torch.ones(x.shape[1], x.shape[1]).tril() @ x,
        lambda x, t: x @ torch.ones(WIDTH, WIDTH).tril(),
    ),
    "positions_from_the_first": Pair(
        "getitem", lambda x, t: t.m.table(t.at - t.at[:, :1]), lambda x, t: t.m.table(t.at - 0)
    ),
    "divided_by_length": Pair(
        "number of tokens", lambda x, t: x / x.shape[1], lambda x, t: x / x.shape[2]
    ),
    "scaled_by_log_of_length": Pair(
        "math.log",
        lambda x, t: x * math.log(x.shape[1]),
        lambda x, t: x * torch.log(t.at + 1.0)[..., None],
    ),
    "filled_with_length": Pair(
        "number of tokens",
        lambda x, t: x * torch.full((WIDTH,), 1.0 * x.shape[1]),
        lambda x, t: x * torch.full((WIDTH,), 1.0 * x.shape[2]),
    ),
    "branch_on_length": Pair(
        "branches",
        lambda x, t: x * 2 if x.shape[1] > 8 else x,
        lambda x, t: x * 2 if x.shape[2] > 8 else x,
    ),
}

STATES = {
    "cache_written": Pair(
        "setitem", lambda x, t: _written(t.m, x), lambda x, t: t.m.cache.mean(0)
    ),
    "calls_counted": Pair(
        "add",
        lambda x, t: x * _updated(t.m.count, torch.ones(())),
        lambda x, t: x * _updated(t.m.count.clone(), torch.ones(())),
    ),
    "buffer_replaced": Pair(
        "add",
        lambda x, t: x * _replaced(t.m),
        lambda x, t: x * (t.m.count + 1),
    ),
    "running_mean": Pair(
        "mean",
        lambda x, t: x - _averaged(t.m, x),
        lambda x, t: x - t.m.cache[0],
    ),
    "mean_in_a_checkpoint": Pair(
        "mean",
        lambda x, t: checkpoint(lambda h: h - h.mean(1, True), x, use_reentrant=False),
        lambda x, t: checkpoint(lambda h: h - h.mean(-1, True), x, use_reentrant=False),
    ),
    "noise": Pair(
        "rand_like",
        lambda x, t: x + torch.rand_like(x),
        lambda x, t: x + torch.ones_like(x),
    ),
    "one_random_number": Pair(
        "rand",
        lambda x, t: torch.where(torch.rand(()) > 0.5, x, 0.0),
        lambda x, t: torch.where(t.m.count > 0.5, x, 0.0),
    ),
    "dropout": Pair(
        "dropout",
        lambda x, t: torch.dropout(x, 0.5, True),
        lambda x, t: torch.dropout(x, 0.5, False),
    ),
    "gradient_scaled_by_frequency": Pair(
        "embedding",
        lambda x, t: F.embedding(t.ids % 64, t.m.table.weight, scale_grad_by_freq=True),
        lambda x, t: F.embedding(t.ids % 64, t.m.table.weight),
    ),
}


HOSTILE_MODELS = PRODUCTS | PLACES | STATES
