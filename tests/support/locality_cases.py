"""Calls of single ops, each as one that keeps tokens apart and one that doesn't.

x is [1,T,12] and floating, ids are [1,T] below 12, w is a [12,12] weight; T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Case = Callable[[Tensor, Tensor, Tensor], Tensor]

# name: (token-local, not token-local)
CASES: dict[str, tuple[Case, Case]] = {
    "add": (lambda x, i, w: x + x.flip(-1), lambda x, i, w: x + x.flip(1)),
    "where": (
        lambda x, i, w: torch.where(x > 0, x, w[0]),
        lambda x, i, w: torch.where(x > 0, x, x[:, :1]),
    ),
    "clamp": (lambda x, i, w: x.clamp(w[0] - 1, w[1] + 1), lambda x, i, w: x.clamp(max=x.amin())),
    "relu_in_place": (
        lambda x, i, w: F.relu(x * 2, True),
        lambda x, i, w: (x * 2).add_(x.mean(1, True)),
    ),
    "write_slice": (
        lambda x, i, w: _write(x, (..., slice(3)), x[..., 3:6]),
        lambda x, i, w: _write(x, (slice(None), slice(1, None)), x[:, :-1]),
    ),
    "write_column": (
        lambda x, i, w: _write(x, (0, slice(None), 2), x[0, :, 3]),
        lambda x, i, w: _write(x, (0, 1), x[0, 0]),
    ),
    "accumulate_view": (
        lambda x, i, w: _add_to(x * 1, (..., slice(4)), 1.0),
        lambda x, i, w: _add_to(x * 1, (slice(None), 0), 1.0),
    ),
    "cast": (lambda x, i, w: x.double().to(w).type_as(w), lambda x, i, w: x.double().cumsum(1)),
    "complex": (
        lambda x, i, w: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)))),
        lambda x, i, w: torch.view_as_real(torch.view_as_complex(x[..., :2]) ** 2).roll(1, 1),
    ),
    "one_hot": (lambda x, i, w: F.one_hot(i, 12), lambda x, i, w: F.one_hot(i, 12).cummax(1)[0]),
    "glu": (lambda x, i, w: F.glu(x, -1), lambda x, i, w: F.glu(torch.stack([x, x.flip(1)]), 0)),
    "view": (
        lambda x, i, w: x.view(1, -1, 3, 4).flatten(0, 1),
        lambda x, i, w: x.view(1, 12, -1).mT,
    ),
    "rows_of_tokens": (
        lambda x, i, w: x.reshape(-1, 6).view(-1, 2, 6).sum(1).view(1, -1, 6),
        lambda x, i, w: x.reshape(2, -1, 6).sum(0).repeat(1, 2),
    ),
    "permute": (lambda x, i, w: x.permute(2, 0, 1).mT, lambda x, i, w: x.permute(2, 1, 0).flip(1)),
    "swap": (lambda x, i, w: x.mT.swapaxes(0, 2), lambda x, i, w: x.mT.cumsum(-1)),
    "move": (
        lambda x, i, w: x.movedim(1, -1).movedim(0, 1),
        lambda x, i, w: x.movedim(1, 0).sum(0),
    ),
    "squeeze": (lambda x, i, w: x[0].unsqueeze(0).squeeze(), lambda x, i, w: x[0].mean(0)[None]),
    "expand": (
        lambda x, i, w: x[..., None].expand(-1, -1, -1, 3).flatten(2),
        lambda x, i, w: x[:, :1].expand_as(x),
    ),
    "constant": (
        lambda x, i, w: x + w[0].expand(1, x.shape[1], 12) + x.new_zeros(1, x.shape[1], 1),
        lambda x, i, w: x + x.new_full((1, x.shape[1], 1), x.shape[1]),
    ),
    "repeat": (
        lambda x, i, w: x.repeat(1, 3, 2).view(1, 3, -1, 24).sum(1),
        lambda x, i, w: x.repeat(1, 2, 1).view(1, -1, 24),
    ),
    "repeat_interleave": (
        lambda x, i, w: x.repeat_interleave(2, 1).view(1, -1, 24),
        lambda x, i, w: x.repeat_interleave(2, 1).view(1, 2, -1, 12).sum(1),
    ),
    "two_orders": (
        lambda x, i, w: x.repeat_interleave(2, 1) + (x * x).repeat_interleave(2, 1),
        lambda x, i, w: x.repeat_interleave(2, 1) + x.repeat(1, 2, 1),
    ),
    "two_dims": (
        lambda x, i, w: x[..., :1] * x[..., 1][..., None],
        lambda x, i, w: (x[..., :1] * x[..., 1][:, None]).sum(-1),
    ),
    "cat": (
        lambda x, i, w: torch.cat([x, x[..., :2]], dim=-1),
        lambda x, i, w: torch.cat([x, x], dim=1).view(1, -1, 24),
    ),
    "stack": (
        lambda x, i, w: torch.stack([x, -x], 1).sum((0, 1)),
        lambda x, i, w: torch.stack([x, x.roll(1, 1)], 1).sum(1),
    ),
    "split": (
        lambda x, i, w: torch.split(x, [4, 8], dim=-1)[1],
        lambda x, i, w: torch.cat(x.chunk(2, 1)[::-1], 1),
    ),
    "unbind": (lambda x, i, w: x.unbind(-1)[3], lambda x, i, w: x + x.select(1, 0)),
    "narrow": (lambda x, i, w: x.narrow(-1, 2, 5), lambda x, i, w: x + x.narrow(1, 0, 1)),
    "unfold": (
        lambda x, i, w: x.unfold(-1, 3, 3).mean(-1),
        lambda x, i, w: x.unfold(1, 1, 1).roll(1, 1),
    ),
    "pad": (
        lambda x, i, w: F.pad(x, (1, 2)),
        lambda x, i, w: F.pad(x, (0, 0, 1, 0))[:, 1:].roll(1, 1),
    ),
    "triangle": (
        lambda x, i, w: (x[..., None] * w).tril().sum(-1),
        lambda x, i, w: x.tril(),
    ),
    "index": (lambda x, i, w: x[:, None, :, [0, 3, 5]][0], lambda x, i, w: x + x[:, -1:]),
    "strided": (lambda x, i, w: x[..., ::2], lambda x, i, w: x + x[:, :: x.shape[1]]),
    "from_the_end": (lambda x, i, w: x[:, -x.shape[1] :], lambda x, i, w: x + x[:, -1]),
    "table": (lambda x, i, w: w[i], lambda x, i, w: w[i[:, :1]] + x),
    "table_of_pairs": (lambda x, i, w: w[i, 11 - i], lambda x, i, w: w[i, i.flip(1)]),
    "embedding": (lambda x, i, w: F.embedding(i, w), lambda x, i, w: F.embedding(i.flip(1), w)),
    "index_select": (
        lambda x, i, w: x.index_select(-1, w[0, :3].long().abs()),
        lambda x, i, w: x.index_select(1, i[0] * 0),
    ),
    "select_rows": (lambda x, i, w: w.index_select(0, i[0]), lambda x, i, w: x[0, i[0] * 0]),
    "gather": (
        lambda x, i, w: x.gather(-1, i[..., None]),
        lambda x, i, w: x.gather(1, i[..., None] * 0),
    ),
    "scatter": (
        lambda x, i, w: (x * 0).scatter_(-1, i[..., None], 1.0),
        lambda x, i, w: (x * 0).scatter_(1, i[..., None] * 0, 1.0),
    ),
    "scatter_add": (
        lambda x, i, w: (x * 0).scatter_add(-1, i[..., None], x[..., :1]),
        lambda x, i, w: (x * 0).scatter_add(1, i[..., None].expand_as(x) * 0, x),
    ),
    "index_add": (
        lambda x, i, w: x.index_add(-1, w[0, :2].long().abs(), x[..., :2]),
        lambda x, i, w: x.index_add(1, i[0] * 0, x),
    ),
    "sum": (lambda x, i, w: x.sum((0, 2)), lambda x, i, w: x + x.sum((0, 1))),
    "amax": (lambda x, i, w: x.amax(0), lambda x, i, w: x - x.mean()),
    "max": (lambda x, i, w: x.max(-1).indices, lambda x, i, w: x - x.max(1, keepdim=True).values),
    "two_operand_max": (
        lambda x, i, w: torch.max(x, w[0]),
        lambda x, i, w: torch.max(x, x.flip(1)),
    ),
    "var": (lambda x, i, w: x.var(-1, False), lambda x, i, w: x * x.std(1, keepdim=True)),
    "norm": (
        lambda x, i, w: x.norm(dim=-1),
        lambda x, i, w: x / torch.linalg.norm(x, dim=1)[:, None],
    ),
    "logsumexp": (
        lambda x, i, w: x.logsumexp(-1),
        lambda x, i, w: x - x.logsumexp(1, keepdim=True),
    ),
    "argmax": (lambda x, i, w: x.argmax(-1), lambda x, i, w: x + x.argmax(1, keepdim=True)),
    "any": (lambda x, i, w: (x > 0).any(-1), lambda x, i, w: x * (x > 1).any(1, keepdim=True)),
    "softmax": (lambda x, i, w: F.softmax(x, dim=-1), lambda x, i, w: x.softmax(dim=1)),
    "cumsum": (lambda x, i, w: x.cumsum(-1), lambda x, i, w: torch.cumsum(x, dim=1)),
    "sort": (lambda x, i, w: x.sort(-1, descending=True)[1], lambda x, i, w: x.sort(1)[0]),
    "sort_rows": (lambda x, i, w: x[0].argsort(), lambda x, i, w: x[0, :, 0].sort()[0]),
    "topk": (lambda x, i, w: x.topk(3, -1)[0], lambda x, i, w: x * x.topk(1, 1)[0]),
    "roll": (lambda x, i, w: x.roll((1, 2), (0, 2)), lambda x, i, w: x.roll(1)),
    "flip": (lambda x, i, w: x.flip(0, 2), lambda x, i, w: x.flip((0, 1))),
    "fft": (lambda x, i, w: torch.fft.rfft(x).abs(), lambda x, i, w: torch.fft.fft(x, dim=1).real),
    "normalize": (lambda x, i, w: F.normalize(x, dim=-1), lambda x, i, w: F.normalize(x)),
    "cosine": (
        lambda x, i, w: F.cosine_similarity(x, w[0], dim=-1),
        lambda x, i, w: x + F.cosine_similarity(x, x.roll(1, 1), dim=1)[:, None],
    ),
    "layer_norm": (
        lambda x, i, w: F.layer_norm(x, (12,), w[0]),
        lambda x, i, w: F.layer_norm(x.mT, x.mT.shape[-1:]),
    ),
    "rms_norm": (lambda x, i, w: F.rms_norm(x, (12,)), lambda x, i, w: F.rms_norm(x, x.shape[1:])),
    "group_norm": (lambda x, i, w: F.group_norm(x[0], 4), lambda x, i, w: F.group_norm(x.mT, 4)),
    "linear": (
        lambda x, i, w: F.linear(x, w, w[0]),
        lambda x, i, w: F.linear(x, x[0]).softmax(-1) @ x,
    ),
    "matmul_left": (lambda x, i, w: (w @ x.mT).mT, lambda x, i, w: x @ (x.mT @ x)),
    "matmul_vector": (lambda x, i, w: x @ w[0], lambda x, i, w: x + (x.mT @ x[0, :, 0])),
    "matmul_heads": (
        lambda x, i, w: x.view(1, -1, 3, 4) @ x.view(1, -1, 3, 4).mT,
        lambda x, i, w: (
            (x.view(1, -1, 3, 4).transpose(1, 2) @ x.view(1, -1, 3, 4).permute(0, 2, 3, 1))
            .sum(-1)
            .mT
        ),
    ),
    "bmm": (
        lambda x, i, w: torch.bmm(x[0, :, None], w[i[0]][:, :, None] * w[0]),
        lambda x, i, w: torch.bmm(x, torch.bmm(x.mT, x)),
    ),
    "addmm": (
        lambda x, i, w: torch.addmm(w[0], x[0], w),
        lambda x, i, w: torch.addmm(x[0], x[0], x[0].T @ x[0]),
    ),
    "einsum": (
        lambda x, i, w: torch.einsum("bth,hd->btd", x, w),
        lambda x, i, w: torch.einsum("bth,bsh,bsd->btd", x, x, x),
    ),
    "einsum_of_each": (
        lambda x, i, w: torch.einsum("...h,...d->...hd", x, x),
        lambda x, i, w: x + torch.einsum("bth->bh", x)[:, None],
    ),
    "outer": (
        lambda x, i, w: x[..., None] * x[..., None, :],
        lambda x, i, w: torch.outer(x[0, :, 0], x[0, :, 1]).softmax(-1),
    ),
    "conv": (
        lambda x, i, w: F.conv1d(x.mT, w[..., None]),
        lambda x, i, w: F.conv1d(x.mT, w[..., None].repeat(1, 1, 3), padding=1),
    ),
    "conv_in_each": (
        lambda x, i, w: F.conv1d(x[0][:, None], w[:3, None, :3]),
        lambda x, i, w: F.conv1d(x.mT, w[:, None, :3], padding=2, groups=12)[..., :-2],
    ),
    "resample": (
        lambda x, i, w: F.interpolate(x, scale_factor=2.0),
        lambda x, i, w: F.interpolate(x.mT, scale_factor=2.0),
    ),
    "batch_norm": (
        lambda x, i, w: F.batch_norm(x.mT, w[0].detach(), w[1].detach().exp()).mT,
        lambda x, i, w: F.batch_norm(x.mT, None, None, training=True).mT,
    ),
    "instance_norm": (
        lambda x, i, w: F.instance_norm(x.transpose(0, 1).unflatten(-1, (3, 4))),
        lambda x, i, w: F.instance_norm(x.mT),
    ),
    "prelu": (lambda x, i, w: F.prelu(x, w[0, :1]), lambda x, i, w: F.prelu(x, x[0, 0, :1])),
    "pool": (lambda x, i, w: F.avg_pool1d(x, 3, 3), lambda x, i, w: F.avg_pool1d(x.mT, 3, 1, 1)),
    "dividing": (lambda x, i, w: x / x.shape[2], lambda x, i, w: x / x.shape[1]),
    "counting": (
        lambda x, i, w: x + torch.arange(12),
        lambda x, i, w: x + torch.arange(x.shape[1])[:, None],
    ),
    "sorting_back": (
        lambda x, i, w: _sorted_and_back(x[0], i[0], lambda rows: rows * 2),
        lambda x, i, w: _sorted_and_back(x[0], i[0], lambda rows: rows.cumsum(0)),
    ),
    "sorting_back_by_argsort": (
        lambda x, i, w: _argsorted_and_back(x[0], i[0]),
        lambda x, i, w: x[0][i[0].argsort()],
    ),
    "sorting_twice": (
        lambda x, i, w: _argsorted_and_back(x[0], 11 - i[0]),
        lambda x, i, w: _sorted_twice(x[0], i[0]),
    ),
    "adding_back": (
        lambda x, i, w: _added_back(x[0], i[0]),
        lambda x, i, w: (x[0] * 0).index_add(0, i[0].argsort(), x[0]),
    ),
    "several_rows_each": (
        lambda x, i, w: _several_and_back(x[0], x[0].topk(2, -1)[1]),
        lambda x, i, w: x[0][x[0].topk(2, -1)[1].flatten().argsort() // 4],
    ),
}


def _write(x: Tensor, index: object, value: Tensor) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


def _add_to(x: Tensor, index: object, value: float) -> Tensor:
    x[index] += value
    return x


def _sorted_and_back(x: Tensor, keys: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    keys, order = keys.sort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return change(x[order] + keys[:, None])[inverse]


def _argsorted_and_back(x: Tensor, keys: Tensor) -> Tensor:
    order = keys.argsort()
    return x[order].exp()[order.argsort()]


def _sorted_twice(x: Tensor, keys: Tensor) -> Tensor:
    order = keys.argsort()
    return x[order][order]


def _added_back(x: Tensor, keys: Tensor) -> Tensor:
    order = keys.argsort()
    out = torch.zeros_like(x)
    return out.index_add_(0, order // 1, x[order])


def _several_and_back(x: Tensor, keys: Tensor) -> Tensor:
    order = keys.flatten().argsort()
    rows = x[order // 2] * keys.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, order // 2, rows)
