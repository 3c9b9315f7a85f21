"""Tree attention equals a plain loop over visible keys, whatever the forest and the schedule."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention import (
    FORESTS,
    TILES,
    Inputs,
    assert_close,
    assert_covers_each_pair_once,
    forests,
    is_visible,
    leaves_of,
    packed,
    qkv,
    run,
    run_reference,
    table,
    with_grads,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.tree_attention import attention_backend, plan_attention, tree_attention
from prefix_rewrite.ops.tree_attention import op as op_module
from prefix_rewrite.ops.tree_attention.blocks import (
    CAUSAL,
    FULL,
    Block,
    blocks_array,
    schedule_cost,
)
from prefix_rewrite.ops.tree_attention.merge import merge_rectangles
from prefix_rewrite.ops.tree_attention.plan import (
    BLOCKS,
    DEPTH,
    SUBTREE_END,
    TILE_SIZES,
    _rectangles,
    schedule,
)
from prefix_rewrite.ops.tree_attention.reference import tree_attention_reference
from prefix_rewrite.ops.tree_attention.scores import Scores
from prefix_rewrite.order import heavy_first_order
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import SegmentTable


def run_dense(segments: SegmentTable, inputs: Inputs, scale: float = 0.3) -> list[Tensor]:
    """Plain SDPA under a dense mask, in the inputs' own dtype: the yardstick of rounding."""
    q, k, v = leaves = leaves_of(inputs)
    mask = torch.from_numpy(is_visible(segments))
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return with_grads(out.transpose(1, 2), leaves)


# Plans.


@pytest.mark.parametrize("name", FORESTS)
def test_planned_blocks_cover_each_visible_pair_once(name: str) -> None:
    assert_covers_each_pair_once(table(name), plan_attention(table(name))[BLOCKS])


@settings(deadline=None, max_examples=150)
@given(forests(), TILES)
def test_any_tile_covers_each_visible_pair_of_any_forest_once(
    segments: SegmentTable, tile: int
) -> None:
    assert_covers_each_pair_once(segments, schedule(segments, tile))


@settings(deadline=None, max_examples=50)
@given(forests())
def test_plan_is_the_cheapest_schedule(segments: SegmentTable) -> None:
    costs = [schedule_cost(schedule(segments, tile)) for tile in TILE_SIZES]
    assert schedule_cost(plan_attention(segments)[BLOCKS]) == min(costs)


def test_chain_of_any_number_of_segments_is_one_block() -> None:
    count = 100_000
    segments = SegmentTable.from_parents(list(range(-1, count - 1)), [1] * count)
    plan = plan_attention(segments)
    assert plan[BLOCKS].tolist() == [[0, 0, count, 0, count, 1, 0]]


def comb() -> SegmentTable:
    """40 long segments with one long light child each: nothing is small, all teeth are equal."""
    return SegmentTable.from_parents([*range(-1, 39), *range(38, -1, -1)], [300] * 79)


def test_heavy_first_comb_takes_one_square_for_the_chain_and_one_for_the_teeth() -> None:
    blocks = schedule(comb(), 256)
    assert blocks[blocks[:, 0] == CAUSAL][:, 5].tolist() == [1, 39]
    assert (blocks[:, 0] == FULL).sum() <= 2 * 39


def test_neighbours_that_share_keys_are_computed_together() -> None:
    segments = comb()
    alone = _rectangles(segments, np.zeros(79, dtype=bool))
    joined = merge_rectangles(alone)
    assert len(alone) == 39 and (alone[:, 2] - alone[:, 1] == 300).all()
    area = (joined[:, 2] - joined[:, 1]) * (joined[:, 4] - joined[:, 3])
    assert area.sum() == (300 * (alone[:, 4] - alone[:, 3])).sum()
    assert area[joined[:, 2] - joined[:, 1] >= 768].sum() > 0.8 * area.sum()
    assert schedule_cost(joined) < 0.9 * schedule_cost(alone)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 3000)), min_size=1, max_size=12))
