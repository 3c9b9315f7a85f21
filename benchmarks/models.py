"""Train whole models on forests and on each call alone, in one run, and print the ratios.

    python benchmarks/models.py                       # all models on all forests: hours
    python benchmarks/models.py --models bamba --forests star2048x8x256 --rounds 3

Every row compares forward + backward of the same weighted log-probabilities:

- *alone*: the unmodified model, one row a call, logits at every token;
- *alone, our ops*: the compiled model, one forest a call;
- *forest*: the compiled model, all calls in one forest.

The theoretical ratio counts FLOPs: linear layers and scans by physical tokens, attention by
attended pairs, the head by distinct edge sources. Variants take turns within a round; the table
shows medians over rounds and the range of the ratios. With `--memory`, it shows peaks above the
model too, each in a process of its own; the longest call stands for all calls alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from data_sets import SETS, load_set
from forests import FORESTS
from measuring import keep_memory, peak_bytes, ratios, spread
from model_zoo import MODELS, Work, build
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from segment_calls import calls_of_segments
from torch import nn

from prefix_rewrite import CapturedCall, PrefixForest, prefix_compile


@dataclass(frozen=True)
class Row:
    """One model on one set: theoretical ratios; seconds of each round and peak bytes a variant."""

    model: str
    calls: str
    tokens: float
    flops: float
    seconds: dict[str, list[float]]
    peaks: dict[str, int]

    def ratio(self, slow: str, fast: str) -> list[float]:
        return ratios(self.seconds[slow], self.seconds[fast])


def main() -> None:
    arguments = read_arguments()
    keep_memory()
    torch.set_num_threads(arguments.threads)
    rows = []
    with Progress() as progress:
        steps = len(arguments.models) * len(arguments.forests)
        task = progress.add_task("models", total=steps)
        for name in arguments.models:
            model, work = build(name)
            compiled = prefix_compile(model, backend=arguments.backend)
            for calls_name in arguments.forests:
                calls = read_calls(calls_name, arguments.max_tokens, model.config.vocab_size)
                rows.append(measure(name, calls_name, model, compiled, work, calls, arguments))
                progress.advance(task)
    show(rows, arguments)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    names = [*FORESTS, *SETS]
    parser.add_argument("--forests", nargs="+", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--max-tokens", type=int, default=8192, help="forest budget of data sets")
    parser.add_argument("--no-alone", action="store_true", help="leave the unmodified model out")
    parser.add_argument("--memory", action="store_true", help="measure peaks too")
    parser.add_argument("--picture", type=Path, help="also draw the table to this file")
    return parser.parse_args()


def read_calls(name: str, max_tokens: int, vocab_size: int) -> list[CapturedCall]:
    if name in FORESTS:
        return calls_of_segments(FORESTS[name](), vocab_size=vocab_size)
    return load_set(name, max_tokens=max_tokens, vocab_size=vocab_size)


def measure(
    name: str,
    calls_name: str,
    model: nn.Module,
    compiled: nn.Module,
    work: Work,
    calls: Sequence[CapturedCall],
    arguments: argparse.Namespace,
) -> Row:
    """Time every variant once a round, in turn, after one forest to warm up."""
    forest = PrefixForest.from_calls(calls)
    singles = [[call] for call in calls if call.sampled.any()]
    variants: dict[str, Callable[[], None]] = {
        "our ops": lambda: run_forests(compiled, singles),
        "forest": lambda: run_forests(compiled, [calls]),
    }
    if not arguments.no_alone:
        variants["alone"] = lambda: run_rows(model, calls)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    peaks: dict[str, int] = {}
    if arguments.memory:
        peaks = {
            variant: peak_bytes(build_variant, variant, name, calls, arguments.backend)
            for variant in variants
        }
    run_forests(compiled, [calls])
    for _ in range(arguments.rounds):
        for variant, run in variants.items():
            begin = time.perf_counter()
            run()
            seconds[variant].append(time.perf_counter() - begin)
            model.zero_grad()
    return Row(
        model=name,
        calls=calls_name,
        tokens=sum(call.num_tokens for [call] in singles) / forest.num_tokens,
        flops=sum(work.flops(PrefixForest.from_calls(s)) for s in singles) / work.flops(forest),
        seconds=seconds,
        peaks=peaks,
    )


def build_variant(
    variant: str, name: str, calls: Sequence[CapturedCall], backend: str
) -> Callable[[], None]:
    """Return a run of the forest, or of the longest call, for a process of its own."""
    model, _ = build(name)
    longest = max(calls, key=lambda call: len(call.token_ids))
    if variant == "alone":
        run_rows(model, [first_tokens(longest)])
        return lambda: run_rows(model, [longest])
    compiled = prefix_compile(model, backend=backend)
    run_forests(compiled, [[first_tokens(longest)]])
    return lambda: run_forests(compiled, [calls if variant == "forest" else [longest]])


def first_tokens(call: CapturedCall) -> CapturedCall:
    """A short call, to have compiled and allocated gradients before memory is measured."""
    return CapturedCall(call.token_ids[:8], call.token_ids[8:16])


def run_forests(compiled: nn.Module, batches: Sequence[Sequence[CapturedCall]]) -> None:
    """As a trainer does: each forest is built, planned, run and dropped."""
    for calls in batches:
        (-compiled(PrefixForest.from_calls(calls)).logprobs.sum()).backward()


def run_rows(model: nn.Module, calls: Sequence[CapturedCall]) -> None:
    for call in calls:
        ids = torch.from_numpy(call.token_ids)[None]
        where = torch.from_numpy(call.sampled).nonzero()[:, 0]
        if len(where):
            logits = model(input_ids=ids, use_cache=False).logits[0, where - 1]
            (-logits.float().log_softmax(-1).gather(1, ids[0, where, None]).sum()).backward()


def show(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    table = Table(title=f"forward + backward, {arguments.threads} threads, {arguments.backend}")
    for column in ("model", "calls", "tokens", "FLOPs", "forest s", "our ops / forest"):
        table.add_column(column)
    for column in ("share of FLOP ratio", "alone / forest", "alone / our ops"):
        table.add_column(column)
    if arguments.memory:
        table.add_column("MB forest / our ops / alone")
    for row in rows:
        ours = row.ratio("our ops", "forest")
        alone = "alone" in row.seconds
        table.add_row(
            row.model,
            row.calls,
            f"{row.tokens:.2f}",
            f"{row.flops:.2f}",
            f"{statistics.median(row.seconds['forest']):.2f}",
            spread(ours),
            f"{statistics.median(ours) / row.flops:.2f}",
            spread(row.ratio("alone", "forest")) if alone else "",
            spread(row.ratio("alone", "our ops")) if alone else "",
            *([megabytes(row)] if row.peaks else []),
        )
    console = Console(width=160, record=arguments.picture is not None)
    console.print(table)
    if arguments.picture is not None:
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        console.save_svg(str(arguments.picture))


def megabytes(row: Row) -> str:
    variants = [v for v in ("forest", "our ops", "alone") if v in row.peaks]
    return " / ".join(f"{row.peaks[v] / 2**20:,.0f}" for v in variants)


if __name__ == "__main__":
    main()
