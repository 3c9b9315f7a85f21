"""Time variants in turn, and measure the peak memory of each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# glibc gives each tensor over 32 MB, and what is freed at the top of its heap, back to the kernel:
# the next one faults in every page again, which costs a large tensor several times its arithmetic.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**30),
}


def keep_memory() -> None:
    """Start this program again with an allocator that keeps what is freed, for all variants."""
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})


def time_in_turn(
    variants: Mapping[str, Callable[[], None]], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each round, per variant; one round more goes first, to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for r in range(rounds + 1):
        for name, run in variants.items():
            begin = time.perf_counter()
            run()
            if r:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def peak_bytes(build: Callable[..., Callable[[], None]], *arguments: object) -> int:
    """Return the peak memory of `build(*arguments)()` above what it holds before it runs."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(send, build, arguments))
    process.start()
    send.close()
    peak = receive.recv()
    process.join()
    return peak


def _send_peak(
    send, build: Callable[..., Callable[[], None]], arguments: Sequence[object]
) -> None:
    run = build(*arguments)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status_bytes("VmRSS")
    run()
    send.send(_status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status must hold {field}; measure memory on Linux")


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Show the median and the range."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}..{max(values):.2f}]"
