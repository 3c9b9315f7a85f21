"""The tree conv equals a plain loop up the paths, and the models' own conv on each path alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import TABLES, Inputs, assert_close, preorder, randn, table, tables, with_grads
from torch import Tensor

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.tree_conv import plan_conv, shifted, tree_conv
from prefix_rewrite.ops.tree_conv.reference import tree_conv_reference
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import SegmentTable

WIDTHS = (1, 2, 3, 4, 5, 9)


def draw(T: int, width: int, *, bias: bool = True, C: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """x [1, C, T] as the transposed view that models pass, weight [C, W], bias [C]."""
    g = torch.Generator().manual_seed(seed)
    drawn = {"x": randn(g, 1, T, C).transpose(1, 2), "weight": randn(g, C, width)}
    return drawn | ({"bias": randn(g, C)} if bias else {})


def conv(inputs: Inputs, plan: tuple[Tensor, Tensor], silu: bool) -> Tensor:
    return tree_conv(inputs["x"], inputs["weight"], inputs.get("bias"), *plan, silu)


def run(inputs: Inputs, segments: SegmentTable, silu: bool = True) -> dict[str, Tensor]:
    plan = pack_plan(plan_conv(segments), "cpu")
    return with_grads(lambda **x: conv(x, plan, silu), inputs)


def run_reference(inputs: Inputs, segments: SegmentTable, silu: bool = True) -> dict[str, Tensor]:
    def loop(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return tree_conv_reference(x, weight, bias, segments, silu)

    return with_grads(loop, inputs)


def check(inputs: Inputs, segments: SegmentTable, silu: bool = True) -> None:
    assert_close(run(inputs, segments, silu), run_reference(inputs, segments, silu), 1e-12)


class TestAgainstPlainLoop:
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("name", TABLES)
    def test_named_forests(self, name, width):
        check(draw(table(name).num_tokens, width), table(name))

    @pytest.mark.parametrize("silu", [True, False])
    @pytest.mark.parametrize("bias", [True, False])
    def test_all_forms_of_the_arguments(self, bias, silu):
        segments = table("fork_in_conv")
        check(draw(segments.num_tokens, 4, bias=bias), segments, silu)

    @settings(max_examples=60, deadline=None)
    @given(
        segments=tables(), width=st.sampled_from(WIDTHS), bias=st.booleans(), silu=st.booleans(),
        seed=st.integers(0, 99), max_elements=st.sampled_from([1, 40, 400, 1 << 18]),
    )  # fmt: skip
    def test_any_forest_in_blocks_of_any_size(
        self, segments, width, bias, silu, seed, max_elements
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shifted, "MAX_ELEMENTS", {"cpu": max_elements})
            check(draw(segments.num_tokens, width, bias=bias, seed=seed), segments, silu)

    def test_fp32_equals_the_plain_loop_in_fp64(self):
        segments = table("nested_wide")
        inputs = {name: x.float() for name, x in draw(segments.num_tokens, 4).items()}
        wide = {name: x.double() for name, x in inputs.items()}
        assert_close(run(inputs, segments), run_reference(wide, segments), 3e-6)


class TestIsolation:
    @pytest.mark.parametrize("name", ["fork_in_conv", "star", "many_roots", "one_token_segments"])
    def test_a_sibling_changes_no_bit_and_gets_no_gradient(self, name):
        segments = table(name)
        plan = pack_plan(plan_conv(segments), "cpu")
        inputs = {k: x.float() for k, x in draw(segments.num_tokens, 4).items()}
        parent, end = segments.parent.tolist(), segments.subtree_end.tolist()
        pairs = [
            (a, b)
            for a in range(len(parent))
            for b in range(len(parent))
            if a != b and parent[a] == parent[b]
        ]
        assert pairs
        for sibling, own in pairs:
            theirs = slice(int(segments.start[sibling]), end[sibling])
            mine = slice(int(segments.start[own]), end[own])
            changed = inputs | {"x": inputs["x"].clone()}
            changed["x"][..., theirs] = changed["x"][..., theirs] * 3 - 1
            leaves = {k: x.clone().requires_grad_() for k, x in inputs.items()}
            out, other = conv(leaves, plan, True), conv(changed, plan, True)
            assert torch.equal(out[..., mine], other[..., mine])
            assert not torch.equal(out[..., theirs], other[..., theirs])
            (grad,) = torch.autograd.grad(out[..., mine].sum(), leaves["x"])
            assert not grad[..., theirs].any() and grad[..., mine].any()

    def test_taps_cross_one_token_ancestors(self):
        """The last token of a chain of 8 one-token segments hears exactly three ancestors."""
        segments = table("one_token_segments")
        inputs = draw(segments.num_tokens, 4)
        x = inputs["x"].clone().requires_grad_()
        plan = pack_plan(plan_conv(segments), "cpu")
        deepest = int(segments.position_ids.argmax())
        (grad,) = torch.autograd.grad(conv(inputs | {"x": x}, plan, True)[..., deepest].sum(), x)
        heard = grad[0].abs().sum(0).nonzero().flatten().tolist()
        path = [deepest]
        for _ in range(3):
            path.append(int(segments.parent_token[path[-1]]))
        assert heard == sorted(path)

    def test_runs_repeat_bit_for_bit(self):
        segments = table("star")
        inputs = {name: x.float() for name, x in draw(segments.num_tokens, 4).items()}
        first, second = run(inputs, segments), run(inputs, segments)
        assert all(torch.equal(first[name], second[name]) for name in first)


class TestAgainstTransformers:
    """`causal_conv1d_fn`, the torch path of the models, on every root-to-leaf path alone."""

    @pytest.fixture
    def model_conv(self):
        modeling = pytest.importorskip("transformers.models.bamba.modeling_bamba")
        return modeling.causal_conv1d_fn.__wrapped__

    def conv_paths(self, model_conv, segments: SegmentTable, inputs: Inputs, silu: bool):
        """Outputs of each token on its first path, and their gradients."""
        parents = segments.parent_token.tolist()
        leaves = sorted(set(range(len(parents))) - set(parents))

        def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            columns: dict[int, Tensor] = {}
            for leaf in leaves:
                path = [leaf]
                while parents[path[-1]] >= 0:
                    path.append(parents[path[-1]])
                path.reverse()
                out = model_conv(x[:, :, path], weight, bias, "silu" if silu else None)
                for k, token in enumerate(path):
                    columns.setdefault(token, out[..., k])
            return torch.stack([columns[t] for t in range(len(parents))], -1)

        return with_grads(run, inputs)

    @pytest.mark.parametrize("silu", [True, False])
    @pytest.mark.parametrize("length", [1, 3, 65])
    def test_a_single_chain_in_fp32(self, model_conv, length, silu):
        segments = SegmentTable.from_parents([-1], [length])
        inputs = {name: x.float() for name, x in draw(length, 4).items()}
        expected = self.conv_paths(model_conv, segments, inputs, silu)
        assert_close(run(inputs, segments, silu), expected, 2e-6)

    @pytest.mark.parametrize("wide", [set(), {"weight", "bias"}])
    def test_half_precision_errs_no_more_than_the_models_own(self, model_conv, wide):
        """Types as models pass them. Errors against fp64 from the same rounded inputs."""
        segments = table("nested_wide")
        inputs = {
            name: x.to(torch.float32 if name in wide else torch.bfloat16)
            for name, x in draw(segments.num_tokens, 4, C=64).items()
        }
        exact = run_reference({name: x.double() for name, x in inputs.items()}, segments)
        got = run(inputs, segments)
        theirs = self.conv_paths(model_conv, segments, inputs, True)
        for name, value in got.items():
            assert value.dtype == theirs[name].dtype, name
            mine, plain = (
                float((x[name].double() - exact[name]).norm() / exact[name].norm())
                for x in (got, theirs)
            )
            assert mine <= 1.25 * plain, f"{name}: {mine:.1e}, the model's own {plain:.1e}"


class TestAsAnOp:
    @pytest.mark.parametrize("layout", ["by channel", "a slice"])
    def test_any_layout_of_x(self, layout):
        segments = table("nested_wide")
        inputs = draw(segments.num_tokens, 4)
        x = inputs["x"]
        if layout == "by channel":
            other = x.contiguous()
        else:
            other = torch.cat([x, x], 1).transpose(1, 2).contiguous()[..., :5].transpose(1, 2)
        assert other.stride() != x.stride()
        got = run(inputs | {"x": other}, segments)
        assert_close(got, run(inputs, segments), 0.0)
        assert got["out"].transpose(1, 2).is_contiguous()

    def test_autocast_changes_nothing(self):
        segments = table("nested_wide")
        inputs = {name: x.float() for name, x in draw(segments.num_tokens, 4).items()}
        expected = run(inputs, segments)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(run(inputs, segments), expected, 0.0)

    @pytest.mark.parametrize("bias", [True, False])
    def test_opcheck(self, bias):
        segments = table("fork_in_conv")
        inputs = {k: x.float() for k, x in draw(segments.num_tokens, 4, bias=bias).items()}
        x, weight, bias_row = inputs["x"][0].t(), inputs["weight"], inputs.get("bias")
        plan = pack_plan(plan_conv(segments), "cpu")
        leaves = [None if t is None else t.requires_grad_() for t in (x, weight, bias_row)]
        ops = torch.ops.prefix_rewrite
        torch.library.opcheck(ops.tree_conv.default, (*leaves, *plan, True))
        grad = torch.randn_like(x)
        plain = [None if t is None else t.detach() for t in leaves]
        torch.library.opcheck(
            ops.tree_conv_backward.default,
            (grad, *plain, *plan, True),
            test_utils=["test_schema", "test_faketensor"],
        )

    def test_a_batch_is_refused(self):
        segments = table("nested")
        inputs = draw(segments.num_tokens, 4)
        with pytest.raises(LayoutError, match="a forest is one row, got batch 2"):
            run(inputs | {"x": inputs["x"].expand(2, -1, -1)}, segments)

    def test_a_forest_without_tokens(self):
        got = run(draw(0, 4), SegmentTable.from_parents([], []))
        assert got["out"].shape == (1, 5, 0)
        assert not any(x.any() for x in got.values())


def test_a_plan_does_not_depend_on_how_chains_are_cut():
    cut = preorder([-1, 0, 1, 1, 3], [1, 4, 2, 3, 5])
    whole = preorder([-1, 0, 0], [5, 2, 8])
    planned, expected = plan_conv(cut), plan_conv(whole)
    assert all((planned[name] == values).all() for name, values in expected.items())


def test_one_compile_serves_all_forests():
    torch._dynamo.reset()
    compiled = torch.compile(conv, backend="aot_eager", dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for name in ("nested", "star", "one_token_segments", "nested_wide", "chain"):
            segments = table(name)
            plan = pack_plan(plan_conv(segments), "cpu")
            inputs = draw(segments.num_tokens, 4)
            got = with_grads(lambda plan=plan, **x: compiled(x, plan, True), inputs)
            assert_close(got, run(inputs, segments), 1e-13)
