"""Forests, inputs, and both ways to run tree attention: the op, and a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from prefix_rewrite.ops.tree_attention import plan_attention, tree_attention
from prefix_rewrite.ops.tree_attention.blocks import Block
from prefix_rewrite.ops.tree_attention.plan import blocks_field, schedule
from prefix_rewrite.ops.tree_attention.reference import tree_attention_reference
from prefix_rewrite.ops.tree_attention.window import best_span, cut_to_window
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import SegmentTable

FORESTS: dict[str, tuple[list[int], list[int]]] = {
    "one_token": ([-1], [1]),
    "chain": ([-1, 0, 1], [5, 3, 4]),
    "star": ([-1, 0, 0, 0], [9, 4, 3, 6]),
    "equal_star": ([-1, 0, 0, 0, 0], [5, 4, 4, 4, 4]),
    "nested": ([-1, 0, 1, 1, 3, 3, 0], [7, 2, 3, 1, 2, 2, 5]),
    "light_child_first": ([-1, 0, 0, 2, 3, 3], [3, 1, 4, 2, 6, 1]),
    "many_roots": ([-1, -1, 1, 1, -1, -1], [5, 2, 2, 3, 6, 2]),
    "equal_roots": ([-1] * 6, [3] * 6),
    "one_token_segments": ([-1, 0, 1, 2, 2, 1, 0, 6, 6], [1] * 9),
    "fork_at_first_token": ([-1, 0, 0], [1, 40, 30]),
    "small_below_large": ([-1, 0, 1, 1, 0, 4, 4, 0, 0], [60, 3, 2, 2, 2, 3, 1, 1, 50]),
}
Inputs = tuple[Tensor, Tensor, Tensor]  # q, k, v
TILES = st.sampled_from([0, 1, 4, 16, 64])


@st.composite
def forests(draw: st.DrawFn) -> SegmentTable:
    """Any depth-first order, heaviest child first or not."""
    parent: list[int] = []
    path: list[int] = []
    for i in range(draw(st.integers(1, 24))):
        path = path[: draw(st.integers(0, len(path)))]
        parent.append(path[-1] if path else -1)
        path.append(i)
    sizes = st.sampled_from([1, 1, 2, 3, 5, 17])
    return SegmentTable.from_parents(parent, [draw(sizes) for _ in parent])


def table(name: str) -> SegmentTable:
    return SegmentTable.from_parents(*FORESTS[name])


def is_visible(segments: SegmentTable, window: int = 0) -> np.ndarray:
    """[T, T] by walking up from every token."""
    visible = np.zeros((segments.num_tokens,) * 2, dtype=bool)
    for t, above in enumerate(segments.parent_token.tolist()):
        if above >= 0:
            visible[t] = visible[above]
        visible[t, t] = True
    if window:
        depth = segments.position_ids
        visible &= depth[:, None] - depth < window
    return visible


def packed(
    segments: SegmentTable, tile: int | None = None, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Pack the planned schedule, or the one of a given tile size."""
    plan = plan_attention(segments, window)
    if tile is not None:
        blocks = schedule(segments, tile)
        if window:
            blocks = cut_to_window(blocks, segments.position_ids, window, best_span(window))
        plan[blocks_field(window)] = blocks
    return pack_plan(plan, "cpu")


def qkv(
    num_tokens: int,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    q, k, v = (
        torch.randn(1, n, num_tokens, d, generator=generator, dtype=torch.float64)
        for n, d in shapes
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


def with_grads(out: Tensor, inputs: tuple[Tensor, ...], seed: int = 1) -> list[Tensor]:
    """Return the output and every gradient of a random projection of it, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, inputs, grad.to(out)))]


def leaves_of(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    q, k, v = (x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs)
    return q, k, v


def run(
    segments: SegmentTable,
    inputs: Inputs,
    scale: float = 0.3,
    tile: int | None = None,
    sinks: Tensor | None = None,
    **modifiers: Any,
) -> list[Tensor]:
    """Output and gradients of q, k, v and of sinks where given."""
    leaves: tuple[Tensor, ...] = leaves_of(inputs)
    if sinks is not None:
        modifiers["sinks"] = sinks.detach().requires_grad_()
        leaves = (*leaves, modifiers["sinks"])
    plan = packed(segments, tile, modifiers.get("window", 0))
    return with_grads(tree_attention(*leaves[:3], *plan, scale, **modifiers), leaves)


def run_reference(
    segments: SegmentTable,
    inputs: Inputs,
    scale: float = 0.3,
    sinks: Tensor | None = None,
    **modifiers: Any,
) -> list[Tensor]:
    leaves: tuple[Tensor, ...] = leaves_of(inputs, torch.float64)
    if sinks is not None:
        modifiers["sinks"] = sinks.detach().double().requires_grad_()
        leaves = (*leaves, modifiers["sinks"])
    parents = segments.parent_token.tolist()
    out = tree_attention_reference(*leaves[:3], parents, scale, **modifiers)
    return with_grads(out, leaves)


def assert_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Compare in norm, relative where it is above 1: a gradient may be exactly zero."""
    names = ("out", "dq", "dk", "dv", "dsinks")
    for name, a, b in zip(names[: len(expected)], got, expected, strict=True):
        assert a.shape == b.shape, name
        error = ((a - b).norm() / b.norm().clamp_min(1.0)).item()
        assert error <= tolerance, f"{name}: error {error:.1e}"


def pairs_of(block: Block) -> Iterator[tuple[slice, slice]]:
    num_queries = (block.q1 - block.q0) // block.num_squares
    num_keys = (block.k1 - block.k0) // block.num_squares
    for i in range(block.num_squares):
        q, k = block.q0 + i * num_queries, block.k0 + i * num_keys
        yield slice(q, q + num_queries), slice(k, k + num_keys)


def assert_covers_each_pair_once(
    segments: SegmentTable, blocks: np.ndarray, window: int = 0
) -> None:
    """And every query of a block sees a key in it."""
    visible, in_subtree = is_visible(segments, window), is_visible(segments)
    times = np.zeros(visible.shape, dtype=int)
    for block in (Block(*row) for row in blocks.tolist()):
        for q, k in pairs_of(block):
            square = np.ones_like(times[q, k])
            assert square.size and (not block.on_diagonal or q == k)
            pairs = [np.tril(square), square, in_subtree[q, k]][block.kind]
            if block.windowed:
                pairs = pairs * visible[q, k]
            assert pairs.any(1).all()
            times[q, k] += pairs
    np.testing.assert_array_equal(times, visible)
