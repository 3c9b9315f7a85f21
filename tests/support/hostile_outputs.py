"""Hostile outputs of models, in pairs: what becomes of the logits, or comes beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from families import VOCAB
from probe import WIDTH, Given, Pair, Probe
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput


def _loss(m: Probe, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    logits = m.head(x)
    return {"loss": F.cross_entropy(logits[0, :-1], ids[0, 1:]), "logits": logits}


def _with(logits: Tensor, made: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    return logits, made(logits)


def _by_cache(t: Given, x: Tensor) -> Tensor:
    """A layer without parameters: gradients of low precision add up in another order in rows."""
    return F.linear(x, t.m.cache[:WIDTH])


def _padded_away(logits: Tensor) -> Tensor:
    logits[..., :3] = -1e4
    return logits


def _scaled_twice(x: Tensor, t: Given) -> Tensor:
    logits = t.m.head(x)
    x.mul_(2.0)
    return logits


def _without_gradient(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x)


def _in_low_precision(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x)


HOSTILE_OUTPUTS = {
    "second_head_on_later_tokens": Pair(
        "second vocabulary projection",
        lambda x, t: (t.m.head(x), t.m.next_head(x.roll(-1, 1))),
        lambda x, t: (t.m.head(x), x),
        last=True,
    ),
    "loss_inside": Pair(
        "cross_entropy",
        lambda x, t: CausalLMOutput(**_loss(t.m, x, t.ids)),
        lambda x, t: CausalLMOutput(logits=t.m.head(x)),
        last=True,
    ),
    "mean_as_output": Pair(
        "mean",
        lambda x, t: (t.m.head(x), x.mean()),
        lambda x, t: (t.m.head(x), x.mean(-1)),
        last=True,
    ),
    "likelihood_as_output": Pair(
        "sum",
        lambda x, t: _with(t.m.head(x), lambda logits: logits.logsumexp(-1).sum()),
        lambda x, t: _with(t.m.head(x), lambda logits: logits.argmax(-1)),
        last=True,
    ),
    "logits_centred_over_tokens": Pair(
        "mean",
        lambda x, t: t.m.head(x) - t.m.head(x).mean(1, True),
        lambda x, t: t.m.head(x) - 1.5,
        last=True,
    ),
    "logits_of_the_last_token": Pair(
        "getitem",
        lambda x, t: t.m.head(x) + t.m.head(x[:, -1:]),
        lambda x, t: t.m.head(x) + t.m.head(x[:, :]),
        last=True,
    ),
    "logits_changed_in_place": Pair(
        "setitem",
        lambda x, t: _padded_away(t.m.head(x)),
        lambda x, t: t.m.head(x).masked_fill(torch.arange(VOCAB) < 3, -1e4),
        last=True,
    ),
    "hidden_states_changed_after_the_head": Pair(
        "mul",
        _scaled_twice,
        lambda x, t: t.m.head(x.mul_(2.0)),
        last=True,
    ),
    "head_without_gradient": Pair(
        "no_grad",
        lambda x, t: _without_gradient(t.m.head, x),
        lambda x, t: t.m.head(x + _without_gradient(t.m.linear, x)),
        last=True,
    ),
    "head_in_low_precision": Pair(
        "autocast",
        lambda x, t: _in_low_precision(t.m.head, x),
        lambda x, t: t.m.head(x + _in_low_precision(partial(_by_cache, t), x.detach())),
        last=True,
    ),
    "logits_scaled_by_length": Pair(
        "mul",
        lambda x, t: t.m.head(x) * (1.0 / x.shape[1]),
        lambda x, t: t.m.head(x).mul(1.0 / x.shape[2]).add(t.m.count).clamp(-9, 9),
        last=True,
    ),
    "softmax_over_the_vocabulary": Pair(
        "softmax",
        lambda x, t: t.m.head(x) * t.m.head(x).softmax(-1),
        lambda x, t: t.m.head(x) * t.m.next_head(x).sigmoid(),
        last=True,
    ),
    "log_softmax_after_the_head": Pair(
        "log_softmax",
        lambda x, t: t.m.head(x).log_softmax(-1),
        lambda x, t: torch.tanh(t.m.head(x) / 7.0) * 7.0,
        last=True,
    ),
}
