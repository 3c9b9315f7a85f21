"""Hostile mixtures of experts, in pairs: dispatches that let tokens see each other, or don't."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from probe import WIDTH, Pair, Probe
from torch import Tensor
from transformers.integrations import moe  # noqa: F401  (registers the op)

grouped_mm = torch.ops.transformers.grouped_mm_fallback


def _to_all_experts(m: Probe, x: Tensor, *, capacity: int | None) -> Tensor:
    """Top-1 experts, all run and one kept; with a capacity, the first tokens of each win."""
    chosen = F.one_hot(m.router(x).argmax(-1), 4).to(x.dtype)
    if capacity is not None:
        chosen = chosen * (chosen.cumsum(1) <= capacity)
    return torch.einsum("bte,btd,edf->btf", chosen, x, m.experts)


def _to_experts(
    m: Probe, x: Tensor, *, bins: int = 4, back: bool = True, counted: Tensor | None = None
) -> Tensor:
    """Top-2 experts by sort and grouped products, as transformers dispatches them."""
    scores = m.router(x[0])
    keys, order = torch.sort(scores.topk(2, -1).indices.reshape(-1))
    if counted is not None:
        keys = counted.topk(2, -1).indices.reshape(-1)
    ends = torch.histc(keys.float(), bins=bins, min=0, max=bins - 1).cumsum(0, dtype=torch.int32)
    rows = grouped_mm(x[0][order // 2], m.experts[:bins], ends)
    if back:
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        rows = rows[inverse]
    return rows.view(1, x.shape[1], 2, WIDTH).sum(2)


HOSTILE_EXPERTS = {
    "experts_left_in_sorted_order": Pair(
        "sort",
        lambda x, t: _to_experts(t.m, x, back=False),
        lambda x, t: _to_experts(t.m, x),
    ),
    "experts_counted_in_too_few_bins": Pair(
        "histc",
        lambda x, t: _to_experts(t.m, x, bins=3),
        lambda x, t: _to_experts(t.m, x.flip(-1)),
    ),
    "experts_of_other_rows": Pair(
        "histc",
        lambda x, t: _to_experts(t.m, x, counted=t.m.router(-x[0])),
        lambda x, t: _to_experts(t.m, -x),
    ),
    "expert_capacity": Pair(
        "cumsum",
        lambda x, t: _to_all_experts(t.m, x, capacity=2),
        lambda x, t: _to_all_experts(t.m, x, capacity=None),
    ),
    "experts_choose_tokens": Pair(
        "topk",
        lambda x, t: x * (t.m.router(x) >= t.m.router(x).topk(1, 1).values).sum(-1, True),
        lambda x, t: x * t.m.router(x).topk(1, -1).values,
    ),
}
