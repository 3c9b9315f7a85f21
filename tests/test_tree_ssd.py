"""The tree scan equals a plain loop down the paths, and the models' own scan on each alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import (
    LENGTHS,
    TABLES,
    Inputs,
    assert_close,
    randn,
    relative_error,
    table,
    tables,
    with_grads,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.tree_ssd import PLANNER, plan_ssd, tree_ssd
from prefix_rewrite.ops.tree_ssd import block as block_module
from prefix_rewrite.ops.tree_ssd.block import SsdInputs
from prefix_rewrite.ops.tree_ssd.chunked import scan_forward
from prefix_rewrite.ops.tree_ssd.reference import tree_ssd_reference
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import SegmentTable

TOKEN_INPUTS = ("x", "dt", "B", "C", "z")
OPTIONAL = ("D", "z", "dt_bias")


@dataclass(frozen=True)
class Case:
    """One form of the op's arguments: H heads, P head width, G groups, N state width."""

    H: int = 4
    P: int = 3
    G: int = 2
    N: int = 5
    D: str | None = "H"
    z: bool = True
    dt_bias: bool = True
    settings: tuple[bool, float, float] = (True, 0.0, math.inf)
    seed: int = 0
    dt_shift: float = field(default=-2.0)  # keeps states alive over a chunk

    def inputs(self, T: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        H, P, G, N = self.H, self.P, self.G, self.N
        drawn = {
            "x": randn(g, 1, T, H, P),
            "dt": randn(g, 1, T, H) + self.dt_shift,
            "A": -randn(g, H).exp(),
            "B": randn(g, 1, T, G, N),
            "C": randn(g, 1, T, G, N),
            "D": randn(g, H, P) if self.D == "HP" else randn(g, H),
            "z": randn(g, 1, T, H, P),
            "dt_bias": randn(g, H) / 4,
        }
        given = {"D": self.D is not None, "z": self.z, "dt_bias": self.dt_bias}
        return {name: x for name, x in drawn.items() if given.get(name, True)}

    def run(self, inputs: Inputs, segments: SegmentTable) -> dict[str, Tensor]:
        plan = pack_plan(plan_ssd(segments), "cpu")
        return with_grads(lambda **x: self.op(x, plan), inputs)

    def op(self, inputs: Inputs, plan: tuple[Tensor, Tensor]) -> Tensor:
        host_plan, device_plan = plan
        return tree_ssd(**self.arguments(inputs), host_plan=host_plan, device_plan=device_plan)

    def run_reference(self, inputs: Inputs, segments: SegmentTable) -> dict[str, Tensor]:
        def loop(**x: Tensor) -> Tensor:
            return tree_ssd_reference(**self.arguments(x), segments=segments)

        return with_grads(loop, inputs)

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        names = ("dt_softplus", "dt_min", "dt_max")
        return {
            **dict.fromkeys(OPTIONAL),
            **inputs,
            **dict(zip(names, self.settings, strict=True)),
        }


CASES = {
    "one group": Case(G=1),
    "two groups": Case(),
    "a group a head": Case(G=4),
    "D per channel": Case(D="HP", z=False),
    "bare": Case(D=None, z=False, dt_bias=False),
    "limits": Case(settings=(True, 0.1, 0.3)),
    "no softplus": Case(settings=(False, 0.01, 0.5)),
}


class TestAgainstPlainLoop:
    @pytest.mark.parametrize("name", TABLES)
    def test_named_forests(self, name):
        segments = table(name)
        inputs = Case().inputs(segments.num_tokens)
        assert_close(Case().run(inputs, segments), Case().run_reference(inputs, segments), 1e-11)

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_all_forms_of_the_arguments(self, case):
        segments = table("nested_wide")
        inputs = case.inputs(segments.num_tokens)
        assert_close(case.run(inputs, segments), case.run_reference(inputs, segments), 1e-11)

    @pytest.mark.parametrize("length", LENGTHS)
    def test_lengths_around_a_chunk_alone_and_below_a_fork(self, length):
        for segments in (
            SegmentTable.from_parents([-1], [length]),
            SegmentTable.from_parents([-1, 0, 0], [length, 2, 3]),
            SegmentTable.from_parents([-1, 0, 0], [2, length, 65]),
        ):
            case = Case(H=2, P=2, G=1, N=3)
            inputs = case.inputs(segments.num_tokens)
            assert_close(case.run(inputs, segments), case.run_reference(inputs, segments), 1e-11)


@settings(max_examples=40, deadline=None)
@given(
    segments=tables(),
    case=st.builds(
        Case, G=st.sampled_from([1, 2, 4]), D=st.sampled_from([None, "H", "HP"]),
        z=st.booleans(), dt_bias=st.booleans(),
        settings=st.sampled_from([(True, 0.0, math.inf), (False, 0.1, 0.4)]),
        seed=st.integers(0, 99),
    ),
    max_weights=st.sampled_from([1, 1 << 15, 1 << 18]),
)  # fmt: skip
def test_any_forest_equals_the_plain_loop_in_blocks_of_any_size(segments, case, max_weights):
    inputs = case.inputs(segments.num_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_module, "MAX_WEIGHTS", {"cpu": max_weights})
        got = case.run(inputs, segments)
    assert_close(got, case.run_reference(inputs, segments), 1e-11)


def test_fp32_equals_the_plain_loop_in_fp64():
    segments, case = table("nested_wide"), Case()
    inputs = {name: x.float() for name, x in case.inputs(segments.num_tokens).items()}
    wide = {name: x.double() for name, x in inputs.items()}
    assert_close(case.run(inputs, segments), case.run_reference(wide, segments), 5e-6)


def test_fp64_in_any_input_makes_fp64():
    segments, case = table("nested"), Case()
    inputs = {name: x.float() for name, x in case.inputs(segments.num_tokens).items()}
    for name in ("x", "A", "D"):
        got = case.run(inputs | {name: inputs[name].double()}, segments)
        assert got["out"].dtype == torch.float64
        assert {k: got[k].dtype for k in inputs} == {
            k: torch.float64 if k == name else torch.float32 for k in inputs
        }


class TestStrongDecay:
    """Falcon-like extremes: exponents of -1e5 in a chunk, and single tokens that forget all."""

    @pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
    def test_large_A_and_dt_bias_stay_finite_and_right(self, dtype, tolerance):
        segments = SegmentTable.from_parents([-1, 0, 0], [300, 3, 3])
        case = Case()
        inputs = {name: x.to(dtype) for name, x in case.inputs(segments.num_tokens).items()}
        inputs["A"] = torch.full_like(inputs["A"], -math.exp(6)).float()
        inputs["dt_bias"] = torch.full_like(inputs["dt_bias"], 3.0)
        got = case.run(inputs, segments)
        assert all(bool(x.isfinite().all()) for x in got.values())
        wide = {name: x.double() for name, x in inputs.items()}
        expected = case.run_reference(wide, segments)
        if dtype == torch.bfloat16:  # what is left of exp(-400 dt) tells the rounding of dt
            got.pop("A"), expected.pop("A")
        assert_close(got, expected, tolerance)

    def test_a_token_that_forgets_all_does_not_blur_those_after_it(self):
        """The sum of exponents restarts, so to speak: 1e5 in it would cost five digits."""
        segments = SegmentTable.from_parents([-1, 0, 0], [130, 40, 30])
        case = Case(settings=(False, 0.0, math.inf), z=False, dt_bias=False)
        inputs = {name: x.float() for name, x in case.inputs(segments.num_tokens).items()}
        inputs["dt"] = inputs["dt"].sigmoid() / 100
        inputs["dt"][:, [70, 140, 175]] = 1e5
        inputs["x"][:, [70, 140, 175]] *= 1e-5
        inputs["A"] = torch.full_like(inputs["A"], -1.0)
        wide = {name: x.double() for name, x in inputs.items()}
        got, expected = case.run(inputs, segments), case.run_reference(wide, segments)
        got.pop("dt"), expected.pop("dt")  # dominated by the tokens with dt = 1e5
        assert_close(got, expected, 5e-6)

    def test_the_strongest_decay_that_fp32_holds_is_finite(self):
        segments = SegmentTable.from_parents([-1, 0, 0], [130, 3, 3])
        case = Case(settings=(False, 0.0, math.inf), dt_bias=False)
        inputs = {name: x.float() for name, x in case.inputs(segments.num_tokens).items()}
        inputs["A"] = torch.full_like(inputs["A"], -3e38)
        inputs["dt"] = inputs["dt"].exp()
        inputs["dt"][:, 1::3] = 0  # between these tokens nothing is forgotten
        got, expected = case.run(inputs, segments), case.run_reference(inputs, segments)
        got.pop("dt"), expected.pop("dt")  # 0 times 3e38
        assert_close(got, expected, 1e-6)

    def test_gradients_of_strong_decays_do_not_cancel(self):
        """With decays near 1e-7 a token, what a token hears of others is 1e-7 of the whole."""
        segments = SegmentTable.from_parents([-1, 0, 0], [130, 40, 30])
        case = Case(settings=(False, 0.0, math.inf), D=None, z=False, dt_bias=False)
        inputs = {name: x.float() for name, x in case.inputs(segments.num_tokens).items()}
        inputs["A"] = torch.full_like(inputs["A"], -16.0)
        inputs["dt"] = 1 + inputs["dt"].sigmoid() / 10
        wide = {name: x.double() for name, x in inputs.items()}
        got, expected = case.run(inputs, segments), case.run_reference(wide, segments)
        assert relative_error(got["A"], expected["A"]) <= 1e-5


class TestIsolation:
    @pytest.mark.parametrize(
        "lengths", [[30, 5, 9, 4, 6], [130, 70, 9, 4, 80]], ids=["tile", "chunks"]
    )
    def test_a_sibling_changes_no_bit_and_gets_no_gradient(self, lengths):
        segments = SegmentTable.from_parents([-1, 0, 1, 1, 0], lengths)
        case = Case()
        inputs = case.inputs(segments.num_tokens)
        inputs = {name: x.float() for name, x in inputs.items()}
        plan = pack_plan(plan_ssd(segments), "cpu")
        for sibling, own in ((2, 3), (3, 2), (1, 4), (4, 1)):
            theirs = slice(int(segments.start[sibling]), int(segments.subtree_end[sibling]))
            mine = slice(int(segments.start[own]), int(segments.subtree_end[own]))
            changed = {name: x.clone() for name, x in inputs.items()}
            for name in TOKEN_INPUTS:
                changed[name][:, theirs] = changed[name][:, theirs].flip(1) * 3 - 1
            leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
            out, other = case.op(leaves, plan), case.op(changed, plan)
            assert torch.equal(out[:, mine], other[:, mine])
            assert not torch.equal(out[:, theirs], other[:, theirs])
            grads = torch.autograd.grad(out[:, mine].sum(), [leaves[n] for n in TOKEN_INPUTS])
            for name, grad in zip(TOKEN_INPUTS, grads, strict=True):
                assert not grad[:, theirs].any(), name
                assert grad[:, mine].any(), name

    def test_children_continue_their_own_parents_state(self):
        """Guards the tests themselves: a lost state would be seen."""
        segments = table("star")
        case = Case()
        inputs = case.inputs(segments.num_tokens)
        changed = inputs | {"x": inputs["x"].clone()}
        changed["x"][:, :20] += 1
        plan = pack_plan(plan_ssd(segments), "cpu")
        difference = (case.op(changed, plan) - case.op(inputs, plan)).abs().amax((0, 2, 3))
        assert difference[segments.start].min() > 1e-6

    def test_runs_repeat_bit_for_bit(self):
        segments, case = table("nested_wide"), Case()
        inputs = {name: x.float() for name, x in case.inputs(segments.num_tokens).items()}
        first, second = case.run(inputs, segments), case.run(inputs, segments)
        assert all(torch.equal(first[name], second[name]) for name in first)


class TestAgainstTransformers:
    """`mamba2_chunk_scan`, the torch path of the models, on every root-to-leaf path alone."""

    @pytest.fixture
    def model_scan(self):
        modeling = pytest.importorskip("transformers.models.bamba.modeling_bamba")
        return modeling.mamba2_chunk_scan.__wrapped__

    def scan_paths(self, model_scan, case: Case, segments: SegmentTable, inputs: Inputs):
        """Outputs of each token's first path, and gradients summed over owned tokens."""
        parents = segments.parent_token.tolist()
        T = segments.num_tokens
        leaves = sorted(set(range(T)) - set(parents))
        softplus, low, high = case.settings

        def run(**x: Tensor) -> Tensor:
            rows: list[Tensor] = [x["x"].new_empty(0)] * T
            owned: set[int] = set()
            for leaf in leaves:
                path = [leaf]
                while parents[path[-1]] >= 0:
                    path.append(parents[path[-1]])
                path.reverse()
                row = {n: v[:, path] if n in TOKEN_INPUTS else v for n, v in x.items()}
                out = model_scan(
                    row["x"], row["dt"], row["A"], row["B"], row["C"], chunk_size=16,
                    D=row.get("D"), dt_bias=row.get("dt_bias"), dt_softplus=softplus,
                    dt_limit=(low, high),
                )  # fmt: skip
                for k, token in enumerate(path):
                    if token not in owned:
                        owned.add(token)
                        rows[token] = out[:, k]
            return torch.stack(rows, 1)

        return with_grads(run, inputs)

    @pytest.mark.parametrize("length", [1, 2, 63, 65, 130])
    @pytest.mark.parametrize("case", [Case(z=False), Case(z=False, D=None, dt_bias=False),
                                      Case(z=False, settings=(True, 0.05, 0.2))])  # fmt: skip
    def test_a_single_chain_in_fp32(self, model_scan, case, length):
        segments = SegmentTable.from_parents([-1], [length])
        inputs = {name: x.float() for name, x in case.inputs(length).items()}
        got = case.run(inputs, segments)
        expected = self.scan_paths(model_scan, case, segments, inputs)
        assert got["out"].dtype == expected["out"].dtype and got["out"].is_contiguous()
        assert_close(got, expected, 5e-6)

    @pytest.mark.parametrize(
        "wide", [{"A"}, {"A", "D", "dt_bias"}, {"A", "D", "dt_bias", "dt"}, set()]
    )
    def test_half_precision_errs_no_more_than_the_models_own(self, model_scan, wide):
        """Types as models pass them. Errors against fp64 from the same rounded inputs."""
        segments, case = table("nested_wide"), Case(z=False)
        drawn = case.inputs(segments.num_tokens)
        inputs = {
            k: x.to(torch.float32 if k in wide else torch.bfloat16) for k, x in drawn.items()
        }
        exact = case.run_reference({k: x.double() for k, x in inputs.items()}, segments)
        got = case.run(inputs, segments)
        theirs = self.scan_paths(model_scan, case, segments, inputs)
        for name, value in got.items():
            assert value.dtype == theirs[name].dtype, name
            mine, plain = (rms_error(x[name], exact[name]) for x in (got, theirs))
            # Where dt is fp32 too, nothing is rounded to bf16: both errors are fp32's own.
            floor = 4 * torch.finfo(torch.float32).eps
            assert mine <= 1.25 * plain + floor, f"{name}: {mine:.1e}, the model's own {plain:.1e}"


def rms_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


class TestAsAnOp:
    def test_strided_inputs_as_models_split_them(self):
        """x, B and C are slices of one projection; dt is a slice of another."""
        segments, case = table("nested_wide"), Case()
        T, inputs = segments.num_tokens, case.inputs(segments.num_tokens)
        flat = torch.cat([inputs[k].flatten(2) for k in ("x", "B", "C", "dt", "z")], -1)
        shapes = [inputs[k].shape for k in ("x", "B", "C", "dt", "z")]
        parts = flat.split([s[2:].numel() for s in shapes], -1)
        views = {
            k: part.view(shape)
            for k, part, shape in zip(("x", "B", "C", "dt", "z"), parts, shapes, strict=True)
        }
        assert not views["x"].is_contiguous() and views["x"].shape[1] == T
        got = case.run(inputs | views, segments)
        assert got["out"].is_contiguous()
        assert_close(got, case.run(inputs, segments), 1e-14)

    def test_autocast_changes_nothing(self):
        segments, case = table("nested_wide"), Case(dt_bias=False, z=False)
        inputs = {name: x.float() for name, x in case.inputs(segments.num_tokens).items()}
        expected = case.run(inputs, segments)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(case.run(inputs, segments), expected, 0.0)

    def test_no_tensor_grows_faster_than_the_forest(self):
        def largest(copies: int) -> int:
            parents = [p if p < 0 else p + 4 * i for i in range(copies) for p in (-1, 0, 0, 2)]
            segments = SegmentTable.from_parents(parents, [70, 3, 40, 90] * copies)
            plan = pack_plan(plan_ssd(segments), "cpu")
            x = Case().inputs(segments.num_tokens)
            rows = SsdInputs(x["x"][0], x["dt"][0], x["A"], x["B"][0], x["C"][0], None)
            with Measure() as measure:
                scan_forward(rows, PLANNER.read(*plan))
            return measure.largest

        assert largest(64) <= 4.2 * largest(16)

    @pytest.mark.parametrize("case", [Case(), CASES["bare"]], ids=["full", "bare"])
    def test_opcheck(self, case):
        segments = table("nested")
        x = {k: v.float() for k, v in case.inputs(segments.num_tokens).items()}
        rows = [x["x"][0], x["dt"][0].exp(), x["A"], x["B"][0], x["C"][0], x.get("D")]
        leaves = [None if r is None else r.requires_grad_() for r in rows]
        plan = pack_plan(plan_ssd(segments), "cpu")
        torch.library.opcheck(torch.ops.prefix_rewrite.tree_ssd.default, (*leaves, *plan))
        grad = torch.randn_like(rows[0])
        torch.library.opcheck(
            torch.ops.prefix_rewrite.tree_ssd_backward.default,
            (grad, *[None if r is None else r.detach() for r in rows], *plan),
            test_utils=["test_schema", "test_faketensor"],
        )

    @pytest.mark.parametrize("batch, heads, message", [
        (2, 4, "a forest is one row, got batch 2"),
        (1, 3, "heads must be a multiple of groups, got 3 and 2"),
    ])  # fmt: skip
    def test_wrong_shapes_are_refused(self, batch, heads, message):
        segments = table("nested")
        inputs = Case(H=heads, z=False).inputs(segments.num_tokens)
        inputs["x"] = inputs["x"].expand(batch, -1, -1, -1)
        with pytest.raises(LayoutError, match=message):
            Case().op(inputs, pack_plan(plan_ssd(segments), "cpu"))

    def test_a_forest_without_tokens(self):
        got = Case().run(Case().inputs(0), SegmentTable.from_parents([], []))
        assert got["out"].shape == (1, 0, 4, 3)
        assert not any(x.any() for x in got.values())


class Measure(TorchDispatchMode):
    """Records the size of the largest tensor that any call returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch's own inductor
def test_one_compile_serves_all_forests(backend):
    torch._dynamo.reset()
    case = Case()
    compiled = torch.compile(case.op, backend=backend, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for name in ("nested", "star", "one_token_segments", "nested_wide", "chain"):
            segments = table(name)
            plan = pack_plan(plan_ssd(segments), "cpu")
            inputs = case.inputs(segments.num_tokens)
            got = with_grads(lambda plan=plan, **x: compiled(x, plan), inputs)
            assert_close(got, case.run(inputs, segments), 1e-11)
