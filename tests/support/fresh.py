"""Run a piece of Python in a fresh process, as a user's first program would."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

SUPPORT = Path(__file__).parent


def run_fresh(code: str, *path: Path | str, env: Mapping[str, str] | None = None) -> str:
    """Return what the code prints; `path` comes first on its module path."""
    before = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    settings = {"PYTHONPATH": os.pathsep.join([*map(str, path), str(SUPPORT), *before])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **settings, **(env or {})},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
