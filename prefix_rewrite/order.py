"""The depth-first order in which the segments of a forest are laid out.

Shapes: M nodes in any order.
"""

from __future__ import annotations

from collections.abc import Sequence


def topological_order(parent: Sequence[int]) -> list[int]:
    """Return nodes with parents before children; nodes on or below a cycle are left out."""
    children = children_of(parent)
    order = [node for node, above in enumerate(parent) if above == -1]
    for node in order:  # grows while it is read
        order.extend(children[node])
    return order


def children_of(parent: Sequence[int]) -> list[list[int]]:
    """Return each node's children, in order of their index."""
    children: list[list[int]] = [[] for _ in parent]
    for node, above in enumerate(parent):
        if above != -1:
            children[above].append(node)
    return children


def heavy_first_order(
    parent: Sequence[int], length: Sequence[int], rank: Sequence[int]
) -> list[int]:
    """Return a depth-first preorder with the heaviest child first.

    Heavy paths are then contiguous, so any root path is at most log2(T) + 1 intervals of tokens
    (Sleator and Tarjan, 1983). Roots keep the caller's order.

    Args:
        parent: [M] parent of each node, -1 for a root; no cycles.
        length: [M] tokens of each node.
        rank: [M] first use of each node by the caller; a subtree ranks as its first member.
    """
    weight, first = list(length), list(rank)
    for node in reversed(topological_order(parent)):
        above = parent[node]
        if above != -1:
            weight[above] += weight[node]
            first[above] = min(first[above], first[node])
    children = children_of(parent)
    stack = [node for node, above in enumerate(parent) if above == -1]
    stack.sort(key=first.__getitem__, reverse=True)
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(sorted(children[node], key=lambda i: (weight[i], -first[i])))
    return order
