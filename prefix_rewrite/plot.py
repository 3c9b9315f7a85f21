"""Draw a forest: tokens to the right, branches downwards, sampled tokens in colour.

Shapes: S segments, T physical tokens, L leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.segments import IntArray, SegmentTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTEXT, SAMPLED = "#9aa5b1", "#e4572e"
RASTER_SEGMENTS = 5_000  # above it, a vector file would hold more lines than a viewer likes


def draw_forest(forest: PrefixForest, ax: Axes) -> None:
    """Draw each segment as a bar from its depth to its end, each leaf on a row of its own."""
    from matplotlib.collections import LineCollection
    from matplotlib.ticker import MaxNLocator

    table = forest.segments
    row = _rows(table)
    ends = table.depth + table.length
    width = float(np.clip(200 / (row.max(initial=0) + 1), 0.4, 4.0))  # in points
    raster = table.num_segments > RASTER_SEGMENTS
    begin, stop, at = _sampled_runs(forest, row)
    child = np.flatnonzero(table.parent >= 0)
    joint = table.depth[child]
    for lines, color, size in (
        (_lines(joint, row[table.parent[child]], joint, row[child]), CONTEXT, width / 2),
        (_lines(table.depth, row, ends, row), CONTEXT, width),
        (_lines(begin, at, stop, at), SAMPLED, width),
    ):
        bars = LineCollection(list(lines), colors=color, linewidths=size, capstyle="butt")
        bars.set_rasterized(raster)
        ax.add_collection(bars)
    stats = forest.stats()
    ax.set_xlim(0, max(1, stats.longest_path))
    ax.set_ylim(row.max(initial=0) + 0.5, -0.5)
    ax.set_xlabel("depth in tokens")
    ax.set_ylabel("leaf")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(
        f"{stats.num_calls:,} calls: {stats.num_logical_tokens:,} tokens "
        f"as {stats.num_tokens:,} ({stats.sharing:.1f}x)"
    )


def _rows(table: SegmentTable) -> NDArray[np.float64]:
    """Return [S] vertical places: leaves 0..L-1, any other midway between its outer children."""
    count = table.num_segments
    first, last = [-1.0] * count, [-1.0] * count
    parent = table.parent.tolist()
    has_child = np.bincount(table.parent[table.parent >= 0], minlength=count) > 0
    leaves = int(count - has_child.sum())
    row = [0.0] * count
    for i in range(count - 1, -1, -1):
        if first[i] < 0:
            leaves -= 1
            row[i] = float(leaves)
        else:
            row[i] = (first[i] + last[i]) / 2
        above = parent[i]
        if above != -1:
            first[above] = row[i]
            last[above] = row[i] if last[above] < 0 else last[above]
    return np.asarray(row, dtype=np.float64)


def _sampled_runs(
    forest: PrefixForest, row: NDArray[np.float64]
) -> tuple[IntArray, IntArray, NDArray[np.float64]]:
    """Return the runs of sampled tokens: depths of their begin and end, and their rows."""
    table = forest.segments
    token = np.unique(forest.edges.token)
    segment = table.segment_of(token)
    opens = np.ones(len(token), dtype=np.bool_)
    opens[1:] = (np.diff(token) != 1) | (np.diff(segment) != 0)
    closes = np.append(opens[1:], np.ones(min(1, len(token)), dtype=np.bool_))
    depth = table.position_ids[token]
    return depth[opens], depth[closes] + 1, row[segment[opens]]


def _lines(x0: ArrayLike, y0: ArrayLike, x1: ArrayLike, y1: ArrayLike) -> NDArray[np.float64]:
    """Return lines [n, 2, 2] from (x0, y0) to (x1, y1)."""
    return np.stack([np.stack([x0, y0], -1), np.stack([x1, y1], -1)], 1).astype(np.float64)
