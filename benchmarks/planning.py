"""Time what is planned once a forest: each op's plan, and the layout that holds them.

    python benchmarks/planning.py [--segments 2000] [--tokens 100000]

The forest is random: each segment hangs from one of the forty before it, so paths are long.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from prefix_rewrite.ops.tree_attention import plan_attention
from prefix_rewrite.ops.tree_conv import plan_conv
from prefix_rewrite.ops.tree_ssd import plan_ssd
from prefix_rewrite.order import heavy_first_order
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import SegmentTable


def random_forest(count: int, num_tokens: int) -> SegmentTable:
    rng = random.Random(0)
    parent = [-1, *(rng.randrange(max(0, i - 40), i) for i in range(1, count))]
    cuts = sorted(rng.sample(range(1, num_tokens), count - 1))
    length = [b - a for a, b in zip([0, *cuts], [*cuts, num_tokens], strict=True)]
    order = heavy_first_order(parent, length, range(count))
    place = {segment: i for i, segment in enumerate(order)} | {-1: -1}
    return SegmentTable.from_parents([place[parent[i]] for i in order], [length[i] for i in order])


def milliseconds(run: Callable[[], object], rounds: int) -> float:
    spent = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(spent[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--segments", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    parent, length = (
        getattr(random_forest(options.segments, options.tokens), name).tolist()
        for name in ("parent", "length")
    )

    def fresh() -> SegmentTable:
        """A table whose cached properties are not there yet."""
        return SegmentTable.from_parents(parent, length)

    def all_of_a_hybrid() -> None:
        segments = fresh()
        pack_plan({**plan_attention(segments), **plan_conv(segments), **plan_ssd(segments)}, "cpu")

    table = Table(title=f"planning {options.tokens:,} tokens in {options.segments:,} segments, ms")
    table.add_column("plan")
    table.add_column("median", justify="right")
    plans: dict[str, Callable[[], object]] = {
        "segment table": fresh,
        "attention": lambda: plan_attention(fresh()),
        **{
            f"attention, window {window}": lambda window=window: plan_attention(fresh(), window)
            for window in (128, 1024, 4096)
        },
        "conv": lambda: plan_conv(fresh()),
        "Mamba-2 scan": lambda: plan_ssd(fresh()),
        "a hybrid's three, packed": all_of_a_hybrid,
    }
    for name, run in plans.items():
        table.add_row(name, f"{milliseconds(run, options.rounds):.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
