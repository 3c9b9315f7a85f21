"""Which leaves of a forest go into which fragment, so that little is repeated.

A fragment is a set of leaves with their root paths; its size is the size of the union of the
paths. Fewest tokens in all is a bin packing with shared items, NP-hard, so several heuristics run
and the best plan wins; a bound that no plan can beat tells when to stop.

Sizes are pairs (tokens, attended pairs): both add up over tokens, and a path of d tokens has
d (d + 1) / 2 pairs. Two leaves that fork at depth h have `size(h)` in common.

Shapes: S segments, L leaves, F fragments.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prefix_rewrite.calls import BoolArray
from prefix_rewrite.order import children_of
from prefix_rewrite.segments import IntArray, SegmentTable

UNLIMITED = 2**62  # sums of sizes stay within int64
SHUFFLES = 64
SHUFFLED_SEGMENTS = 2**17  # bounds the time spent on shuffles, whatever the forest


@dataclass(frozen=True)
class Packing:
    """A plan: the leaves of each fragment, and the tokens of all fragments together."""

    leaves: list[list[int]]
    num_tokens: int

    @property
    def rank(self) -> tuple[int, int]:
        """Fewest tokens first, then fewest fragments."""
        return self.num_tokens, len(self.leaves)


@dataclass(frozen=True)
class LeafRow:
    """The leaves of a forest in one depth-first order.

    Attributes:
        leaf: [L] segment indices.
        end: [L] depth of one past each leaf's last token: the length of its path.
        fork: [L] depth up to which the leaf's path is that of the leaf before; 0 for the first.
    """

    leaf: list[int]
    end: IntArray
    fork: IntArray


def size(depth: IntArray) -> IntArray:
    """Return [..., 2] tokens and attended pairs of paths of `depth` tokens."""
    return np.stack([depth, depth * (depth + 1) // 2], axis=-1)


def pack_leaves(table: SegmentTable, budget: IntArray) -> Packing:
    """Return the best plan found; deterministic.

    Args:
        table: the forest.
        budget: [2] tokens and attended pairs that a fragment may have; each path fits.
    """
    bound = least_tokens(table, int(budget[0]))
    best: Packing | None = None
    for packing in _candidates(table, budget):
        if best is None or packing.rank < best.rank:
            best = packing
        if best.num_tokens == bound:
            break
    assert best is not None, "a forest always has a first-fit plan"
    return best


def least_tokens(table: SegmentTable, max_tokens: int) -> int:
    """Return a number of tokens that no plan within the budget can beat.

    Below a segment that ends at depth d, a fragment has room for `max_tokens - d` tokens, so the
    subtree needs at least its size over that room, in whole fragments, and each repeats the
    segment.
    """
    ends = table.depth + table.length
    below = table.subtree_end - table.start - table.length
    room = np.maximum(max_tokens - ends, 1)
    copies = np.maximum(-(-below // room), 1).tolist()
    parent = table.parent.tolist()
    for i in range(len(parent) - 1, 0, -1):
        if parent[i] != -1:
            copies[parent[i]] = max(copies[parent[i]], copies[i])
    return int((table.length * np.asarray(copies, dtype=np.int64)).sum())


def _candidates(table: SegmentTable, budget: IntArray) -> Iterator[Packing]:
    children = children_of(table.parent.tolist())
    roots = np.flatnonzero(table.parent == -1).tolist()
    row = _leaf_row(table, roots, children)
    yield pack_subtrees(table, budget)
    yield cut_row(row, budget)
    yield first_fit(row, budget)
    shuffle = random.Random(0).shuffle
    for _ in range(min(SHUFFLES, SHUFFLED_SEGMENTS // table.num_segments)):
        for siblings in (roots, *children):
            if len(siblings) > 1:
                shuffle(siblings)
        row = _leaf_row(table, roots, children)
        yield cut_row(row, budget)
        yield first_fit(row, budget)


def _leaf_row(table: SegmentTable, roots: list[int], children: list[list[int]]) -> LeafRow:
    leaf, fork = [], []
    stack = roots[::-1]
    after_leaf = True
    while stack:
        segment = stack.pop()
        if after_leaf:
            fork.append(segment)
        after_leaf = not children[segment]
        if after_leaf:
            leaf.append(segment)
        stack.extend(reversed(children[segment]))
    ends = table.depth + table.length
    return LeafRow(leaf, ends[leaf], table.depth[fork])


def first_fit(row: LeafRow, budget: IntArray) -> Packing:
    """Put each leaf of the row into the first fragment that has room for what it adds."""
    limited = budget < UNLIMITED
    limit = budget[limited, None]
    path, common = size(row.end).T[limited], size(row.fork).T[limited]
    used = np.zeros((len(limit), 0), dtype=np.int64)
    shared = used.copy()  # size of what the next leaf finds in each fragment
    opened = np.zeros_like(limit)
    leaves: list[list[int]] = []
    for i, leaf in enumerate(row.leaf):
        np.minimum(shared, common[:, i, None], out=shared)
        fits: BoolArray = np.all(used - shared <= limit - path[:, i, None], axis=0)
        f = int(np.argmax(fits)) if leaves else 0
        if not leaves or not fits[f]:
            f = len(leaves)
            leaves.append([])
            used, shared = np.hstack([used, opened]), np.hstack([shared, opened])
        used[:, f] += path[:, i] - shared[:, f]
        shared[:, f] = path[:, i]
        leaves[f].append(leaf)
    return Packing(leaves, int(used[0].sum()))


def cut_row(row: LeafRow, budget: IntArray) -> Packing:
    """Cut the row into runs of leaves: the fewest tokens, then the fewest runs, of this row.

    `best[j] = min_i best[i] + cost(run i..j)` over the runs that fit; their first leaves are a
    sliding window, so a monotone queue finds each minimum in constant time.
    """
    added = np.cumsum(size(row.end) - size(row.fork), axis=0)
    opened = size(row.end) - added  # run i..j has size opened[i] + added[j]
    fits_until = (budget - opened).tolist()
    tokens, pairs = added.T.tolist()
    scale = len(row.leaf) + 1  # one token costs more than all runs together
    head = (opened[:, 0] * scale + 1).tolist()
    best, first = [0], []
    queue: deque[tuple[int, int]] = deque()
    for j in range(len(row.leaf)):
        cost = best[j] + head[j]
        while queue and queue[-1][0] >= cost:
            queue.pop()
        queue.append((cost, j))
        while fits_until[queue[0][1]][0] < tokens[j] or fits_until[queue[0][1]][1] < pairs[j]:
            queue.popleft()
        best.append(queue[0][0] + tokens[j] * scale)
        first.append(queue[0][1])
    leaves, stop = [], len(row.leaf)
    while stop:
        start = first[stop - 1]
        leaves.append(row.leaf[start:stop])
        stop = start
    return Packing(leaves[::-1], best[-1] // scale)


def pack_subtrees(table: SegmentTable, budget: IntArray) -> Packing:
    """Pack from the leaves up: at each segment, merge the open fragments of its children.

    Each merge saves the path above, so the deepest merges come first; a subtree that fits is
    never torn apart.
    """
    sizes = size(table.depth + table.length) - size(table.depth)
    room = (budget - size(table.depth + table.length)).tolist()
    open_fragments: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(len(room) + 1)]
    parent = table.parent.tolist()
    for i, (tokens, pairs) in reversed(list(enumerate(sizes.tolist()))):
        packed = _merge(open_fragments[i], room[i]) or [(0, 0, [i])]
        open_fragments[i] = []
        open_fragments[parent[i]].extend((t + tokens, p + pairs, a) for t, p, a in packed)
    packed = _merge(open_fragments[-1], budget.tolist())  # the roots' parent is -1
    return Packing([leaves for _, _, leaves in packed], sum(tokens for tokens, _, _ in packed))


def _merge(
    items: list[tuple[int, int, list[int]]], room: list[int]
) -> list[tuple[int, int, list[int]]]:
    """Merge items (tokens, pairs, leaves), largest first, each into the first that has room."""
    if len(items) <= 1:
        return items
    items = sorted(items, key=lambda item: item[0], reverse=True)
    left = np.empty((len(items), 2), dtype=np.int64)
    leaves: list[list[int]] = []
    for tokens, pairs, members in items:
        opened = left[: len(leaves)]
        fits = (opened[:, 0] >= tokens) & (opened[:, 1] >= pairs)
        f = int(fits.argmax()) if len(fits) else 0
        if not len(fits) or not fits[f]:
            f = len(leaves)
            left[f] = room
            leaves.append(members)  # the longest list grows, so deep forests copy little
        else:
            leaves[f].extend(members)
        left[f] -= (tokens, pairs)
    used = (np.asarray(room) - left[: len(leaves)]).tolist()
    return [(t, p, members) for (t, p), members in zip(used, leaves, strict=True)]
