"""Calls of your own for the example: read, cut to a size, and fitted to a tiny vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prefix_rewrite import CapturedCall
from prefix_rewrite.call_files import read_calls
from prefix_rewrite.errors import ForestError


def load_calls(path: Path) -> list[CapturedCall]:
    """Read `.jsonl`, `.jsonl.gz` and `.parquet` files of calls, and `.npz` files of segments."""
    return _read_segments(path) if path.suffix == ".npz" else read_calls(path)


def _read_segments(path: Path) -> list[CapturedCall]:
    """Read calls that are lists of segments: the last `n_out` segments of a call were sampled."""
    with np.load(path) as file:
        data = dict(file)
    segments = np.split(data["tokens"], data["seg_ptr"][1:-1])
    calls = []
    for ids, num_sampled in zip(
        np.split(data["call_segs"], data["call_ptr"][1:-1]), data["n_out"], strict=True
    ):
        parts = [segments[i] for i in ids]
        cut = len(parts) - int(num_sampled)
        calls.append(CapturedCall(_join(parts[:cut]), _join(parts[cut:])))
    return calls


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)


def keep_first(calls: Sequence[CapturedCall], max_tokens: int) -> list[CapturedCall]:
    """Return the first calls that have at most `max_tokens` tokens together.

    Raises:
        ForestError: not even the first call fits.
    """
    totals = np.cumsum([call.num_tokens for call in calls])
    kept = list(calls[: int((totals <= max_tokens).sum())])
    if not kept:
        got = f"its first call has {totals[0]:,}" if calls else "it holds no call"
        raise ForestError(f"the file must hold a call of at most {max_tokens:,} tokens, {got}")
    return kept


def use_dense_ids(calls: Sequence[CapturedCall]) -> tuple[list[CapturedCall], int]:
    """Renumber the token ids that occur as 0..V-1, for a tiny model; return the calls and V.

    Equal tokens stay equal and different ones different, so the forest keeps its shape.
    """
    vocabulary = np.unique(np.concatenate([call.token_ids for call in calls]))
    dense = [
        CapturedCall.from_tokens(
            np.searchsorted(vocabulary, call.token_ids), call.sampled, provenance=call.provenance
        )
        for call in calls
    ]
    return dense, len(vocabulary)
