"""Segment tables of every shape a forest can have, and what tests of tree ops compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from prefix_rewrite.segments import SegmentTable

Inputs = Mapping[str, Tensor]

# Lengths around a chunk of 64 and around two, and the least.
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 255, 257)

TABLES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "one_token": ([-1], [1]),
    "short": ([-1, 0], [1, 2]),
    "chain": ([-1, 0, 1, 2], [5, 3, 64, 60]),
    "star": ([-1, 0, 0, 0, 0], [150, 70, 3, 64, 6]),
    "nested": ([-1, 0, 1, 1, 3, 3, 0], [7, 2, 3, 1, 2, 2, 5]),
    "nested_wide": ([-1, 0, 1, 1, 3, 3, 0], [67, 2, 80, 65, 2, 66, 5]),
    "fork_in_chunk": ([-1, 0, 0, 2, 2], [70, 3, 66, 2, 9]),
    "fork_in_conv": ([-1, 0, 1, 1, 3, 3, 0], [2, 1, 1, 1, 1, 2, 1]),
    "many_roots": ([-1, -1, 1, 1, -1, -1, 5], [5, 2, 2, 3, 66, 2, 70]),
    "one_token_segments": ([-1, *(i for k in range(8) for i in (2 * k, 2 * k))], [1] * 17),
    "tiny": ([-1, *(i // 3 for i in range(40))], [4] * 41),
}


def table(name: str) -> SegmentTable:
    parent, length = TABLES[name]
    return preorder(parent, length)


def preorder(parent: Sequence[int], length: Sequence[int]) -> SegmentTable:
    """Lay segments out in depth-first order; any `parent[i] < i`."""
    children: dict[int, list[int]] = {}
    for i, p in enumerate(parent):
        children.setdefault(p, []).append(i)
    order: list[int] = []
    pending = children.get(-1, [])[::-1]
    while pending:
        i = pending.pop()
        order.append(i)
        pending += children.get(i, [])[::-1]
    rank = {segment: k for k, segment in enumerate(order)} | {-1: -1}
    return SegmentTable.from_parents([rank[parent[i]] for i in order], [length[i] for i in order])


@st.composite
def tables(draw: st.DrawFn, max_segments: int = 12) -> SegmentTable:
    """Any forest, with lengths on both sides of the conv's reach and of a chunk."""
    parent = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, max_segments)))]
    sizes = st.sampled_from([1, 1, 2, 3, 5, 17, 31, 64, 67])
    return preorder(parent, [draw(sizes) for _ in parent])


def with_grads(
    function: Callable[..., Tensor], inputs: Inputs, seed: int = 1
) -> dict[str, Tensor]:
    """Return the output, and every gradient of a random projection of it."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = function(**leaves)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    grads = torch.autograd.grad(out, list(leaves.values()), noise.to(out))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value expected."""
    assert got.shape == expected.shape, f"{tuple(got.shape)} for {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    difference = (got.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-30))


def assert_close(got: Inputs, expected: Inputs, tolerance: float) -> None:
    assert got.keys() == expected.keys()
    errors = {name: relative_error(got[name], expected[name]) for name in got}
    assert max(errors.values()) <= tolerance, errors


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
