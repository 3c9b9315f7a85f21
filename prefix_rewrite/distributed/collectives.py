"""Differentiable collectives for a rank's rows; their lists come from the packed plan.

Each is an op whose backward is another one, so every rank meets the same collectives in the same
order, whatever it owns. A group is given by its name, which torch's own registry resolves: graphs
then hold constants only.

Shapes: T physical tokens, R ranks, L rows of this rank (its n tokens and filler), F rows fetched,
C columns, W columns of this rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from prefix_rewrite.plan import PlanView, register_field

KINDS = ("ancestors", "near")  # what a fetch brings
COUNTS = register_field("cp_counts", "host")
SEND_ROWS = {kind: register_field(f"cp_{kind}_send_rows", "device") for kind in KINDS}
SEND_COUNTS = {kind: register_field(f"cp_{kind}_send_counts", "host") for kind in KINDS}
RECEIVE_COUNTS = {kind: register_field(f"cp_{kind}_receive_counts", "host") for kind in KINDS}


def process_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]


def group_rank(group: str) -> int:
    return dist.get_rank(process_group(group))


def group_size(group: str) -> int:
    return dist.get_world_size(process_group(group))


def exchange(
    send: Tensor, send_counts: list[int], receive_counts: list[int], group: str
) -> Tensor:
    """Send the first dimension's parts to the ranks, one each, and return those received."""
    received = send.new_empty(sum(receive_counts), *send.shape[1:])
    dist.all_to_all_single(
        received, send.contiguous(), receive_counts, send_counts, group=process_group(group)
    )
    return received


@torch.library.custom_op("prefix_rewrite::fetch_rows", mutates_args=())
def fetch_rows(
    rows: Tensor, place: Tensor, host_plan: Tensor, device_plan: Tensor, kind: str, group: str
) -> Tensor:
    """Fetch rows of other ranks' tokens.

    Args:
        rows: [L, C] this rank's.
        place: [F] where each fetched token is in the buffer received, filler one past its end.
        kind: the list: 'ancestors' or 'near'.

    Returns:
        [F, C] rows in order of their tokens; filler is 0.
    """
    plan = PlanView(host_plan, device_plan)
    send = rows.index_select(0, plan[SEND_ROWS[kind]])
    counts = plan[SEND_COUNTS[kind]].tolist(), plan[RECEIVE_COUNTS[kind]].tolist()
    received = exchange(send, *counts, group)
    filler = received.new_zeros(1, *received.shape[1:])
    return torch.cat([received, filler]).index_select(0, place)


@fetch_rows.register_fake
def _(
    rows: Tensor, place: Tensor, host_plan: Tensor, device_plan: Tensor, kind: str, group: str
) -> Tensor:
    return rows.new_empty(place.shape[0], rows.shape[1])


@torch.library.custom_op("prefix_rewrite::return_rows", mutates_args=())
def return_rows(
    grad: Tensor,
    place: Tensor,
    host_plan: Tensor,
    device_plan: Tensor,
    num_rows: int,
    kind: str,
    group: str,
) -> Tensor:
    """Adjoint of `fetch_rows`: each owner adds up what comes back for its rows, [L, C]."""
    plan = PlanView(host_plan, device_plan)
    send_counts = plan[SEND_COUNTS[kind]].tolist()
    receive_counts = plan[RECEIVE_COUNTS[kind]].tolist()
    fetched = grad.new_empty(sum(receive_counts) + 1, grad.shape[1])
    fetched.index_copy_(0, place, grad)
    returned = exchange(fetched[:-1], receive_counts, send_counts, group)
    out = grad.new_zeros(num_rows, grad.shape[1])
    return out.index_add_(0, plan[SEND_ROWS[kind]], returned)


@return_rows.register_fake
def _(
    grad: Tensor,
    place: Tensor,
    host_plan: Tensor,
    device_plan: Tensor,
    num_rows: int,
    kind: str,
    group: str,
) -> Tensor:
    return grad.new_empty(num_rows, grad.shape[1])


def _fetch_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, *plan, ctx.kind, ctx.group = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(*plan)


def _fetch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = torch.ops.prefix_rewrite.return_rows(
        grad, *ctx.saved_tensors, ctx.num_rows, ctx.kind, ctx.group
    )
    return back, None, None, None, None, None


fetch_rows.register_autograd(_fetch_backward, setup_context=_fetch_context)


