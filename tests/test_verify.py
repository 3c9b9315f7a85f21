"""`verify` passes on what is right, and fails on whatever is broken on purpose."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from families import build_model
from forests import SHAPES, calls_of

from prefix_rewrite import PrefixForest, PrefixRewriteError, compile, prefix_compile, verify
from prefix_rewrite.mixers import attention, conv, ssd
from prefix_rewrite.ops.tree_attention import tree_attention
from prefix_rewrite.ops.tree_conv import tree_conv
from prefix_rewrite.ops.tree_ssd import tree_ssd
from prefix_rewrite.segments import SegmentTable

CALLS = [*calls_of(SHAPES["nested"]), *calls_of(SHAPES["star"], seed=5)]


@pytest.fixture(scope="module")
def compiled():
    return prefix_compile(build_model("bamba"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_right_model_passes_and_keeps_its_gradients(dtype):
    model = build_model("bamba", dtype=dtype)
    kept = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = kept
    report = verify(prefix_compile(model), CALLS)
    assert report.ok, str(report)
    assert len(report.calls) == len(CALLS)
    assert [p.name for p in report.parameters] == [n for n, _ in model.named_parameters()]
    assert model.lm_head.weight.grad is kept
    assert str(report).startswith("OK")


def test_a_forest_is_as_good_as_its_calls(compiled):
    assert verify(compiled, PrefixForest.from_calls(CALLS)).ok


def positions_in_storage_order(layout):
    count = layout.position_ids.shape[1]
    return {"position_ids": torch.arange(count)[None]}


def sources_one_too_early(layout):
    return {"edge_source": (layout.edge_source - 1).clamp(min=0)}


def targets_of_other_edges(layout):
    return {"edge_target": layout.edge_target.roll(1)}


def edges_on_other_rows(layout):
    return {"edge_row": layout.edge_row.roll(1)}


@pytest.mark.parametrize(
    "tamper",
    [
        positions_in_storage_order,
        sources_one_too_early,
        targets_of_other_edges,
        edges_on_other_rows,
    ],
)
def test_a_wrong_layout_fails(monkeypatch, tamper):
    build = compile.build_layout

    def tampered(*args, **kwargs):
        layout = build(*args, **kwargs)
        return dataclasses.replace(layout, **tamper(layout))

    monkeypatch.setattr(compile, "build_layout", tampered)
    report = verify(prefix_compile(build_model("llama")), CALLS)
    assert not report.ok
    assert str(report).startswith("FAILED")


@pytest.mark.parametrize("target", [attention.ATTENTION, conv.CONV, ssd.SSD], ids=lambda t: t.kind)
def test_a_mixer_that_takes_the_forest_for_one_sequence_leaks(monkeypatch, target):
    plan = target.planner_of({})

    def as_one_sequence(segments):
        return plan(SegmentTable.from_parents([-1], [segments.num_tokens]))

    monkeypatch.setattr(compile, "build_layout", _with_planner(plan, as_one_sequence))
    report = verify(prefix_compile(build_model("bamba")), CALLS)
    assert not report.ok
    assert report.leaks, "a leak must be seen by isolation too"


def _with_planner(plan, replacement):
    build = compile.build_layout

    def tampered(forest, planners, device, **kwargs):
        planners = [replacement if planner is plan else planner for planner in planners]
        return build(forest, planners, device, **kwargs)

    return tampered


def keys_without_gradient(q, k, v, *rest):
    return tree_attention(q, k.detach(), v, *rest)


def scale_of_another_head_size(q, k, v, host_plan, device_plan, scale):
    return tree_attention(q, k, v, host_plan, device_plan, scale * 1.01)


def taps_without_gradient(x, weight, *rest):
    return tree_conv(x, weight.detach(), *rest)


def scan_without_skip(x, dt, A, B, C, D, *rest):
    return tree_ssd(x, dt, A, B, C, None, *rest)


def decay_without_gradient(x, dt, A, *rest):
    return tree_ssd(x, dt, A.detach(), *rest)


@pytest.mark.parametrize(
    ("home", "name", "broken"),
    [
        (attention, "tree_attention", keys_without_gradient),
        (attention, "tree_attention", scale_of_another_head_size),
        (conv, "tree_conv", taps_without_gradient),
        (ssd, "tree_ssd", scan_without_skip),
        (ssd, "tree_ssd", decay_without_gradient),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_op_fails(monkeypatch, home, name, broken):
    monkeypatch.setattr(home, name, broken)
    report = verify(prefix_compile(build_model("bamba")), CALLS)
    assert not report.ok
    if "without_gradient" in broken.__name__:
        assert report.worst_call.error <= 1e-5, "only gradients are wrong here"


def test_what_is_not_compiled_is_refused():
    with pytest.raises(PrefixRewriteError, match="needs a model from prefix_compile"):
        verify(build_model("llama"), CALLS)


def test_nothing_to_verify_is_refused(compiled):
    with pytest.raises(PrefixRewriteError, match="must be a sampled token to verify"):
        verify(compiled, [])
