"""Time the recurrent tree ops against each call alone, forward + backward, in one run.

    python benchmarks/ops_mixers.py
    python benchmarks/ops_mixers.py --forests agent32 --ops "gated delta rule" --threads 1

Both sides run the same op: once on the forest, and once a call on that call's own path. The ratio
of tokens is what sharing can give. Variants take turns within a round; ratios are medians over
rounds, with their range.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator

import numpy as np
import torch
from forests import FORESTS
from measuring import keep_memory, ratios, spread, time_in_turn
from rich.console import Console
from rich.table import Table
from torch import Tensor

from prefix_rewrite.ops.tree_delta_rule import (
    plan_channel_delta_rule,
    plan_delta_rule,
    tree_delta_rule,
)
from prefix_rewrite.ops.tree_rglru import plan_rglru, tree_rglru
from prefix_rewrite.ops.tree_selective_scan import plan_selective_scan, tree_selective_scan
from prefix_rewrite.plan import Planner, pack_plan
from prefix_rewrite.segments import SegmentTable

Inputs = tuple[Tensor, ...]  # each [1, T, ...]
HEADS, WIDTH = 8, 64
CHANNELS, STATE = 256, 16


def draw_delta_rule(tokens: int, channels: int) -> Inputs:
    q, k, v = (torch.randn(1, tokens, HEADS, WIDTH) for _ in range(3))
    g = -0.1 * torch.rand(1, tokens, HEADS, channels).squeeze(-1)
    return q, k, v, g, torch.rand(1, tokens, HEADS)


def draw_scan(tokens: int) -> Inputs:
    widths = (CHANNELS, CHANNELS, STATE, STATE)
    return tuple(torch.randn(1, tokens, width) for width in widths)


def scan(u: Tensor, dt: Tensor, B: Tensor, C: Tensor, *plan: Tensor) -> Tensor:
    A = -torch.linspace(0.01, 1, CHANNELS * STATE).view(CHANNELS, STATE)
    u, dt, B, C = (x.transpose(1, 2) for x in (u, dt, B, C))
    return tree_selective_scan(u, dt, A, B, C, None, None, None, *plan, True)


def delta_rule(*arguments: Tensor) -> Tensor:
    return tree_delta_rule(*arguments, True)


OPS: dict[str, tuple[Callable[[int], Inputs], Callable[..., Tensor], Planner]] = {
    "selective scan": (draw_scan, scan, plan_selective_scan),
    "gated delta rule": (lambda T: draw_delta_rule(T, 1), delta_rule, plan_delta_rule),
    "Kimi delta attention": (
        lambda T: draw_delta_rule(T, WIDTH),
        delta_rule,
        plan_channel_delta_rule,
    ),
    "RG-LRU": (
        lambda T: (torch.randn(1, T, CHANNELS), torch.rand(1, T, CHANNELS)),
        tree_rglru,
        plan_rglru,
    ),
}


def paths(segments: SegmentTable) -> Iterator[np.ndarray]:
    """The tokens of each leaf's call."""
    inner = set(segments.parent.tolist())
    for segment in range(segments.num_segments):
        if segment not in inner:
            depths = np.arange(segments.depth[segment] + segments.length[segment])
            yield segments.locate(np.full(len(depths), segment), depths)


def build(op: str, segments: SegmentTable) -> tuple[dict[str, Callable[[], None]], float]:
    """Return the two variants, and the ratio of their tokens."""
    draw, function, planner = OPS[op]
    inputs = draw(segments.num_tokens)

    def runs(table: SegmentTable, rows: Inputs) -> Callable[[], None]:
        leaves = [x.clone().requires_grad_() for x in rows]
        plan = pack_plan(planner(table), "cpu")

        def run() -> None:
            out = function(*leaves, *plan)
            torch.autograd.grad(out, leaves, torch.ones_like(out))

        return run

    calls = [torch.from_numpy(path) for path in paths(segments)]
    alone = [
        runs(SegmentTable.from_parents([-1], [len(call)]), tuple(x[:, call] for x in inputs))
        for call in calls
    ]

    def run_alone() -> None:
        for run in alone:
            run()

    variants = {"tree": runs(segments, inputs), "alone": run_alone}
    return variants, sum(map(len, calls)) / segments.num_tokens


def main() -> None:
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--forests", nargs="+", default=["star2048x8x256", "agent32", "tiny1000x4"]
    )
    parser.add_argument("--ops", nargs="+", default=list(OPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table(title=f"recurrent ops, forward + backward, {arguments.threads} threads")
    for column in ("op", "forest", "tokens", "tree ms", "alone / tree"):
        table.add_column(column, justify="right")
    for op in arguments.ops:
        for forest in arguments.forests:
            torch.manual_seed(0)
            variants, tokens = build(op, FORESTS[forest]())
            seconds = time_in_turn(variants, arguments.rounds)
            milliseconds = f"{1e3 * statistics.median(seconds['tree']):.0f}"
            ratio = spread(ratios(seconds["alone"], seconds["tree"]))
            table.add_row(op, forest, f"{tokens:.2f}", milliseconds, ratio)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
