"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of captured agent calls beside the project; skip where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PREFIX_REWRITE_DATA", beside))
    if not (folder / "stats.json").is_file():
        pytest.skip(f"no data sets at {folder}; set PREFIX_REWRITE_DATA to their folder")
    return folder
