"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefix_rewrite.ops.tree_attention import op as attention_op


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of captured agent calls beside the project; skip where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PREFIX_REWRITE_DATA", beside))
    if not (folder / "stats.json").is_file():
        pytest.skip(f"no data sets at {folder}; set PREFIX_REWRITE_DATA to their folder")
    return folder


@pytest.fixture(params=["cpu_flash", "blockwise"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test by each executor of tree attention, and fail if another one was used."""
    others = dict.fromkeys(attention_op._EXECUTORS)
    executor = attention_op._EXECUTORS[request.param]
    monkeypatch.setattr(attention_op, "_EXECUTORS", {**others, request.param: executor})
    monkeypatch.setattr(attention_op, "attention_backend", lambda *_: request.param)
    return request.param
