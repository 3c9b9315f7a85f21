"""How much of a model's capture each pass takes; the proof's growth of compile time.

    python benchmarks/compile_time.py [FAMILY ...]

Time is from `prefix_compile` to the end of the first forward: capture, rewrite and guards. Growth
is the pass's share against all the rest. Models are the tests' tiny ones: capture time depends on
the number of layers, not on their width.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from families import build_model  # noqa: E402
from forests import SHAPES, calls_of  # noqa: E402

from prefix_rewrite import PrefixForest, prefix_compile  # noqa: E402
from prefix_rewrite.passes import pipeline  # noqa: E402

FAMILIES = ("llama", "bamba", "nemotron_h", "zamba2", "qwen3_next", "gemma2")


def timed(run_pass: pipeline.Pass, spent: Counter[str]) -> pipeline.Pass:
    def run(graph_module, context):
        start = time.perf_counter()
        try:
            return run_pass(graph_module, context)
        finally:
            spent[run_pass.__name__] += time.perf_counter() - start

    return run


def measure(family: str) -> tuple[float, Counter[str]]:
    """Return the seconds of capture and first forward, and of them in each pass."""
    torch._dynamo.reset()
    spent: Counter[str] = Counter()
    passes = pipeline.PASSES
    model, forest = build_model(family), PrefixForest.from_calls(calls_of(SHAPES["nested"]))
    pipeline.PASSES = tuple(timed(run_pass, spent) for run_pass in passes)
    try:
        start = time.perf_counter()
        prefix_compile(model)(forest)
        return time.perf_counter() - start, spent
    finally:
        pipeline.PASSES = passes


def main() -> None:
    families = sys.argv[1:] or FAMILIES
    measure(families[0])  # imports and first uses
    table = Table(title="compile time")
    for column in ("family", "seconds", "all passes", "token_locality", "growth by it"):
        table.add_column(column, justify="left" if column == "family" else "right")
    for family in families:
        total, spent = measure(family)
        proof = spent["token_locality"]
        growth = proof / (total - proof)
        cells = (f"{total:.2f}", f"{sum(spent.values()):.2f}", f"{proof:.2f}", f"{growth:.1%}")
        table.add_row(family, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
