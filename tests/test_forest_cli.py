"""The command line prints the forest's own counts, and errors as one line with status 1."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefix_rewrite import cli
from prefix_rewrite.call_files import read_calls
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.fragments import split_stats
from prefix_rewrite.synthetic import EpisodeShape, agent_calls

SHAPE = EpisodeShape(num_episodes=2, turns=6, system=40, task=20, sampled=10, observation=12)


@pytest.fixture
def run(monkeypatch):
    def invoke(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
        return result.exit_code, re.sub(r"[\s│]+", " ", result.output)

    for name in ("out", "err"):  # consoles look their stream up when they print
        monkeypatch.setattr(getattr(cli, name), "width", 200, raising=False)
    return invoke


@pytest.fixture
def calls_file(tmp_path) -> Path:
    path = tmp_path / "calls.jsonl"
    lines = [
        json.dumps(
            {
                "token_ids": call.token_ids.tolist(),
                "sampled": call.sampled.tolist(),
                "provenance": i % 2,
            }
        )
        for i, call in enumerate(agent_calls(SHAPE))
    ]
    path.write_text("\n".join(lines))
    return path


def test_stats_prints_counts_and_reasons(run, calls_file):
    counts = PrefixForest.from_calls(read_calls(calls_file)).stats()
    code, text = run("stats", calls_file)
    assert code == 0
    for figure in (
        f"calls {counts.num_calls} ",
        f"tokens of all calls {counts.num_logical_tokens:,} ",
        f"physical tokens {counts.num_tokens:,} ",
        f"sampled tokens, each owned once {counts.num_edges:,} ",
        f"{counts.sharing:.2f}x (projections",
    ):
        assert figure in text
    assert re.search(r"because of provenance: [1-9][\d,]* tokens", text)
    assert "provenance: call 1 leaves call 0 after 0 tokens: provenance 1, not 0" in text


def test_plan_prints_fragments_and_owners(run, calls_file):
    forest = PrefixForest.from_calls(read_calls(calls_file))
    budget = forest.stats().longest_path + 50
    counts = split_stats(forest, forest.split(budget))
    code, text = run("plan", calls_file, "--max-tokens", budget)
    assert code == 0
    assert f"fragments {counts.num_fragments} " in text
    assert f"repeated {counts.num_repeated:,} ({counts.repeated:.2%})" in text
    assert f"each owned once {forest.num_edges:,} " in text


def test_a_budget_below_the_longest_path_is_one_line(run, calls_file):
    code, text = run("plan", calls_file, "--max-tokens", 5)
    assert code == 1
    assert "error: max_tokens must hold the longest path, got max_tokens=5" in text


def test_a_bad_line_is_one_line(run, calls_file):
    calls_file.write_text(calls_file.read_text() + "\n{}")
    code, text = run("stats", calls_file)
    assert code == 1
    assert re.search(r"error: calls.jsonl line \d+: a call must have", text)
    assert run("stats", calls_file.with_name("absent.jsonl"))[0] == 2


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_plot_writes_a_picture(run, calls_file, tmp_path, suffix, magic):
    target = tmp_path / f"forest{suffix}"
    code, text = run("plot", calls_file, "-o", target)
    assert code == 0 and "wrote" in text
    assert target.read_bytes().startswith(magic)


def test_plot_refuses_what_it_cannot_write(run, calls_file, tmp_path):
    code, text = run("plot", calls_file, "-o", tmp_path / "forest.txt")
    assert code == 1 and "must end with" in text
    code, text = run("plot", calls_file, "-o", tmp_path / "absent" / "forest.svg")
    assert code == 1 and "cannot write" in text


def test_a_progress_bar_shows_only_when_it_takes_long(run, calls_file, monkeypatch):
    started = []
    monkeypatch.setattr(cli.ProgressBar, "start", lambda self: started.append(self))
    run("stats", calls_file)
    assert not started
    monkeypatch.setattr(cli, "PATIENCE_S", 0.0)
    run("stats", calls_file)
    assert started


def test_an_empty_file_is_an_empty_forest(run, tmp_path):
    path = tmp_path / "none.jsonl"
    path.touch()
    assert run("stats", path)[0] == 0
    assert run("plan", path, "--max-tokens", 1)[0] == 0
    assert run("plot", path, "-o", tmp_path / "none.svg")[0] == 0
