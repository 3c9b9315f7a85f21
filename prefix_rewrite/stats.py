"""Counts of a forest: tokens, sharing, branching, work.

Shapes: C calls, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prefix_rewrite.segments import IntArray, SegmentTable

if TYPE_CHECKING:
    from prefix_rewrite.forest import PrefixForest


@dataclass(frozen=True)
class ForestStats:
    """What a forest holds.

    Attributes:
        num_calls: captured calls; of a forest made of a graph, its nodes.
        num_logical_tokens: tokens of all calls, each counted on its own.
        num_tokens: physical tokens.
        num_edges: sampled edges, each owned once.
        num_segments: runs of tokens without a branch.
        num_roots: segments without a parent.
        num_leaves: segments without a child.
        num_branch_points: segments with at least two children.
        max_fan_out: children of the widest segment.
        max_branch_depth: branch points on the path that has most of them.
        longest_path: tokens of the longest root path.
        num_path_tokens: tokens of all root-to-leaf paths, each counted on its own.
        attended_pairs: (query, key) pairs of causal attention on the forest.
        logical_attended_pairs: the same for each call on its own.
    """

    num_calls: int
    num_logical_tokens: int
    num_tokens: int
    num_edges: int
    num_segments: int
    num_roots: int
    num_leaves: int
    num_branch_points: int
    max_fan_out: int
    max_branch_depth: int
    longest_path: int
    num_path_tokens: int
    attended_pairs: int
    logical_attended_pairs: int

    @property
    def sharing(self) -> float:
        """Logical tokens a physical token stands for, 1.0 without any sharing."""
        return self.num_logical_tokens / self.num_tokens if self.num_tokens else 1.0


def count_forest(forest: PrefixForest) -> ForestStats:
    """Count what a forest holds; linear in its segments and calls."""
    table, calls = forest.segments, forest.call_length
    children = np.bincount(table.parent[table.parent >= 0], minlength=table.num_segments)
    ends = table.depth + table.length
    is_leaf = children == 0
    return ForestStats(
        num_calls=forest.num_calls,
        num_logical_tokens=int(calls.sum()),
        num_tokens=forest.num_tokens,
        num_edges=forest.num_edges,
        num_segments=table.num_segments,
        num_roots=int((table.parent == -1).sum()),
        num_leaves=int(is_leaf.sum()),
        num_branch_points=int((children > 1).sum()),
        max_fan_out=int(children.max(initial=0)),
        max_branch_depth=int(_branch_depth(table, children).max(initial=0)),
        longest_path=int(ends.max(initial=0)),
        num_path_tokens=int(ends[is_leaf].sum()),
        attended_pairs=table.num_attended_pairs,
        logical_attended_pairs=int((calls * (calls + 1) // 2).sum()),
    )


def _branch_depth(table: SegmentTable, children: IntArray) -> IntArray:
    """Return [S] the branch points on each segment's path, itself included."""
    depth = (children > 1).tolist()
    for i, above in enumerate(table.parent.tolist()):
        if above != -1:
            depth[i] += depth[above]
    return np.asarray(depth, dtype=np.int64)