def test_joined_rectangles_cover_the_same_pairs_at_no_higher_cost(
    steps: list[tuple[int, int]],
) -> None:
    rows, keys = np.array(steps).T
    q1 = 3000 + np.cumsum(rows)
    alone = blocks_array(FULL, q1 - rows, q1, np.zeros_like(keys), keys)
    joined = merge_rectangles(alone)
    assert schedule_cost(joined) <= schedule_cost(alone)
    for (_, q0, end, *_), count in zip(alone.tolist(), keys.tolist(), strict=True):
        mine = joined[(joined[:, 1] <= q0) & (joined[:, 2] >= end)]
        mine = mine[np.argsort(mine[:, 3])]
        assert mine[0, 3] == 0 and mine[-1, 4] == count
        assert (mine[1:, 3] == mine[:-1, 4]).all()


@pytest.mark.parametrize("backend_name", ["cpu_flash", "blockwise"])
def test_joined_rectangles_equal_the_plain_loop(
    backend_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_module, "attention_backend", lambda *_: backend_name)
    segments = SegmentTable.from_parents([*range(-1, 5), *range(4, -1, -1)], [90] * 6 + [8] * 5)
    blocks = plan_attention(segments)[BLOCKS]
    assert any(b[0] == FULL and b[2] - b[1] > 8 for b in blocks.tolist()), "nothing is joined"
    inputs = qkv(segments.num_tokens)
    assert_close(run(segments, inputs), run_reference(segments, inputs), 1e-12)


def test_thousand_tiny_segments_are_far_fewer_blocks() -> None:
    rng = random.Random(0)
    parent = [-1, *(rng.randrange(i) for i in range(1, 1000))]
    order = heavy_first_order(parent, [4] * 1000, range(1000))
    rank = {segment: i for i, segment in enumerate(order)} | {-1: -1}
    segments = SegmentTable.from_parents([rank[parent[i]] for i in order], [4] * 1000)
    assert len(plan_attention(segments)[BLOCKS]) < segments.num_segments / 4


# Outputs and gradients.


@pytest.mark.parametrize("tile", [None, 0, 4, 64])
@pytest.mark.parametrize("name", FORESTS)
def test_equals_plain_loop(name: str, tile: int | None, backend: str) -> None:
    segments = table(name)
    inputs = qkv(segments.num_tokens)
    assert_close(run(segments, inputs, tile=tile), run_reference(segments, inputs), 1e-12)


@settings(deadline=None, max_examples=25)
@given(forests(), TILES, st.sampled_from(["cpu_flash", "blockwise"]), st.integers(0, 2**32))
def test_equals_plain_loop_on_random_forests(
    segments: SegmentTable, tile: int, name: str, seed: int
) -> None:
    inputs = qkv(segments.num_tokens, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_module, "attention_backend", lambda *_: name)
        got = run(segments, inputs, tile=tile)
    assert_close(got, run_reference(segments, inputs), 1e-12)


@functools.cache
def odd_sizes(size: int) -> list[tuple[SegmentTable, Inputs, list[Tensor]]]:
    """A root of that size, whole and forked at its middle, beside a one-token root."""
    cases = []
    for parent, length in (
        ([-1, -1], [size, 1]),
        ([-1, 0, 0, -1], [max(1, size // 2), (size + 1) // 2, 3, 1]),
    ):
        segments = SegmentTable.from_parents(parent, length)
        inputs = qkv(segments.num_tokens, (1, 1), (4, 4))
        cases.append((segments, inputs, run_reference(segments, inputs)))
    return cases


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 1025])
def test_equals_plain_loop_at_odd_sizes(size: int, backend: str) -> None:
    for segments, inputs, expected in odd_sizes(size):
        assert_close(run(segments, inputs), expected, 1e-12)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (6, 3), (8, 2), (5, 1)])
def test_query_heads_share_key_heads(heads: tuple[int, int], backend: str) -> None:
    segments = table("nested")
    inputs = qkv(segments.num_tokens, heads)
    for tile in (0, 64):
        assert_close(run(segments, inputs, tile=tile), run_reference(segments, inputs), 1e-12)


