"""Time the tree Mamba-2 scan and the tree conv, forward + backward, in one run.

    python benchmarks/ops_scan.py
    python benchmarks/ops_scan.py --forests agent32 --heads 32 --state 128 --rounds 9

- *forest*: the tree op.
- *alone*: every call by itself, through the same op.
- *model*: the longest call by itself, through the torch path of transformers' models, against the
  same call through the tree op.

The FLOP ratio counts the scan's matrix products as scheduled, without padding; the conv's is the
ratio of tokens. Variants take turns within a round; ratios are medians over rounds, with their
range. Memory is the peak above the inputs, each variant in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from forests import FORESTS
from measuring import keep_memory, peak_bytes, ratios, spread, time_in_turn
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers.models.bamba import modeling_bamba

from prefix_rewrite.ops.tree_conv import plan_conv, tree_conv
from prefix_rewrite.ops.tree_ssd import PLANNER, plan_ssd, tree_ssd
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import SegmentTable

Run = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """Heads, head width, groups and state width of the scan; channels and taps of the conv."""

    heads: int
    width: int
    groups: int
    state: int
    taps: int = 4

    @property
    def channels(self) -> int:
        return self.heads * self.width + 2 * self.groups * self.state

    def scan_inputs(self, T: int) -> list[Tensor]:
        """x, dt, A, B, C, D."""
        H, P, G, N = self.heads, self.width, self.groups, self.state
        return [
            torch.randn(1, T, H, P),
            torch.rand(1, T, H) / 10,
            -torch.linspace(1, 16, H),
            torch.randn(1, T, G, N),
            torch.randn(1, T, G, N),
            torch.ones(H),
        ]

    def conv_inputs(self, T: int) -> list[Tensor]:
        """x, weight, bias."""
        C = self.channels
        return [torch.randn(1, T, C), torch.randn(C, self.taps), torch.randn(C)]


def scan(leaves: list[Tensor], plan: tuple[Tensor, Tensor]) -> Tensor:
    return tree_ssd(*leaves, None, None, *plan, False, 0.0, math.inf)


def conv(leaves: list[Tensor], plan: tuple[Tensor, Tensor]) -> Tensor:
    x, weight, bias = leaves
    return tree_conv(x.transpose(1, 2), weight, bias, *plan, True).transpose(1, 2)


def model_scan(leaves: list[Tensor], plan: tuple[Tensor, Tensor]) -> Tensor:
    x, dt, A, B, C, D = leaves
    run = modeling_bamba.mamba2_chunk_scan.__wrapped__
    return run(x, dt, A, B, C, chunk_size=256, D=D)


def model_conv(leaves: list[Tensor], plan: tuple[Tensor, Tensor]) -> Tensor:
    x, weight, bias = leaves
    run = modeling_bamba.causal_conv1d_fn.__wrapped__
    return run(x.transpose(1, 2), weight, bias, "silu").transpose(1, 2)


def step(
    function: Callable[..., Tensor],
    inputs: Callable[[int], list[Tensor]],
    planner: Callable[[SegmentTable], Mapping[str, np.ndarray]],
    segments: SegmentTable,
) -> Run:
    """Return a forward and backward on inputs of its own, the plan included."""
    leaves = [x.requires_grad_() for x in inputs(segments.num_tokens)]
    grad = torch.randn_like(leaves[0])

    def run() -> None:
        plan = pack_plan(planner(segments), "cpu")
        torch.autograd.grad(function(leaves, plan), leaves, grad)

    return run


def call_lengths(segments: SegmentTable) -> list[int]:
    """Tokens of every root-to-leaf call."""
    inner = set(segments.parent.tolist())
    ends = (segments.depth + segments.length).tolist()
    return [end for segment, end in enumerate(ends) if segment not in inner]


def chain(length: int) -> SegmentTable:
    return SegmentTable.from_parents([-1], [length])


def build(op: str, way: str, name: str, shape: Shape, threads: int) -> Run:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    segments = FORESTS[name]()
    is_scan = op == "scan"
    inputs = shape.scan_inputs if is_scan else shape.conv_inputs
    planner = plan_ssd if is_scan else plan_conv
    run = functools.partial(step, scan if is_scan else conv, inputs, planner)
    lengths = call_lengths(segments)
    if way == "forest":
        return run(segments)
    if way == "longest":
        return run(chain(max(lengths)))
    if way == "model":
        return step(model_scan if is_scan else model_conv, inputs, planner, chain(max(lengths)))
    calls = {length: run(chain(length)) for length in set(lengths)}

    def run_calls() -> None:
        for length in lengths:
            calls[length]()

    return run_calls


def scan_products(segments: SegmentTable, shape: Shape) -> float:
    """Multiplications of the scan's products, forward + backward, without padding."""
    tree = PLANNER.read(*pack_plan(plan_ssd(segments), "cpu"))
    inside = shape.groups * shape.state + shape.heads * shape.width
    state = shape.heads * shape.state * shape.width
    total = 0.0
    for first, end, _, has_parents, state_row, _ in tree.groups:
        length = tree.length[first:end].double()
        carried = 3 * has_parents + 4 * (state_row >= 0)
        total += float(3 * (length * length).sum() * inside + carried * length.sum() * state)
    return total


def flop_ratio(op: str, segments: SegmentTable, shape: Shape) -> float:
    lengths = call_lengths(segments)
    if op == "conv":
        return sum(lengths) / segments.num_tokens
    alone = sum(scan_products(chain(length), shape) for length in lengths)
    return alone / scan_products(segments, shape)


def row(op: str, name: str, shape: Shape, arguments: argparse.Namespace) -> list[str]:
    segments, threads = FORESTS[name](), arguments.threads
    ways = ("forest", "alone", "longest", "model")
    runs = {way: build(op, way, name, shape, threads) for way in ways}
    seconds = time_in_turn(runs, arguments.rounds)
    megabytes = {way: peak_bytes(build, op, way, name, shape, threads) / 2**20 for way in ways}
    speedup = ratios(seconds["alone"], seconds["forest"])
    theory = flop_ratio(op, segments, shape)
    return [
        op,
        name,
        f"{sum(call_lengths(segments)) / segments.num_tokens:.2f}",
        f"{theory:.2f}",
        spread(speedup),
        f"{statistics.median(speedup) / theory:.2f}",
        f"{1e3 * statistics.median(seconds['forest']):.0f}",
        f"{megabytes['forest']:.0f}",
        f"{megabytes['alone']:.0f}",
        spread(ratios(seconds["model"], seconds["longest"])),
        f"{megabytes['longest']:.0f} / {megabytes['model']:.0f}",
    ]


COLUMNS = (
    "op", "forest", "token ratio", "FLOP ratio", "alone / forest", "share of FLOP ratio",
    "forest ms", "forest MB", "alone MB", "model / ours, longest call", "MB, ours / model",
)  # fmt: skip


def main() -> None:
    keep_memory()
    arguments = read_arguments()
    shape = Shape(arguments.heads, arguments.width, arguments.groups, arguments.state)
    title = f"scan and conv, forward + backward, fp32, {shape}, {arguments.threads} threads"
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    cells = [(op, name) for op in arguments.ops for name in arguments.forests]
    for op, name in track(cells, description="forests"):
        table.add_row(*row(op, name, shape, arguments))
    Console(width=190).print(table)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", default=["scan", "conv"], choices=["scan", "conv"])
    parser.add_argument("--forests", nargs="+", default=list(FORESTS), choices=list(FORESTS))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--state", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
