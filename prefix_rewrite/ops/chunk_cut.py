"""Cut a forest in chunks: stretches of chain-merged segments, and tiles of small subtrees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefix_rewrite.segments import IntArray, SegmentTable


@dataclass(frozen=True)
class Chunks:
    """Chunks in order of creation: parents come before their children; roots have parent -1."""

    start: IntArray
    length: IntArray
    parent: IntArray
    level: IntArray


def cut_chunks(segments: SegmentTable, size: int, collapse: bool) -> Chunks:
    """Cut chain-merged segments in chunks, and small sibling subtrees in tiles."""
    start, end, subtree_end, parent = _merge_chains(segments)
    small = (subtree_end - start <= size) & collapse
    cut = np.flatnonzero(~small)
    count = -(-(end - start)[cut] // size)
    last = np.full(len(start), -1)
    last[cut] = np.cumsum(count) - 1  # the last chunk of each run that is cut
    first = last[cut] - count + 1
    step = np.arange(count.sum()) - np.repeat(first, count)
    chunk_start = np.repeat(start[cut], count) + step * size
    chunk_end = np.minimum(chunk_start + size, np.repeat(end[cut], count))
    parent_chunk = np.where(parent >= 0, last[parent], -1)
    chunk_parent = np.arange(-1, len(step) - 1)
    chunk_parent[first] = parent_chunk[cut]
    level = np.repeat(_first_levels(parent_chunk[cut], first, count), count) + step

    top = np.flatnonzero(small & ((parent < 0) | ~small[parent]))
    tiles = _tiles(start[top], subtree_end[top], parent_chunk[top], size)
    tile_level = np.where(tiles[2] >= 0, level[tiles[2]] + 1, 0) if len(level) else 0 * tiles[2]
    return Chunks(
        start=np.concatenate([chunk_start, tiles[0]]),
        length=np.concatenate([chunk_end - chunk_start, tiles[1] - tiles[0]]),
        parent=np.concatenate([chunk_parent, tiles[2]]),
        level=np.concatenate([level, tile_level]),
    )


def _merge_chains(segments: SegmentTable) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Merge only children into their parents: (start, end, subtree end, parent) of the runs."""
    parent = segments.parent
    children = np.bincount(parent[parent >= 0], minlength=len(parent))
    is_head = parent < 0
    is_head[~is_head] = children[parent[~is_head]] != 1
    head = np.flatnonzero(is_head)  # an only child directly follows its parent
    run = np.cumsum(is_head) - 1
    start = segments.start[head]
    end = np.append(start[1:], segments.num_tokens)[: len(start)]
    head_parent = parent[head]
    return start, end, segments.subtree_end[head], np.where(head_parent >= 0, run[head_parent], -1)


def _first_levels(parent_chunk: IntArray, first: IntArray, count: IntArray) -> IntArray:
    """Level of the first chunk of each run; `parent_chunk` is the last chunk of its parent."""
    last_level: dict[int, int] = {-1: -1}
    levels = []
    for parent, lo, num in zip(parent_chunk.tolist(), first.tolist(), count.tolist(), strict=True):
        level = last_level[parent] + 1
        levels.append(level)
        last_level[lo + num - 1] = level + num - 1
    return np.asarray(levels, dtype=np.int64)


def _tiles(start: IntArray, end: IntArray, parent: IntArray, size: int) -> IntArray:
    """Pack neighbouring siblings greedily: [3, tiles] start, end, parent chunk."""
    tiles: list[list[int]] = []
    for lo, hi, p in zip(start.tolist(), end.tolist(), parent.tolist(), strict=True):
        if tiles and tiles[-1][1] == lo and tiles[-1][2] == p and hi - tiles[-1][0] <= size:
            tiles[-1][1] = hi
        else:
            tiles.append([lo, hi, p])
    return np.asarray(tiles, dtype=np.int64).reshape(-1, 3).T