@pytest.mark.parametrize(
    "dims",
    [(1, 1), (16, 16), (33, 33), (64, 64), (80, 80), (128, 128), (255, 255), (256, 256)]
    + [(16, 24), (24, 16), (5, 1), (192, 128)],
)
def test_any_head_size(dims: tuple[int, int], backend: str) -> None:
    segments = table("nested")
    inputs = qkv(segments.num_tokens, (4, 2), dims)
    for tile in (0, 64):
        got = run(segments, inputs, tile=tile)
        assert_close(got, run_reference(segments, inputs), 1e-12)


@pytest.mark.parametrize("scale", [1.0, 0.0078125, 7.0])
def test_scale_is_honoured(scale: float, backend: str) -> None:
    segments = table("star")
    inputs = qkv(segments.num_tokens)
    assert_close(run(segments, inputs, scale), run_reference(segments, inputs, scale), 1e-12)


def test_scores_far_beyond_the_exponent_range(backend: str) -> None:
    segments = table("nested")
    q, k, v = qkv(segments.num_tokens)
    inputs = (q * 100, k * 100, v)
    assert_close(run(segments, inputs), run_reference(segments, inputs), 1e-10)


@pytest.mark.parametrize("name", ["nested", "small_below_large", "equal_star"])
def test_fp32_is_exact_to_rounding(name: str, backend: str) -> None:
    segments = table(name)
    inputs = qkv(segments.num_tokens, dims=(64, 64), dtype=torch.float32)
    assert_close(run(segments, inputs, 0.125), run_reference(segments, inputs, 0.125), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["nested", "small_below_large", "equal_star"])
def test_halves_err_no_more_than_the_plain_op(name: str, dtype: torch.dtype, backend: str) -> None:
    segments = table(name)
    inputs = qkv(segments.num_tokens, dims=(64, 64), dtype=dtype)
    exact = run_reference(segments, inputs, 0.125)
    ours, plain = run(segments, inputs, 0.125), run_dense(segments, inputs, 0.125)
    for x, a, b in zip(exact, ours, plain, strict=True):
        assert (a - x).norm() <= 1.25 * (b - x).norm()


def test_result_has_the_dtype_of_v_and_gradients_that_of_their_inputs(backend: str) -> None:
    segments = table("star")
    q, k, v = qkv(segments.num_tokens, dtype=torch.float32)
    inputs = (q.requires_grad_(), k.requires_grad_(), v.bfloat16().requires_grad_())
    out = tree_attention(*inputs, *packed(segments), 0.3)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert [x.grad.dtype for x in inputs if x.grad is not None] == [x.dtype for x in inputs]


def test_keys_without_a_query_are_attended_by_rectangles(backend: str) -> None:
    """As on one of several ranks: the 9-token root's keys lie behind its leaves' own."""
    segments = table("star")
    leaf_tokens = segments.num_tokens - 9
    inputs = qkv(segments.num_tokens)
    squares = [Block(0, 0, 4, 0, 4), Block(0, 4, 7, 4, 7), Block(0, 7, 13, 7, 13)]
    blocks = np.array([*squares, Block(1, 0, 13, 13, 22)])
    moved = np.roll(np.arange(segments.num_tokens), -9)
    end, depth = np.full((2, segments.num_tokens), 99)
    plan = pack_plan({BLOCKS: blocks, SUBTREE_END: end, DEPTH: depth}, "cpu")
    leaves = leaves_of(inputs)
    q, k, v = (x[:, :, moved] for x in leaves)
    out = tree_attention(q[:, :, :leaf_tokens], k, v, *plan, 0.3)
    parents = segments.parent_token.tolist()
    exact = tree_attention_reference(*leaves, parents, 0.3)[:, 9:]
    assert_close(with_grads(out, leaves), with_grads(exact, leaves), 1e-12)


