"""Time edge log-probabilities against two other ways, forward + backward, in one run.

    python benchmarks/ops_edges.py
    python benchmarks/ops_edges.py --edges 2000 --vocab 128256 --dim 2048

- *edges*: the op, on the distinct sources, tile by tile.
- *selected*: the distinct sources' logits at once, log-softmax, index.
- *all*: logits of every token, log-softmax, index: what a model and its loss do.

The theoretical ratio to *all* counts products: three by T rows against four (one is recomputed)
by the distinct sources. Variants take turns within a round; ratios are medians over rounds, with
their range. Memory is the peak above the inputs, each variant in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measuring import keep_memory, peak_bytes, ratios, spread, time_in_turn
from rich.console import Console
from rich.table import Table
from torch import Tensor

from prefix_rewrite.ops.edge_logprobs import edge_logprobs, logits_logprobs

Result = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ONE = torch.ones(1)


def edges(hidden: Tensor, weight: Tensor, source: Tensor, target: Tensor) -> Tensor:
    rows, edge_row = source.unique(return_inverse=True)
    return edge_logprobs(hidden[:, rows], weight, None, edge_row, target, ONE)[0]


def selected(hidden: Tensor, weight: Tensor, source: Tensor, target: Tensor) -> Tensor:
    rows, edge_row = source.unique(return_inverse=True)
    return logits_logprobs(F.linear(hidden[:, rows], weight), edge_row, target, ONE, False)[0]


def all_tokens(hidden: Tensor, weight: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return F.linear(hidden, weight)[0].log_softmax(-1)[source, target]


WAYS: dict[str, Result] = {"edges": edges, "selected": selected, "all": all_tokens}


def build(
    way: str, num_edges: int, tokens: int, vocab: int, dim: int, threads: int
) -> Callable[[], None]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, dim).requires_grad_()
    weight = torch.randn(vocab, dim).mul_(dim**-0.5).requires_grad_()
    source, target = torch.randint(tokens, (num_edges,)), torch.randint(vocab, (num_edges,))
    grad = torch.randn(num_edges)

    def run() -> None:
        torch.autograd.grad(WAYS[way](hidden, weight, source, target), (hidden, weight), grad)

    return run


def main() -> None:
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", type=int, nargs="+", default=[2000, 8192])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    sizes = (arguments.tokens, arguments.vocab, arguments.dim, arguments.threads)
    table = Table(title="edge logprobs, T {}, V {}, D {}, {} threads".format(*sizes))
    for column in ("E", "rows", "products", "ms", "MB", "selected / edges", "MB"):
        table.add_column(column, justify="right")
    for column in ("all / edges", "MB"):
        table.add_column(column, justify="right")
    for num_edges in arguments.edges:
        table.add_row(*row(num_edges, sizes, arguments.rounds))
    Console(width=140).print(table)


def row(num_edges: int, sizes: tuple[int, int, int, int], rounds: int) -> list[str]:
    runs = {way: build(way, num_edges, *sizes) for way in WAYS}
    seconds = time_in_turn(runs, rounds)
    peaks = {way: f"{peak_bytes(build, way, num_edges, *sizes) / 2**20:.0f}" for way in WAYS}
    torch.manual_seed(0)
    num_rows = len(torch.randint(sizes[0], (num_edges,)).unique())
    cells = [f"{num_edges}", f"{num_rows}", f"{3 * sizes[0] / (4 * num_rows):.2f}"]
    cells += [f"{1e3 * statistics.median(seconds['edges']):.0f}", peaks["edges"]]
    for way in ("selected", "all"):
        cells += [spread(ratios(seconds[way], seconds["edges"])), peaks[way]]
    return cells


if __name__ == "__main__":
    main()