def _ranges_of(ranges: Sequence[int], rank: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return a rank's column ranges out of the flat [R, ranges, 2] list."""
    width = len(ranges) // num_ranks
    own = ranges[rank * width : (rank + 1) * width]
    return list(zip(own[::2], own[1::2], strict=True))


def _widths(ranges: Sequence[int], num_ranks: int) -> list[int]:
    parts = (_ranges_of(ranges, rank, num_ranks) for rank in range(num_ranks))
    return [sum(end - first for first, end in part) for part in parts]


@torch.library.custom_op("prefix_rewrite::to_columns", mutates_args=())
def to_columns(
    rows: Tensor, order: Tensor, host_plan: Tensor, ranges: Sequence[int], group: str
) -> Tensor:
    """Turn this rank's rows of all columns into all tokens' rows of this rank's columns.

    Args:
        rows: [L, C]; filler rows stay behind.
        order: [T] where each token is in the ranks' tokens, one rank after the other.
        ranges: bounds of column ranges, flat [R, ranges, 2]; ranks may share columns.

    Returns:
        [T, W] in depth-first order, this rank's ranges side by side.
    """
    counts = PlanView(host_plan, host_plan)[COUNTS].tolist()
    rank = group_rank(group)
    own = rows[: counts[rank]]
    parts = [
        torch.cat([own[:, first:end] for first, end in _ranges_of(ranges, r, len(counts))], 1)
        for r in range(len(counts))
    ]
    width = parts[rank].shape[1]
    send = torch.cat([part.reshape(-1) for part in parts])
    received = exchange(
        send, [part.numel() for part in parts], [count * width for count in counts], group
    )
    return received.view(-1, width).index_select(0, order)


@to_columns.register_fake
def _(rows: Tensor, order: Tensor, host_plan: Tensor, ranges: Sequence[int], group: str) -> Tensor:
    width = _widths(ranges, group_size(group))[group_rank(group)]
    return rows.new_empty(order.shape[0], width)


@torch.library.custom_op("prefix_rewrite::to_rows", mutates_args=())
def to_rows(
    columns: Tensor,
    order: Tensor,
    host_plan: Tensor,
    num_rows: int,
    num_columns: int,
    ranges: Sequence[int],
    group: str,
) -> Tensor:
    """Adjoint of `to_columns`: [T, W] to [L, C]; columns that ranks share are added up.

    Where no two ranks share a column it is also the inverse; filler rows are 0.
    """
    counts = PlanView(host_plan, host_plan)[COUNTS].tolist()
    count = counts[group_rank(group)]
    width = columns.shape[1]
    send = torch.empty_like(columns).index_copy_(0, order, columns)
    widths = _widths(ranges, len(counts))
    received = exchange(
        send.view(-1), [n * width for n in counts], [count * w for w in widths], group
    )
    out = columns.new_zeros(num_rows, num_columns)
    for rank, part in enumerate(received.split([count * w for w in widths])):
        bounds = _ranges_of(ranges, rank, len(counts))
        values = part.view(count, widths[rank]).split([end - first for first, end in bounds], 1)
        for (first, end), value in zip(bounds, values, strict=True):
            out[:count, first:end] += value
    return out


@to_rows.register_fake
def _(
    columns: Tensor,
    order: Tensor,
    host_plan: Tensor,
    num_rows: int,
    num_columns: int,
    ranges: Sequence[int],
    group: str,
) -> Tensor:
    return columns.new_empty(num_rows, num_columns)


def _to_columns_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, order, host_plan, ctx.ranges, ctx.group = inputs
    ctx.shape = rows.shape
    ctx.save_for_backward(order, host_plan)


def _to_columns_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = torch.ops.prefix_rewrite.to_rows(
        grad.contiguous(), *ctx.saved_tensors, *ctx.shape, ctx.ranges, ctx.group
    )
    return back, None, None, None, None


def _to_rows_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, host_plan, _, _, ctx.ranges, ctx.group = inputs
    ctx.save_for_backward(order, host_plan)


def _to_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = torch.ops.prefix_rewrite.to_columns(grad, *ctx.saved_tensors, ctx.ranges, ctx.group)
    return back, None, None, None, None, None, None


to_columns.register_autograd(_to_columns_backward, setup_context=_to_columns_context)
to_rows.register_autograd(_to_rows_backward, setup_context=_to_rows_context)


@torch.library.custom_op("prefix_rewrite::sum_over_ranks", mutates_args=())
def sum_over_ranks(part: Tensor, group: str) -> Tensor:
    """Add up the ranks' parts of what every rank uses alike: the gradient is each part's own."""
    whole = part.clone()
    dist.all_reduce(whole, group=process_group(group))
    return whole


@sum_over_ranks.register_fake
def _(part: Tensor, group: str) -> Tensor:
    return torch.empty_like(part)


sum_over_ranks.register_autograd(lambda ctx, grad: (grad, None))


class GatherRows(torch.autograd.Function):
    """Concatenate all ranks' rows on every rank.

    Every rank computes the same loss from the same result, so its own rows' gradient is already
    whole: the backward takes them and sends nothing.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], group: str) -> Tensor:
        ctx.bounds = sum(counts[: group_rank(group)]), len(rows)
        send = rows.repeat(len(counts), *[1] * (rows.dim() - 1))
        return exchange(send, [len(rows)] * len(counts), counts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(0, *ctx.bounds), None, None
