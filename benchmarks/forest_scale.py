"""Plan the reference-sized case: build its forest, split it, print one row of figures.

    python benchmarks/forest_scale.py [--episodes 16] [--max-tokens 65536] [--seed 0]

The reference is a public training gate of 16 agent episodes: 40,398,130 call tokens, trees of
3,744,651, fragments of 3,919,929 (4.68 % repeated), 987,024 sampled tokens with one owner each.
The calls here are generated; only their magnitudes are those of the reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time

from rich.console import Console
from rich.table import Table

from prefix_rewrite import PrefixForest
from prefix_rewrite.fragments import least_repeated, split_stats
from prefix_rewrite.synthetic import EpisodeShape, agent_calls

REFERENCE = ("reference", "", "40,398,130", "3,744,651", "3,919,929", "4.68", "", "987,024")


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=EpisodeShape.num_episodes)
    parser.add_argument("--max-tokens", type=int, default=65_536)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shape = dataclasses.replace(EpisodeShape(), num_episodes=options.episodes)

    calls = list(agent_calls(shape, seed=options.seed))
    held = peak_gb()
    begin = time.perf_counter()
    forest = PrefixForest.from_calls(calls)
    assert forest.graph.number_of_nodes() == forest.segments.num_segments
    built = time.perf_counter()
    fragments = forest.split(options.max_tokens)
    split = time.perf_counter()

    stats = forest.stats()
    counts = split_stats(forest, fragments)
    least = least_repeated(forest, options.max_tokens) / stats.num_tokens
    columns = "calls|call tokens|physical|fragmented|repeated %|at least %|owners"
    table = Table(
        "", *columns.split("|"), "fragments", "build s", "split s", "peak GB (calls alone)"
    )
    table.add_row(*REFERENCE)
    table.add_row(
        "here",
        *(f"{n:,}" for n in (stats.num_calls, stats.num_logical_tokens, stats.num_tokens)),
        f"{counts.num_tokens:,}",
        f"{100 * counts.repeated:.2f}",
        f"{100 * least:.2f}",
        f"{counts.num_edges:,}",
        f"{counts.num_fragments:,}",
        f"{built - begin:.2f}",
        f"{split - built:.2f}",
        f"{peak_gb():.2f} ({held:.2f})",
    )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
