"""Every family, unmodified, on a forest equals each of its calls alone: outputs and gradients."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from compiled import WIDE_VOCAB, shared_pair
from families import FAMILIES
from forests import SHAPES, calls_of
from oracle import assert_equal_results, run_forest, run_rows

from prefix_rewrite import CapturedCall, PrefixForest

# One agent's turns with a simulated user's, a two-level tree of plans, a group of samples.
EPISODES = ("tau-airline/task44/trial3", "tot-text/0", "game24/900")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    return shared_pair(request.param)


@pytest.mark.parametrize("shape", SHAPES)
def test_forest_equals_rows(pair, shape):
    model, compiled = pair
    calls = calls_of(SHAPES[shape])
    forest = PrefixForest.from_calls(calls)
    assert_equal_results(run_forest(compiled, forest), run_rows(model, calls))


@pytest.fixture(scope="module")
def agent_calls(shared_data: Path) -> list[CapturedCall]:
    return _read_calls(shared_data / "small.jsonl.gz")


def test_real_agent_calls_equal_rows(pair, agent_calls):
    model, compiled = pair
    forest = PrefixForest.from_calls(agent_calls)
    assert forest.num_tokens < sum(call.num_tokens for call in agent_calls) / 2, "no sharing"
    assert_equal_results(run_forest(compiled, forest), run_rows(model, agent_calls))


def _read_calls(path: Path) -> list[CapturedCall]:
    """Read whole episodes; ids become dense in order of first use, which keeps all sharing."""
    ids: dict[int, int] = {}

    def dense(tokens: list[int]) -> list[int]:
        return [ids.setdefault(token, len(ids)) for token in tokens]

    with gzip.open(path, "rt") as lines:
        calls = [call for call in map(json.loads, lines) if call["episode"] in EPISODES]
    read = [CapturedCall(dense(c["prompt_ids"]), dense(c["output_ids"])) for c in calls]
    assert len(ids) <= WIDE_VOCAB, f"the tests' models need {len(ids)} token ids"
    return read
