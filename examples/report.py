"""What the example prints."""

from __future__ import annotations

from compare import Comparison
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rollout import Rollout

from prefix_rewrite import PrefixForest
from prefix_rewrite.stats import ForestStats


def make_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def print_step(console: Console, name: str, rollout: Rollout) -> None:
    stats = PrefixForest.from_calls(call.captured for call in rollout.calls).stats()
    console.print(
        f"{name:9}  reward {rollout.reward:.2f}  solved {rollout.solved:4.0%}  "
        f"{stats.num_calls} calls: {stats.num_logical_tokens:,} tokens as {stats.num_tokens:,}",
        highlight=False,
    )


def print_comparison(console: Console, stats: ForestStats, comparison: Comparison) -> None:
    table = Table("one training batch", "each call alone", "prefix forest", "")
    table.add_row(
        "tokens computed",
        f"{stats.num_logical_tokens:,}",
        f"{stats.num_tokens:,}",
        f"{stats.sharing:.1f}x fewer",
    )
    table.add_row(
        "forward and backward",
        f"{comparison.alone_seconds:.2f} s",
        f"{comparison.forest_seconds:.2f} s",
        f"[bold green]{comparison.speedup:.1f}x faster[/]",
    )
    console.print(table)
    console.print(
        f"{stats.num_edges:,} sampled tokens of {stats.num_calls:,} calls; largest differences:\n"
        f"  log-probability, absolute  {comparison.logprob_difference:.1e}\n"
        f"  any gradient, relative     {comparison.gradient_difference:.1e}",
        highlight=False,
    )