def test_autocast_does_not_reach_inside(backend: str) -> None:
    segments = table("nested")
    inputs = qkv(segments.num_tokens, dtype=torch.float32)
    expected = run(segments, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(segments, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# Strides.


def fused(num_tokens: int) -> Iterator[tuple[str, Inputs]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, num_tokens, 8, 8, generator=generator, dtype=torch.float64)
    yield "slices of a fused [1, T, N, D]", x.transpose(1, 2).split([4, 2, 2], 1)
    x = torch.randn(1, 8, 8, num_tokens, generator=generator, dtype=torch.float64)
    yield "stride in the last dim", x.mT.split([4, 2, 2], 1)
    q, k, v = qkv(num_tokens)
    yield "expanded heads", (q, k[:, :1].expand(1, 2, -1, -1), v[:, :1].expand(1, 2, -1, -1))
    yield (
        "every second element",
        (
            q.repeat_interleave(2, -1)[..., ::2],
            k.repeat_interleave(2, 2)[:, :, ::2],
            v.repeat_interleave(2, 1)[:, ::2],
        ),
    )


@pytest.mark.parametrize("tile", [0, 64])
def test_any_strides(tile: int, backend: str) -> None:
    segments = table("equal_star")
    for what, inputs in fused(segments.num_tokens):
        assert not all(x.is_contiguous() for x in inputs), what
        leaves = leaves_of(inputs)
        assert [x.stride() for x in leaves] == [x.stride() for x in inputs]
        out = tree_attention(*leaves, *packed(segments, tile), 0.3)
        assert out.is_contiguous()
        assert_close(with_grads(out, leaves), run_reference(segments, inputs), 1e-12)


def test_expanded_gradient(backend: str) -> None:
    segments = table("nested")
    leaves = leaves_of(qkv(segments.num_tokens))
    got = torch.autograd.grad(tree_attention(*leaves, *packed(segments), 0.3).sum(), leaves)
    parents = segments.parent_token.tolist()
    exact = torch.autograd.grad(tree_attention_reference(*leaves, parents, 0.3).sum(), leaves)
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Isolation.


@pytest.mark.parametrize("tile", [0, 4, 64])
@pytest.mark.parametrize("name", ["star", "nested", "many_roots", "small_below_large"])
def test_a_sibling_changes_no_bit_and_gets_no_gradient(name: str, tile: int, backend: str) -> None:
    segments = table(name)
    visible, plan = torch.from_numpy(is_visible(segments)), packed(segments, tile)
    inputs = qkv(segments.num_tokens, dtype=torch.float32)
    out = tree_attention(*inputs, *plan, 0.3)
    for i in range(segments.num_segments):
        tokens = torch.arange(segments.num_tokens)
        own = (tokens >= segments.start[i]) & (tokens < segments.start[i] + segments.length[i])
        sees_own = visible[:, own].any(1)
        shift = torch.where(own, 3.0, 0.0)[:, None]
        leaves = leaves_of((inputs[0] + shift, inputs[1] + shift, inputs[2] + shift))
        changed = tree_attention(*leaves, *plan, 0.3)
        assert torch.equal(changed[:, ~sees_own], out[:, ~sees_own])
        assert not torch.equal(changed[:, sees_own], out[:, sees_own])
        if sees_own.all():
            continue
        grads = torch.autograd.grad(changed[:, ~sees_own].square().sum(), leaves)
        assert not any(grad[:, :, own].any() for grad in grads)


def test_runs_are_repeatable_bit_by_bit(backend: str) -> None:
    segments = table("small_below_large")
    inputs = qkv(segments.num_tokens, dtype=torch.float32)
    for a, b in zip(run(segments, inputs), run(segments, inputs), strict=True):
        assert torch.equal(a, b)


# As an operator.


@pytest.mark.parametrize(
    "dtype, dims", [(torch.float64, (8, 8)), (torch.bfloat16, (8, 5))], ids=str
)
def test_is_a_lawful_operator(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    segments = table("nested")
    inputs = leaves_of(qkv(segments.num_tokens, dims=dims, dtype=dtype))
    op = torch.ops.prefix_rewrite.tree_attention.default
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(op, (*inputs, None, *packed(segments), 0.3, 0, 0.0))
    torch.library.opcheck(op, (*inputs, sinks, *packed(segments, window=3), 0.3, 3, 2.0))


def test_only_some_inputs_need_a_gradient() -> None:
    segments = table("nested")
    q, k, v = qkv(segments.num_tokens)
    expected = run_reference(segments, (q, k, v))
    k.requires_grad_()
    out = tree_attention(q, k, v, *packed(segments), 0.3)
    torch.testing.assert_close(with_grads(out, (k,))[1], expected[2], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend_name", ["aot_eager", "inductor"])
def test_one_compile_serves_every_forest(
    backend_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    weight = qkv(64, (1, 1), (16, 16))[0][0, 0].requires_grad_()

    def attend(x: Tensor, host_plan: Tensor, device_plan: Tensor) -> Tensor:
        q, k, v = (x @ weight.T).view(1, -1, 8, 8).transpose(1, 2).split([4, 2, 2], 1)
        return tree_attention(q, k, v, host_plan, device_plan, 0.3) * 2

    compiled = torch.compile(attend, backend=backend_name, dynamic=True, fullgraph=True)
    for step, name in enumerate(["nested", "star", "small_below_large", "many_roots"]):
        segments = table(name)
        x = qkv(segments.num_tokens, (1, 1), (16, 16))[0][0]
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            got = with_grads(compiled(x, *packed(segments)), (weight,))
        expected = with_grads(attend(x, *packed(segments)), (weight,))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Remember the most elements of any tensor that an op returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("tile", [0, 64])
def test_no_tensor_grows_faster_than_the_tokens(
    tile: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a star, with the plain executor's score budget far below T x T."""
    monkeypatch.setattr("prefix_rewrite.ops.tree_attention.blockwise.MAX_SCORES", 2**13)
    executor = op_module._EXECUTORS[backend]
    for prompt in (64, 128, 256):
        segments = SegmentTable.from_parents([-1] + [0] * 8, [prompt] + [prompt // 8] * 8)
        num_tokens = segments.num_tokens
        q, k, v = (x[0] for x in qkv(num_tokens, (2, 2), (8, 8), torch.float32))
        blocks = [Block(*row) for row in schedule(segments, tile).tolist()]
        plan = plan_attention(segments)
        rule = Scores(torch.from_numpy(plan[SUBTREE_END]), torch.from_numpy(plan[DEPTH]), 0.3)
        with LargestTensor() as largest:
            out, lse = executor.forward(q, k, v, blocks, rule)
            executor.backward(out, q, k, v, out, lse, blocks, rule)
        assert largest.numel <= max(2 * 8 * num_tokens, 2**13)


# Queries and errors.


def test_backend_is_told_by_device() -> None:
    assert attention_backend("cpu", torch.float32, 64, 64) == "cpu_flash"
    assert attention_backend("cpu", torch.bfloat16, 192, 128) == "cpu_flash"
    assert attention_backend("cuda", torch.float32, 64, 64) == "blockwise"


def test_plan_of_another_forest_is_refused() -> None:
    inputs = qkv(table("star").num_tokens)
    with pytest.raises(LayoutError, match=r"as many tokens as the queries, got 20 and 22"):
        tree_attention(*inputs, *packed(table("many_roots")), 0.3)
    tree_attention(*inputs, *packed(table("star")), 0.3)


@pytest.mark.parametrize(
    "heads, dims, batch", [((3, 2), (8, 8), 1), ((4, 2), (8, 8), 2), ((1, 2), (8, 8), 1)]
)
def test_shapes_that_do_not_fit_are_refused(
    heads: tuple[int, int], dims: tuple[int, int], batch: int
) -> None:
    segments = table("star")
    q, k, v = (x.expand(batch, -1, -1, -1) for x in qkv(segments.num_tokens, heads, dims))
    with pytest.raises(LayoutError, match="N a multiple of K"):
        tree_attention(q, k, v, *packed(segments), 0.3)


@pytest.mark.parametrize("scale", [0.0, -0.3, float("nan")])
def test_scale_that_is_not_positive_is_refused(scale: float) -> None:
    with pytest.raises(LayoutError, match="scale must be positive"):
        tree_attention(*qkv(22), *packed(table("star")), scale)
