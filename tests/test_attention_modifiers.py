"""Windows, soft caps and sinks of tree attention equal a plain loop, forward and backward."""

from __future__ import annotations

import pytest
import torch
from attention import (
    FORESTS,
    TILES,
    assert_close,
    assert_covers_each_pair_once,
    forests,
    leaves_of,
    packed,
    qkv,
    run,
    run_reference,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.mixers.attention import for_window
from prefix_rewrite.ops.tree_attention import op as op_module
from prefix_rewrite.ops.tree_attention import plan_attention, tree_attention
from prefix_rewrite.ops.tree_attention.plan import blocks_field, schedule
from prefix_rewrite.ops.tree_attention.window import cut_to_window
from prefix_rewrite.segments import SegmentTable

WINDOWS = (1, 2, 3, 6, 11, 100)
SINKS = torch.tensor([0.5, -1.0, 3.0, -40.0], dtype=torch.float64)
# A window that ends inside an ancestor, is smaller than a segment, is longer than a path.
LONG = SegmentTable.from_parents([-1, 0, 1, 1, 3, 0, -1], [150, 70, 90, 65, 200, 130, 3])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", FORESTS)
def test_planned_blocks_cover_each_visible_pair_once(name: str, window: int) -> None:
    plan = plan_attention(table(name), window)
    assert_covers_each_pair_once(table(name), plan[blocks_field(window)], window)


@settings(deadline=None, max_examples=150)
@given(forests(), TILES, st.integers(1, 60), st.sampled_from([1, 2, 5, 8, 64]))
def test_any_cut_covers_each_visible_pair_of_any_forest_once(
    segments: SegmentTable, tile: int, window: int, span: int
) -> None:
    blocks = cut_to_window(schedule(segments, tile), segments.position_ids, window, span)
    assert_covers_each_pair_once(segments, blocks, window)


@pytest.mark.parametrize("window", [1, 40, 64, 100, 128, 220, 400])
def test_windows_over_long_segments(window: int, backend: str) -> None:
    assert_covers_each_pair_once(LONG, plan_attention(LONG, window)[blocks_field(window)], window)
    inputs = qkv(LONG.num_tokens, (1, 1), (4, 4))
    exact = run_reference(LONG, inputs, window=window)
    assert_close(run(LONG, inputs, window=window), exact, 1e-12)


def test_a_window_that_no_path_reaches_changes_no_block() -> None:
    whole = plan_attention(LONG)[blocks_field(0)]
    assert (plan_attention(LONG, 550)[blocks_field(550)] == whole).all()


def test_work_within_a_window_grows_with_the_window_not_with_the_path() -> None:
    segments = SegmentTable.from_parents([-1, 0, 0], [16_384, 4096, 4096])
    blocks = plan_attention(segments, 256)[blocks_field(256)]
    pairs = ((blocks[:, 2] - blocks[:, 1]) * (blocks[:, 4] - blocks[:, 3])).sum()
    assert pairs < 4 * 256 * segments.num_tokens


def test_layers_with_one_window_share_a_plan() -> None:
    assert for_window(plan_attention, 7) is for_window(plan_attention, 7)
    assert for_window(plan_attention, 7) is not for_window(plan_attention, 8)


@pytest.mark.parametrize("tile", [None, 0, 64])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", FORESTS)
def test_window(name: str, window: int, tile: int | None, backend: str) -> None:
    segments = table(name)
    inputs = qkv(segments.num_tokens)
    got = run(segments, inputs, tile=tile, window=window)
    assert_close(got, run_reference(segments, inputs, window=window), 1e-12)


@pytest.mark.parametrize("tile", [0, 64])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("name", ["chain", "nested", "small_below_large"])
def test_softcap(name: str, softcap: float, tile: int) -> None:
    segments = table(name)
    inputs = qkv(segments.num_tokens)
    got = run(segments, inputs, tile=tile, softcap=softcap)
    assert_close(got, run_reference(segments, inputs, softcap=softcap), 1e-12)
    assert (got[0] - run(segments, inputs, tile=tile)[0]).abs().max() > 1e-6


@pytest.mark.parametrize("tile", [0, 64])
@pytest.mark.parametrize("name", ["one_token", "chain", "nested", "small_below_large"])
def test_sinks_and_their_gradient(name: str, tile: int, backend: str) -> None:
    segments = table(name)
    inputs = qkv(segments.num_tokens)
    got = run(segments, inputs, tile=tile, sinks=SINKS)
    assert_close(got, run_reference(segments, inputs, sinks=SINKS), 1e-12)
    assert got[4].abs().max() > 1e-3


@settings(deadline=None, max_examples=40)
@given(forests(), st.integers(1, 30), st.sampled_from([0.0, 1.5]), st.booleans(), st.integers(0))
def test_all_modifiers_at_once_on_random_forests(
    segments: SegmentTable, window: int, softcap: float, with_sinks: bool, seed: int
) -> None:
    inputs = qkv(segments.num_tokens, seed=seed % 2**32)
    asked = {"window": window, "softcap": softcap, "sinks": SINKS if with_sinks else None}
    assert_close(run(segments, inputs, **asked), run_reference(segments, inputs, **asked), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    segments = table("small_below_large")
    inputs = qkv(segments.num_tokens, dims=(64, 64), dtype=dtype)
    asked = {"window": 9, "softcap": 2.0, "sinks": SINKS.to(dtype)}
    got = run(segments, inputs, 0.125, **asked)
    exact = run_reference(segments, inputs, 0.125, **asked)
    assert_close(got, exact, 1e-6 if dtype == torch.float32 else 1e-2)


def test_a_sibling_changes_no_bit(backend: str) -> None:
    segments = LONG
    q, k, v = qkv(segments.num_tokens, (2, 1), (8, 8), torch.float32)
    plan = packed(segments, window=100)
    out = tree_attention(q, k, v, *plan, 0.3, window=100, sinks=SINKS[:2])
    shift = torch.zeros(segments.num_tokens, 1)
    shift[220:310] = 3.0  # segment 2; its sibling starts at 310
    leaves = leaves_of((q + shift, k + shift, v + shift))
    changed = tree_attention(*leaves, *plan, 0.3, window=100, sinks=SINKS[:2])
    others = torch.ones(segments.num_tokens, dtype=torch.bool)
    others[220:310] = False
    assert torch.equal(changed[:, others], out[:, others])
    grads = torch.autograd.grad(changed[:, others].square().sum(), leaves)
    assert not any(grad[:, :, 220:310].any() for grad in grads)


def test_a_plan_for_another_window_is_refused() -> None:
    inputs = qkv(table("star").num_tokens)
    with pytest.raises(LayoutError, match="must hold 'attention_blocks_5'"):
        tree_attention(*inputs, *packed(table("star"), window=4), 0.3, window=5)


@pytest.mark.parametrize("asked", [{"window": -1}, {"softcap": -1.0}, {"softcap": float("nan")}])
def test_modifiers_out_of_range_are_refused(asked: dict) -> None:
    inputs = qkv(table("star").num_tokens)
    with pytest.raises(LayoutError, match="window and softcap must be positive"):
        tree_attention(*inputs, *packed(table("star")), 0.3, **asked)


def test_sinks_of_another_number_of_heads_are_refused() -> None:
    inputs = qkv(table("star").num_tokens)
    with pytest.raises(LayoutError, match=r"sinks \[N\]"):
        tree_attention(*inputs, *packed(table("star")), 0.3, sinks=SINKS[:3])


def test_softcap_runs_where_it_can() -> None:
    assert op_module.attention_backend("cpu", torch.float32, 64, 64) == "cpu_flash"
    assert op_module.attention_backend("cpu", torch.float32, 64, 64, 30.0) == "blockwise"
