"""Start a worker under torchrun, on gloo, with a time limit and no fixed port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

LIMIT_S = 900  # minutes of slack: a test takes a fraction of one on two idle cores
SUPPORT = Path(__file__).resolve().parent


def launch(
    script: str, *arguments: str, num_ranks: int, timeout: float = LIMIT_S
) -> tuple[int, str]:
    """Run a script of `tests/support` on some ranks; return its exit code and output.

    Raises:
        TimeoutError: it hung; all its processes are ended.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", str(SUPPORT / script), *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise TimeoutError(f"{' '.join(command)} ran past {timeout} s:\n{output}") from None
    return process.returncode, output


def run_ranks(script: str, *arguments: str, num_ranks: int, timeout: float = LIMIT_S) -> str:
    """Launch and require success; return the output."""
    code, output = launch(script, *arguments, num_ranks=num_ranks, timeout=timeout)
    assert code == 0, output[-6000:]
    return output
