"""Bytes that context parallel sends, a layer and rank, beside the formula and an all-gather.

    torchrun --standalone --nproc-per-node 2 benchmarks/cp_traffic.py

Counts are exact, so they hold on any machine; the layers are those of a 1B-class hybrid in fp32.
Shapes: T tokens, R ranks, n tokens of a rank, F rows it fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from forests import FORESTS
from torch import Tensor

from prefix_rewrite.distributed.partition import partition_tokens
from prefix_rewrite.distributed.rank_attention import cp_tree_attention, plan_attention_share
from prefix_rewrite.distributed.rank_conv import cp_tree_conv, plan_conv_share
from prefix_rewrite.distributed.rank_plan import plan_collectives
from prefix_rewrite.distributed.rank_scans import cp_tree_ssd, plan_ssd_share
from prefix_rewrite.distributed.share import Share
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import SegmentTable

KEY_HEADS, HEAD_DIM, CHANNELS = 2, 64, 1152
HEADS, WIDTH, GROUPS, STATE = 16, 64, 1, 64
BYTES = 4


class Count:
    """Bytes that leave this rank in `all_to_all_single`."""

    def __init__(self) -> None:
        self.sent = 0

    def __call__(
        self,
        received: Tensor,
        send: Tensor,
        receive_counts: list[int],
        send_counts: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        others = sum(send_counts) - send_counts[dist.get_rank(group)]
        self.sent += others * send.element_size() * send.shape[1:].numel()
        _all_to_all(received, send, receive_counts, send_counts, group=group)


_all_to_all = dist.all_to_all_single


def measure(layer: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Run a layer forward and backward; return the bytes sent in each."""
    leaves = [tensor.requires_grad_() for tensor in inputs]
    count = Count()
    with patch.object(dist, "all_to_all_single", count):
        out = layer(*leaves)
        forward, count.sent = count.sent, 0
        out.sum().backward()
    return forward, count.sent


def layers(share: Share, group: str) -> dict[str, tuple[int, int]]:
    """Measure one layer of each kind on this rank's share."""
    fields = plan_collectives(share) | plan_attention_share(share)
    fields |= plan_conv_share(share) | plan_ssd_share(share)
    shapes = (share.order, share.ancestors.place, share.near.place)
    plan = (*pack_plan(fields, "cpu"), *map(torch.from_numpy, shapes), group)
    rows = share.num_rows

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cp_tree_attention(q, k, v, 0.1, *plan)

    def conv(x: Tensor, weight: Tensor) -> Tensor:
        return cp_tree_conv(x.transpose(1, 2), weight, None, True, *plan)

    def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        settings = (None, None, None, True, 0.0, float("inf"))
        return cp_tree_ssd(x, dt, -A.exp(), B, C, *settings, *plan)

    key_shape = (1, KEY_HEADS, rows, HEAD_DIM)
    state_shape = (1, rows, GROUPS, STATE)
    return {
        "attention": measure(attention, [torch.randn(key_shape) for _ in range(3)]),
        "conv": measure(conv, [torch.randn(1, rows, CHANNELS), torch.randn(CHANNELS, 4)]),
        "ssd": measure(
            ssd,
            [
                torch.randn(1, rows, HEADS, WIDTH),
                torch.randn(1, rows, HEADS),
                torch.randn(HEADS),
                torch.randn(state_shape),
                torch.randn(state_shape),
            ],
        ),
    }


def formulas(share: Share) -> dict[str, tuple[int, int]]:
    """What each layer must send; see docs/parallel.md."""
    key_bytes, conv_bytes = KEY_HEADS * 2 * HEAD_DIM * BYTES, CHANNELS * BYTES
    num_ranks, own, total = share.partition.num_ranks, len(share.tokens), len(share.order)
    heads = np.diff([HEADS * r // num_ranks for r in range(num_ranks + 1)])
    mine, others = int(heads[share.rank]), HEADS - int(heads[share.rank])
    there = own * (others * (WIDTH + 1) + (num_ranks - 1) * 2 * GROUPS * STATE)
    back = (total - own) * mine * WIDTH
    grad_back = (total - own) * (mine * (WIDTH + 1) + 2 * GROUPS * STATE)
    return {
        "attention": (
            len(share.ancestors.send_rows) * key_bytes,
            len(share.ancestors.tokens) * key_bytes,
        ),
        "conv": (len(share.near.send_rows) * conv_bytes, len(share.near.tokens) * conv_bytes),
        "ssd": ((there + back) * BYTES, (own * others * WIDTH + grad_back) * BYTES),
    }


def all_gather_bytes(share: Share) -> int:
    """Gathering K and V of all tokens instead: to each other rank, this rank's rows."""
    others = share.partition.num_ranks - 1
    return others * len(share.tokens) * KEY_HEADS * 2 * HEAD_DIM * BYTES


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(
            "| forest | layer | KiB forward | KiB backward | formula holds | all-gather of K, V |"
        )
        print("|---|---|---|---|---|---|")
    for name, make in FORESTS.items():
        segments: SegmentTable = make()
        share = Share(segments, partition_tokens(segments, size), rank)
        measured = layers(share, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        expected = formulas(share)
        assert measured == expected, f"{name}: measured {measured}, formula {expected}"
        for layer, (forward, backward) in measured.items():
            worst = torch.tensor([forward, backward, all_gather_bytes(share)])
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            a, b, gather = (f"{value / 1024:.0f}" for value in worst.tolist())
            if rank == 0:
                beside = gather if layer == "attention" else ""
                print(f"| {name} | {layer} | {a} | {b} | yes | {beside} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
