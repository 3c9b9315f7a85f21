"""Time tree attention against three other ways, forward + backward, in one run.

    python benchmarks/ops_attention.py
    python benchmarks/ops_attention.py --forests agent32 --heads 8 --key-heads 2 --rounds 9

- *forest*: the tree attention op.
- *alone*: every call by itself, through the same op and kernel.
- *dense*: one call under a T x T mask (built beforehand).
- *gather*: each segment's queries against their gathered ancestors, under a mask of their own.

FlexAttention is not among them: it has no backward on CPU. The theoretical ratio is that of the
attended pairs. Variants take turns within a round; ratios are medians over rounds, with their
range. Memory is the peak above the inputs, each variant in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from forests import FORESTS
from measuring import keep_memory, peak_bytes, ratios, spread, time_in_turn
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from prefix_rewrite.ops.tree_attention import plan_attention, tree_attention
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import SegmentTable

Leaves = tuple[Tensor, Tensor, Tensor]
Run = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """Heads, key heads and head dim."""

    heads: int
    key_heads: int
    dim: int

    def leaves(self, num_tokens: int) -> Leaves:
        q, k, v = (
            torch.randn(1, num_tokens, n, self.dim).transpose(1, 2).requires_grad_()
            for n in (self.heads, self.key_heads, self.key_heads)
        )
        return q, k, v

    def grad(self, num_tokens: int) -> Tensor:
        return torch.randn(1, num_tokens, self.heads, self.dim)

    @property
    def scale(self) -> float:
        return self.dim**-0.5


def forest(segments: SegmentTable, shape: Shape) -> Run:
    leaves, grad = shape.leaves(segments.num_tokens), shape.grad(segments.num_tokens)
    plan = pack_plan(plan_attention(segments), "cpu")

    def run() -> None:
        torch.autograd.grad(tree_attention(*leaves, *plan, shape.scale), leaves, grad)

    return run


def alone(segments: SegmentTable, shape: Shape) -> Run:
    lengths = [int(length) for length in call_lengths(segments)]
    calls = [forest(SegmentTable.from_parents([-1], [n]), shape) for n in lengths]

    def run() -> None:
        for call in calls:
            call()

    return run


def dense(segments: SegmentTable, shape: Shape) -> Run:
    q, k, v = leaves = shape.leaves(segments.num_tokens)
    grad = shape.grad(segments.num_tokens)
    token = torch.arange(segments.num_tokens)
    mask = (token <= token[:, None]) & (token[:, None] < torch.tensor(segments.token_subtree_end))

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=shape.scale, enable_gqa=True)
        torch.autograd.grad(out.transpose(1, 2), leaves, grad)

    return run


def gather(segments: SegmentTable, shape: Shape) -> Run:
    q, k, v = leaves = shape.leaves(segments.num_tokens)
    grad = shape.grad(segments.num_tokens)
    paths = root_paths(segments)
    runs = list(zip(segments.start.tolist(), segments.length.tolist(), paths, strict=True))

    def run() -> None:
        outs = []
        for start, length, path in runs:
            mask = torch.ones(length, len(path), dtype=torch.bool).tril_(len(path) - length)
            keys, values = k.index_select(2, path), v.index_select(2, path)
            queries = q[:, :, start : start + length]
            outs.append(
                F.scaled_dot_product_attention(
                    queries, keys, values, mask, scale=shape.scale, enable_gqa=True
                )
            )
        torch.autograd.grad(torch.cat(outs, 2).transpose(1, 2), leaves, grad)

    return run


WAYS: dict[str, Callable[[SegmentTable, Shape], Run]] = {
    "forest": forest,
    "alone": alone,
    "dense": dense,
    "gather": gather,
}


def call_lengths(segments: SegmentTable) -> Tensor:
    """Return the tokens of every root-to-leaf call."""
    is_leaf = torch.ones(segments.num_segments, dtype=torch.bool)
    parents = torch.tensor(segments.parent)
    is_leaf[parents[parents >= 0]] = False
    return torch.tensor(segments.depth + segments.length)[is_leaf]


def root_paths(segments: SegmentTable) -> list[Tensor]:
    """Return the tokens on the path from the root to each segment's end."""
    paths: list[Tensor] = []
    for i, parent in enumerate(segments.parent.tolist()):
        own = torch.arange(segments.length[i]) + segments.start[i]
        paths.append(torch.cat([paths[parent], own]) if parent >= 0 else own)
    return paths


def build(way: str, name: str, shape: Shape, threads: int) -> Run:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return WAYS[way](FORESTS[name](), shape)


def main() -> None:
    keep_memory()
    arguments = read_arguments()
    shape = Shape(arguments.heads, arguments.key_heads, arguments.dim)
    title = f"attention, forward + backward, {shape}, {arguments.threads} threads"
    table = Table(title=title)
    for column in ("forest", "pair ratio", "ms", "MB"):
        table.add_column(column, justify="right")
    for way in list(WAYS)[1:]:
        table.add_column(f"{way} / forest", justify="right")
        table.add_column("MB", justify="right")
    table.add_column("share of pair ratio", justify="right")
    for name in track(arguments.forests, description="forests"):
        table.add_row(name, *row(name, shape, arguments))
    Console(width=170).print(table)


def row(name: str, shape: Shape, arguments: argparse.Namespace) -> list[str]:
    segments, threads = FORESTS[name](), arguments.threads
    lengths = call_lengths(segments)
    pair_ratio = float((lengths * (lengths + 1) / 2).sum()) / segments.num_attended_pairs
    runs = {way: build(way, name, shape, threads) for way in WAYS}
    seconds = time_in_turn(runs, arguments.rounds)
    peak = functools.partial(peak_bytes, build)
    megabytes = {way: f"{peak(way, name, shape, threads) / 2**20:.0f}" for way in WAYS}
    cells = [f"{pair_ratio:.2f}", f"{1e3 * statistics.median(seconds['forest']):.0f}"]
    cells.append(megabytes["forest"])
    for way in list(WAYS)[1:]:
        cells += [spread(ratios(seconds[way], seconds["forest"])), megabytes[way]]
    share = statistics.median(ratios(seconds["alone"], seconds["forest"])) / pair_ratio
    return [*cells, f"{share:.2f}"]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forests", nargs="+", default=list(FORESTS), choices=list(FORESTS))
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
