"""Files of calls read back exactly, or the line that is wrong is named."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from prefix_rewrite.call_files import read_calls
from prefix_rewrite.errors import ForestError

ROWS = [
    {"context_ids": [1, 2], "sampled_ids": [3], "provenance": "a", "reward": 1.0},
    {"prompt_ids": [1, 2], "output_ids": []},
    {"token_ids": [4, 5, 6], "sampled": [False, True, False], "routing": [[0], [1], [0]]},
    {"context_ids": [7], "sampled_ids": [8], "provenance": {"step": 1, "engine": [2, 3]}},
]


def write(path: Path, lines: list[str]) -> Path:
    text = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["calls.jsonl", "calls.JSONL.gz"])
def test_json_lines_read_back_exactly(name, tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    seen: list[float] = []
    calls = read_calls(write(tmp_path / name, [*lines[:2], "", *lines[2:]]), seen.append)
    assert [call.token_ids.tolist() for call in calls] == [[1, 2, 3], [1, 2], [4, 5, 6], [7, 8]]
    assert [call.num_sampled for call in calls] == [1, 0, 1, 1]
    assert calls[0].provenance == "a" and calls[1].provenance is None
    assert calls[2].routing is not None and calls[2].routing.tolist() == [[0], [1], [0]]
    assert hash(calls[3].provenance)
    assert seen == sorted(seen) and 0 < seen[-1] <= 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"calls.jsonl line 3: must be JSON, got b'\{"),
        ('{"context_ids": [1, -5], "sampled_ids": []}', "line 3: context_ids must be >= 0"),
        ('{"context_ids": [1.5], "sampled_ids": []}', "line 3: context_ids must be integers"),
        ('{"context_ids": [1]}', "line 3: a call must have context_ids and .*got context_ids"),
        (
            '{"context_ids": null, "sampled_ids": [1]}',
            "line 3: a call must have .*got sampled_ids",
        ),
        ("[1, 2]", "line 3: a call must be an object, got list"),
        ('{"token_ids": [1, 2], "sampled": [true, false]}', "line 3: a sampled token must have"),
        ("\x00\xff", "line 3: must be JSON"),
    ],
)
def test_a_bad_line_is_named(line, message, tmp_path):
    path = write(tmp_path / "calls.jsonl", [json.dumps(ROWS[0]), "", line])
    with pytest.raises(ForestError, match=message):
        read_calls(path)


def test_a_damaged_archive_is_named(tmp_path):
    path = write(tmp_path / "calls.jsonl.gz", [json.dumps(ROWS[0])] * 100)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ForestError, match=r"calls.jsonl.gz line \d+: cannot be read"):
        read_calls(path)
    path.write_bytes(b"no gzip at all")
    with pytest.raises(ForestError, match="calls.jsonl.gz line 1: cannot be read"):
        read_calls(path)


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ForestError, match="calls.csv must be a .jsonl"):
        read_calls(tmp_path / "calls.csv")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ForestError, match="needs pyarrow; pip install"):
        read_calls(tmp_path / "calls.parquet")


def test_parquet_reads_back_exactly(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "calls.parquet"
    good = [
        {"context_ids": [1, 2], "sampled_ids": [3], "routing": [[0], [1], [0]], "x": "y"},
        {"context_ids": [4], "sampled_ids": [], "routing": None, "x": "z"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(good * 400), path)
    calls = read_calls(path)
    assert len(calls) == 800
    assert [call.token_ids.tolist() for call in calls[-2:]] == [[1, 2, 3], [4]]
    assert calls[0].routing is not None
    assert np.array_equal(calls[0].routing, [[0], [1], [0]])
    bad = {"context_ids": [-4], "sampled_ids": []}
    parquet.write_table(pyarrow.Table.from_pylist([*good, bad]), path)
    with pytest.raises(ForestError, match="calls.parquet row 3: context_ids must be >= 0"):
        read_calls(path)
    path.write_bytes(b"PAR")
    with pytest.raises(ForestError, match="calls.parquet: is not a Parquet file"):
        read_calls(path)
