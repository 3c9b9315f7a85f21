"""DDP around a compiled model: gradients are the ranks' mean, and unsynced where that is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"
LIMIT_S = 240


def test_ddp_averages_the_gradients_of_different_forests(tmp_path):
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(SUPPORT), *([before] if before else [])])
    env = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(SUPPORT / "data_parallel.py"),
                str(rank),
                str(tmp_path / "store"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, printed, strict=True):
        assert rank.returncode == 0, text[-4000:]
