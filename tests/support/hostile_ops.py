"""Hostile ops, in pairs: each a leak between tokens, and the nearest op that is none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from probe import WIDTH, Pair
from torch import Tensor


class OwnRoot(torch.autograd.Function):
    """A square root whose gradient is bounded."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / torch.sqrt(torch.clip(4 * x, min=1e-6))


class LeaksForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.flip(1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


class LeaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.flip(1)


@torch.library.custom_op("hostile::sqrt", mutates_args=())
def not_torchs_sqrt(x: Tensor) -> Tensor:
    """No square root: an op of another library, by the name of one of torch's."""
    return x.flip(1)


@not_torchs_sqrt.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class CallsAnotherLibrary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return torch.ops.hostile.sqrt(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


OWN_FUNCTIONS = {
    "own_function_calls_another_library": Pair(
        "hostile.sqrt",
        lambda x, t: CallsAnotherLibrary.apply(x),
        lambda x, t: OwnRoot.apply(x * x + 2),
    ),
    "own_function_leaks_forward": Pair(
        "runs flip inside",
        lambda x, t: LeaksForward.apply(x),
        lambda x, t: OwnRoot.apply(x * x + 1),
    ),
    "own_function_leaks_backward": Pair(
        "runs flip inside",
        lambda x, t: LeaksBackward.apply(x),
        lambda x, t: OwnRoot.apply(x * x + t.m.linear(x).sigmoid()),
    ),
}
REDUCTIONS = {
    "mean_over_tokens": Pair(
        "mean", lambda x, t: x - x.mean(1, True), lambda x, t: x - x.mean(-1, True)
    ),
    "variance_over_tokens": Pair(
        "var",
        lambda x, t: x * x.var(1, keepdim=True),
        lambda x, t: x * x.var(-1, keepdim=True),
    ),
    "max_over_tokens": Pair(
        "amax",
        lambda x, t: x - x.amax(1, keepdim=True),
        lambda x, t: x - x.amax(-1, keepdim=True),
    ),
    "any_over_tokens": Pair(
        "any",
        lambda x, t: x * (t.ids == 5).any(),
        lambda x, t: x * (t.ids == 5).unsqueeze(-1),
    ),
    "cumulative_sum": Pair("cumsum", lambda x, t: x.cumsum(1), lambda x, t: x.cumsum(-1)),
    "cumulative_softmax": Pair(
        "logcumsumexp",
        lambda x, t: (x - x.logcumsumexp(1)).exp(),
        lambda x, t: (x - x.logcumsumexp(-1)).exp(),
    ),
    "counting_separators": Pair(
        "cumsum",
        lambda x, t: t.m.table((t.ids == 5).cumsum(1)),
        lambda x, t: t.m.table((t.ids == 5).long()),
    ),
    "softmax_over_tokens": Pair("softmax", lambda x, t: x.softmax(1), lambda x, t: x.softmax(-1)),
    "normalised_over_tokens": Pair(
        "normalize",
        lambda x, t: F.normalize(x, dim=1),
        lambda x, t: F.normalize(x, dim=-1),
    ),
    "squeeze_and_excite": Pair(
        "mean",
        lambda x, t: x * t.m.linear(x.mean(1, keepdim=True)).sigmoid(),
        lambda x, t: x * t.m.linear(x).sigmoid(),
    ),
    "batch_norm_in_training": Pair(
        "batch_norm",
        lambda x, t: t.m.batch_norm(x.mT).mT,
        lambda x, t: t.m.frozen_norm(x.mT).mT,
    ),
    "layer_norm_over_tokens": Pair(
        "layer_norm",
        lambda x, t: F.layer_norm(x.mT, (x.shape[1],)).mT,
        lambda x, t: F.layer_norm(x, (WIDTH,)),
    ),
    "group_norm_over_tokens": Pair(
        "group_norm",
        lambda x, t: F.group_norm(x.mT, 3).mT,
        lambda x, t: F.group_norm(x[0], 3)[None],
    ),
    "instance_norm": Pair(
        "instance_norm",
        lambda x, t: F.instance_norm(x.mT).mT,
        lambda x, t: F.instance_norm(x.transpose(0, 1)).transpose(0, 1),
    ),
    "spectrum_over_tokens": Pair(
        "fft_fft",
        lambda x, t: torch.fft.fft(x, dim=1).real,
        lambda x, t: torch.fft.fft(x, dim=-1).real,
    ),
}

MOVES = {
    "roll": Pair("roll", lambda x, t: x.roll(1, 1), lambda x, t: x.roll(1, -1)),
    "flip": Pair("flip", lambda x, t: x.flip(1), lambda x, t: x.flip(-1)),
    "shift_by_slice_and_cat": Pair(
        "getitem",
        lambda x, t: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
        lambda x, t: torch.cat([torch.zeros_like(x[..., :1]), x[..., :-1]], -1),
    ),
    "shift_by_padding": Pair(
        "pad",
        lambda x, t: F.pad(x, (0, 0, 1, 0))[:, :-1],
        lambda x, t: F.pad(x, (1, 0))[..., :-1],
    ),
    "shift_by_negative_padding": Pair(
        "pad",
        lambda x, t: F.pad(x, (0, 0, 1, -1)),
        lambda x, t: F.pad(x, (1, -1, 0, 0)),
    ),
    "first_token": Pair("getitem", lambda x, t: x[:, :1], lambda x, t: x[..., :1]),
    "last_token": Pair("getitem", lambda x, t: x[:, -1], lambda x, t: x[..., -1:]),
    "reshape_for_transpose": Pair(
        "reshape",
        lambda x, t: x.reshape(1, WIDTH, -1).mT,
        lambda x, t: x.reshape(1, -1, 2, WIDTH // 2).flatten(2),
    ),
    "interleaving_by_cat": Pair(
        "cat",
        lambda x, t: torch.cat([x, -x], 1).view(1, -1, 2 * WIDTH)[..., :WIDTH],
        lambda x, t: torch.cat([x, -x], -1).view(1, -1, 2 * WIDTH)[..., :WIDTH],
    ),
    "pairs_of_tokens": Pair(
        "unfold",
        lambda x, t: x.unfold(1, 2, 1).sum((1, 3)),
        lambda x, t: x.unfold(2, 2, 2).sum(-1).repeat(1, 1, 2),
    ),
    "sort_over_tokens": Pair(
        "sort", lambda x, t: x.sort(1).values, lambda x, t: x.sort(-1).values
    ),
    "sort_of_scores": Pair(
        "sort",
        lambda x, t: x * t.m.linear(x)[0, :, 0].sort().values[None, :, None],
        lambda x, t: x * t.m.linear(x)[0, :, 0][None, :, None],
    ),
    "gather_by_token": Pair(
        "gather",
        lambda x, t: x.gather(1, t.ids[..., None].expand_as(x) % 2),
        lambda x, t: x.gather(-1, t.ids[..., None].expand_as(x) % WIDTH),
    ),
    "index_by_token": Pair(
        "getitem",
        lambda x, t: x[:, (t.at[0] - 1).clamp(0)],
        lambda x, t: t.m.table.weight[(t.at[0] - 1).clamp(0)][None],
    ),
    "scatter_into_tokens": Pair(
        "scatter",
        lambda x, t: torch.zeros_like(x).scatter(1, t.at[..., None].expand_as(x), x),
        lambda x, t: torch.zeros_like(x).scatter(-1, t.ids[..., None].expand_as(x) % WIDTH, 1.0),
    ),
    "elements_by_mask": Pair(
        "getitem",
        lambda x, t: x * x[x > 0].sum(),
        lambda x, t: x.masked_fill(x > 0, 0.0),
    ),
}

HOSTILE_OPS = OWN_FUNCTIONS | REDUCTIONS | MOVES
