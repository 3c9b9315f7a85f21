"""The command line: what calls share, how they split, and what would be done to a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from prefix_rewrite.call_files import Progress, read_calls
from prefix_rewrite.errors import PrefixRewriteError
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.fragments import least_repeated, split_stats
from prefix_rewrite.sharing import MEANING, describe_fork, explain_sharing
from prefix_rewrite.stats import ForestStats

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as ProgressBar
    from rich.table import Table
except ImportError as error:
    raise SystemExit(
        f"the command line needs {error.name}; pip install 'prefix-rewrite[cli]'"
    ) from None

PATIENCE_S = 1.0  # a progress bar shows after this long

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Plan prefix forests of captured calls. A file holds one call a line or row, with "
    "context_ids and sampled_ids (or token_ids and sampled), optionally routing and provenance.",
)
out = Console()
err = Console(stderr=True)

File = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="calls: .jsonl, .jsonl.gz, .parquet")
]


@app.command()
def stats(
    file: File,
    examples: Annotated[int, typer.Option(min=0, help="forks to show of each kind")] = 1,
) -> None:
    """Count tokens, sharing, depth and branching, and say what blocked more sharing."""
    with _reported():
        with _progress() as progress:
            calls = read_calls(file, progress)
        with err.status("sharing prefixes"):
            forest = PrefixForest.from_calls(calls)
            report = explain_sharing(calls, forest)
    out.print(_counts(file.name, _stats_rows(forest.stats())))
    table = Table("why paths part", "forks", title="forks", title_justify="left")
    for kind, number in report.num_forks().items():
        table.add_row(f"{kind}: {MEANING[kind]}", f"{number:,}")
    out.print(table)
    out.print(
        f"repeated because of routing: {report.blocked_by_routing:,} tokens, "
        f"because of provenance: {report.blocked_by_provenance:,} tokens"
    )
    for kind in MEANING:
        for fork in report.examples(kind, examples):
            out.print(f"[bold]{kind}:[/] {escape(describe_fork(fork, calls))}")


@app.command()
def plan(
    file: File,
    max_tokens: Annotated[int, typer.Option(help="physical tokens that a fragment may have")],
    max_attended_pairs: Annotated[
        int | None, typer.Option(help="attended (query, key) pairs that it may have")
    ] = None,
) -> None:
    """Split the forest into fragments that fit a budget."""
    with _reported():
        with _progress() as progress:
            calls = read_calls(file, progress)
        with err.status("planning fragments"):
            forest = PrefixForest.from_calls(calls)
            fragments = forest.split(max_tokens, max_attended_pairs=max_attended_pairs)
            counts = split_stats(forest, fragments)
    whole = max(1, forest.num_tokens)
    least = least_repeated(forest, max_tokens)
    rows = {
        "physical tokens": f"{forest.num_tokens:,}",
        "fragments": f"{counts.num_fragments:,}",
        "tokens in fragments": f"{counts.num_tokens:,}",
        "repeated": f"{counts.num_repeated:,} ({counts.repeated:.2%})",
        "no plan repeats less than": f"{least:,} ({least / whole:.2%})",
        "largest fragment": f"{counts.largest:,}",
        "sampled tokens, each owned once": f"{counts.num_edges:,}",
    }
    out.print(_counts(f"{file.name}, {max_tokens:,} tokens a fragment", rows))
    table = Table("fragment", "tokens", "calls owned", "sampled tokens", "attended pairs")
    for i, part in enumerate(fragments):
        pairs = part.segments.num_attended_pairs
        numbers = (i, part.num_tokens, part.num_calls, part.num_edges, pairs)
        table.add_row(*(f"{number:,}" for number in numbers))
    out.print(table)


@app.command()
def plot(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help=".svg, .png or .pdf")],
) -> None:
    """Draw the forest to a picture."""
    with _reported():
        with _progress() as progress:
            forest = PrefixForest.from_calls(read_calls(file, progress))
        _draw(forest, output)
    out.print(f"wrote {escape(str(output))}")


@app.command()
def explain(
    config: Annotated[str, typer.Argument(help="folder or file of a transformers config")],
    eval_mode: Annotated[bool, typer.Option("--eval", help="in eval mode")] = False,
) -> None:
    """Say what prefix_compile would do to a model: mixers, replacements, refusals."""
    from prefix_rewrite.explanation import explain as explain_model

    with _reported(), err.status("capturing the model, without weights"):
        report = explain_model(_model_of(config).train(not eval_mode))
    Console(width=max(out.width, 120)).print(report)
    if not report.supported:
        raise typer.Exit(1)


def _model_of(config: str) -> Any:
    """Build a model from its config alone: shapes, no weights."""
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise PrefixRewriteError("needs transformers; pip install 'prefix-rewrite[hf]'") from None
    try:
        settings = AutoConfig.from_pretrained(config, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PrefixRewriteError(f"cannot read a model config from {config}: {error}") from None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings)


def _draw(forest: PrefixForest, output: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from prefix_rewrite.plot import draw_forest

    figure = Figure(figsize=(10, 6), layout="constrained")
    kinds = FigureCanvasAgg(figure).get_supported_filetypes()
    if output.suffix[1:].lower() not in kinds:
        raise PrefixRewriteError(
            f"the picture's name must end with .{', .'.join(sorted(kinds))}, got {output.name}"
        )
    draw_forest(forest, figure.add_subplot())
    try:
        figure.savefig(output, dpi=150)
    except OSError as error:
        raise PrefixRewriteError(f"cannot write {output}: {error.strerror}") from None


def _stats_rows(counts: ForestStats) -> dict[str, str]:
    pairs = counts.logical_attended_pairs / max(1, counts.attended_pairs)
    return {
        "calls": f"{counts.num_calls:,}",
        "tokens of all calls": f"{counts.num_logical_tokens:,}",
        "physical tokens": f"{counts.num_tokens:,}",
        "sampled tokens, each owned once": f"{counts.num_edges:,}",
        "longest path": f"{counts.longest_path:,} tokens",
        "segments / roots / leaves": (
            f"{counts.num_segments:,} / {counts.num_roots:,} / {counts.num_leaves:,}"
        ),
        "branch points": (
            f"{counts.num_branch_points:,}, fan-out up to {counts.max_fan_out}, "
            f"up to {counts.max_branch_depth} on a path"
        ),
        "predicted speed-up, per token": f"{counts.sharing:.2f}x (projections, experts, scans)",
        "predicted speed-up, attention": f"{pairs:.2f}x (attended pairs)",
    }


def _counts(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=escape(title), show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


@contextmanager
def _reported() -> Iterator[None]:
    """Print our own errors as one line, and exit with status 1."""
    try:
        yield
    except PrefixRewriteError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield a function that is told the fraction read, and shows it if reading takes long."""
    begin = time.monotonic()
    with ExitStack() as shown:
        bar = ProgressBar(console=err, transient=True)
        task = bar.add_task("reading calls", total=1.0)

        def show(fraction: float) -> None:
            if not bar.live.is_started and time.monotonic() - begin > PATIENCE_S:
                shown.enter_context(bar)
            bar.update(task, completed=fraction)

        yield show


def main(arguments: Any = None) -> None:
    """Run the command line."""
    app(arguments)


if __name__ == "__main__":
    main()
