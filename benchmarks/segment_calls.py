"""Captured calls of random tokens for a segment table: one a leaf, its last segment sampled."""

from __future__ import annotations

import numpy as np

from prefix_rewrite import CapturedCall
from prefix_rewrite.segments import SegmentTable


def calls_of_segments(segments: SegmentTable, *, vocab_size: int) -> list[CapturedCall]:
    """Give siblings different first tokens, so that calls part where the segments do."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, vocab_size, segments.num_tokens)
    starts = segments.start
    ids[starts] = 3 + np.arange(len(starts)) % (vocab_size - 3)
    inner = set(segments.parent.tolist())
    calls = []
    for leaf in range(segments.num_segments):
        if leaf in inner:
            continue
        path, segment = [], leaf
        while segment != -1:
            path.append(np.arange(starts[segment], starts[segment] + segments.length[segment]))
            segment = int(segments.parent[segment])
        row = ids[np.concatenate(path[::-1])]
        sampled = np.zeros(len(row), dtype=bool)
        sampled[-int(segments.length[leaf]) :] = True
        sampled[0] = False
        calls.append(CapturedCall.from_tokens(row, sampled))
    return calls
