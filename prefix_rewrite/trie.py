"""The radix tree of a list of calls, exact by comparison of ids: no hashing, no per-token loop.

Calls are sorted as byte strings, so calls with a common prefix are neighbours and the common
prefix of two neighbours says where the tree forks (as a suffix tree follows from a suffix array
and its LCP array: Kasai et al., 2001). Work is one comparison of bytes for each sorting step,
Python runs once a call.

Shapes: C calls, M radix nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefix_rewrite.calls import CapturedCall

NO_CALL = np.iinfo(np.int64).max


@dataclass
class RadixTree:
    """Runs of tokens between branches, in no particular order.

    Attributes:
        parent: [M] parent node, -1 for a root.
        begin: [M] depth of the node's first token.
        end: [M] depth of one past its last token.
        example: [M] a call that runs through the whole node.
        call_node: [C] a node at or below the one that holds the call's last token.
    """

    parent: list[int] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    example: list[int] = field(default_factory=list)
    call_node: list[int] = field(default_factory=list)

    def add(self, parent: int, begin: int, end: int, example: int) -> int:
        self.parent.append(parent)
        self.begin.append(begin)
        self.end.append(end)
        self.example.append(example)
        return len(self.parent) - 1


def build_radix_tree(calls: Sequence[CapturedCall]) -> RadixTree:
    """Share every common prefix of calls with equal ids, routing rows and provenance."""
    tree = RadixTree(call_node=[-1] * len(calls))
    for members in compatible_groups(calls):
        keys, width = _byte_keys(calls, members)
        order = sorted(range(len(members)), key=keys.__getitem__)
        _insert_sorted(tree, [members[i] for i in order], [keys[i] for i in order], width)
    return tree


def compatible_groups(calls: Sequence[CapturedCall]) -> list[list[int]]:
    """Group calls that may share at all: equal provenance, and equal shape of routing rows."""
    groups: dict[Hashable, list[int]] = {}
    for i, call in enumerate(calls):
        routes = None if call.routing is None else call.routing.shape[1:]
        groups.setdefault((call.provenance, routes), []).append(i)
    return list(groups.values())


def common_prefix(a: bytes, b: bytes) -> int:
    """Return the number of equal leading bytes."""
    size = min(len(a), len(b))
    left = np.frombuffer(a, dtype=np.uint8, count=size)
    different = left != np.frombuffer(b, dtype=np.uint8, count=size)
    at = int(different.argmax()) if size else 0
    return at if size and different[at] else size


def _byte_keys(calls: Sequence[CapturedCall], members: list[int]) -> tuple[list[bytes], int]:
    """Return each call as one record of `width` bytes a token: its id, then its routing row."""
    rows = [calls[i].routing for i in members]
    given = [row for row in rows if row is not None]
    if not given:
        return [calls[i].token_ids.tobytes() for i in members], 8
    dtype = np.result_type(*{row.dtype for row in given})
    width = 8 + dtype.itemsize * int(np.prod(given[0].shape[1:]))
    keys = []
    for i, row in zip(members, given, strict=True):
        ids = calls[i].token_ids
        record = np.empty((len(ids), width), dtype=np.uint8)
        record[:, :8] = ids.view(np.uint8).reshape(len(ids), 8)
        routes = np.ascontiguousarray(row, dtype=dtype).reshape(-1).view(np.uint8)
        record[:, 8:] = routes.reshape(len(ids), width - 8)
        keys.append(record.tobytes())
    return keys, width


def _insert_sorted(tree: RadixTree, calls: list[int], keys: list[bytes], width: int) -> None:
    path: list[int] = []  # the nodes that hold the previous call, root first
    previous = b""
    for call, key in zip(calls, keys, strict=True):
        shared = common_prefix(previous, key) // width
        below = -1
        while path and tree.begin[path[-1]] >= shared:
            below = path.pop()
        length = len(key) // width
        if path and shared < tree.end[path[-1]]:
            _split(tree, path, shared)
        elif path and shared < length and below < 0:
            # The previous call is a prefix of this one: no branch, so the run goes on.
            tree.end[path[-1]], tree.example[path[-1]] = length, call
            shared = length
        if shared < length:
            path.append(tree.add(path[-1] if path else -1, shared, length, call))
        tree.call_node[call] = path[-1]
        previous = key


def _split(tree: RadixTree, path: list[int], depth: int) -> None:
    """Cut the last node of the path at a depth; the path then ends with the upper part."""
    lower = path[-1]
    upper = tree.add(tree.parent[lower], tree.begin[lower], depth, tree.example[lower])
    tree.parent[lower], tree.begin[lower] = upper, depth
    path[-1] = upper
