"""Every recurrent tree op equals its plain loop, whatever the forest: output and all gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from recurrent_ops import (
    CASES,
    FORESTS,
    LENGTHS,
    OpCase,
    assert_close,
    forests,
    relative_error,
    table,
)
from torch.utils._python_dispatch import TorchDispatchMode

from prefix_rewrite.segments import SegmentTable


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> OpCase:
    return CASES[request.param]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6, deadline=None)
@given(segments=forests())
def test_any_forest_equals_the_plain_loop(name, segments):
    case = CASES[name]
    inputs = case.inputs(segments.num_tokens)
    assert_close(case.run(inputs, segments), case.run_reference(inputs, segments), 1e-11)


@pytest.mark.parametrize("forest", FORESTS)
def test_named_forests_equal_the_plain_loop(case, forest):
    segments = table(forest)
    inputs = case.inputs(segments.num_tokens)
    assert_close(case.run(inputs, segments), case.run_reference(inputs, segments), 1e-11)


def test_every_length_around_a_chunk_equals_the_plain_loop(case):
    segments = SegmentTable.from_parents([-1] * len(LENGTHS), LENGTHS)
    inputs = case.inputs(segments.num_tokens)
    assert_close(case.run(inputs, segments), case.run_reference(inputs, segments), 1e-11)


def test_fp32_equals_the_plain_loop_in_fp64(case):
    segments = table("deep_fork")
    inputs = {name: x.float() for name, x in case.inputs(segments.num_tokens).items()}
    wide = {name: x.double() for name, x in inputs.items()}
    assert_close(case.run(inputs, segments), case.run_reference(wide, segments), 3e-6)


def test_a_sibling_changes_no_bit_and_gets_no_gradient(case):
    segments = table("deep_fork")  # segments 2 and 3 are siblings
    sibling = slice(int(segments.start[2]), int(segments.subtree_end[2]))
    own = slice(int(segments.start[3]), int(segments.subtree_end[3]))
    inputs = case.inputs(segments.num_tokens)
    changed = dict(case.inputs(segments.num_tokens))
    for name, dim in case.token_dims.items():
        values = changed[name].clone().movedim(dim, 0)
        values[sibling] = case.inputs(segments.num_tokens, seed=9)[name].movedim(dim, 0)[sibling]
        changed[name] = values.movedim(0, dim)
    plan = case.packed(segments)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    token_dim = 2 if next(iter(case.token_dims.values())) == 2 else 1
    out = case.op(leaves, plan).movedim(token_dim, 0)
    other = case.op(changed, plan).movedim(token_dim, 0)
    assert torch.equal(out[own], other[own])
    assert not torch.equal(out[sibling], other[sibling])
    names = list(case.token_dims)
    grads = torch.autograd.grad(out[own].sum(), [leaves[name] for name in names])
    for name, grad in zip(names, grads, strict=True):
        assert not grad.movedim(case.token_dims[name], 0)[sibling].any(), name


def test_half_precision_inputs_round_once(case):
    """Types as models pass them; errors against fp64, no more than a plain fp32 loop's."""
    segments = table("deep_fork")
    inputs = case.mixed_inputs(segments.num_tokens)
    wide = {name: x.double() for name, x in inputs.items()}
    got, plain = case.run(inputs, segments), case.run_reference(inputs, segments)
    exact = case.run_reference(wide, segments)
    for name, value in got.items():
        assert value.dtype == plain[name].dtype, name
        mine, theirs = (relative_error(x[name], exact[name]) for x in (got, plain))
        assert mine <= 1.5 * theirs + 1e-6, f"{name}: {mine:.1e}, plain loop {theirs:.1e}"


def test_sudden_forgetting_stays_finite_and_exact(case):
    segments = table("deep_fork")
    inputs = case.inputs(segments.num_tokens)
    strong = torch.arange(inputs[case.decay].numel()).view(inputs[case.decay].shape) % 3 == 0
    inputs[case.decay][strong] *= case.forget
    narrow = {name: x.float() for name, x in inputs.items()}
    for name, value in case.run(narrow, segments).items():
        assert value.isfinite().all(), name
    # An exponent of a thousand has four digits less to the right of its point.
    assert_close(case.run(inputs, segments), case.run_reference(inputs, segments), 1e-9)


def test_op_passes_opcheck(case):
    segments = table("nested")
    plan = case.packed(segments)
    inputs = {
        name: x.detach().float().requires_grad_()
        for name, x in case.inputs(segments.num_tokens).items()
    }
    calls: list[tuple] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "prefix_rewrite":
                calls.append((function, args))
            return function(*args, **(kwargs or {}))

    with Record():
        case.op(inputs, plan).sum().backward()
    assert len(calls) == 2, "one op forward, one backward"
    for function, args in calls:
        leaves = tuple(
            a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a
            for a in args
        )
        tests = ["test_schema", "test_faketensor"]
        if "backward" not in str(function):
            tests += ["test_autograd_registration", "test_aot_dispatch_dynamic"]
        torch.library.opcheck(function, leaves, test_utils=tests)


def test_one_compile_serves_all_forests(case):
    torch._dynamo.reset()
    compiled = torch.compile(case.op, backend="aot_eager", dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for forest in ("nested", "star", "deep_fork"):
            segments = table(forest)
            inputs = case.inputs(segments.num_tokens)
            plan = case.packed(segments)
            leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
            out = compiled(leaves, plan)
            grads = torch.autograd.grad(out.sum(), list(leaves.values()))
            plain = case.op(leaves, plan)
            expected = torch.autograd.grad(plain.sum(), list(leaves.values()))
            for got, want in zip((out, *grads), (plain, *expected), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_no_tensor_grows_faster_than_the_forest(case):
    def largest(copies: int) -> int:
        parents = [p if p < 0 else p + 4 * i for i in range(copies) for p in (-1, 0, 0, 2)]
        segments = SegmentTable.from_parents(parents, [70, 3, 40, 90] * copies)
        sizes = [0]

        class Measure(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                out = function(*args, **(kwargs or {}))
                sizes.extend(x.numel() for x in (out if isinstance(out, (list, tuple)) else [out])
                             if isinstance(x, torch.Tensor))  # fmt: skip
                return out

        with Measure():
            case.run(case.inputs(segments.num_tokens), segments)
        return max(sizes)

    assert largest(16) <= 4.2 * largest(4)
