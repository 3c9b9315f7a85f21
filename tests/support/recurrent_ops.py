"""The recurrent tree ops as cases of one kind: inputs, fast op, plain reference.

Shapes: T tokens, H heads, D channels, K and V head widths, N state width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from prefix_rewrite.ops.tree_delta_rule import (
    plan_channel_delta_rule,
    plan_delta_rule,
    tree_delta_rule,
)
from prefix_rewrite.ops.tree_delta_rule.reference import tree_delta_rule_reference
from prefix_rewrite.ops.tree_rglru import plan_rglru, tree_rglru
from prefix_rewrite.ops.tree_rglru.reference import tree_rglru_reference
from prefix_rewrite.ops.tree_selective_scan import plan_selective_scan, tree_selective_scan
from prefix_rewrite.ops.tree_selective_scan.reference import tree_selective_scan_reference
from prefix_rewrite.plan import Planner, pack_plan
from prefix_rewrite.segments import SegmentTable

Inputs = Mapping[str, Tensor]

FORESTS: dict[str, tuple[list[int], list[int]]] = {
    "one_token": ([-1], [1]),
    "chain": ([-1, 0, 1], [5, 63, 66]),
    "star": ([-1, 0, 0, 0], [130, 4, 3, 6]),
    "nested": ([-1, 0, 1, 1, 3, 3, 0], [7, 2, 70, 1, 2, 2, 5]),
    "many_roots": ([-1, -1, 1, 1, -1, -1], [65, 2, 2, 3, 6, 2]),
    "one_token_segments": ([-1, 0, 1, 2, 2, 1, 0, 6, 6], [1] * 9),
    "deep_fork": ([-1, 0, 1, 1, 0], [100, 30, 64, 1, 80]),
}
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 47, 48, 49, 63, 64, 65, 127, 129)


@dataclass(frozen=True)
class OpCase:
    """One op with one form of its arguments.

    Attributes:
        draw: makes fp64 inputs for T tokens from a generator.
        op: the fast op on inputs and a packed plan.
        reference: the plain loop on inputs and a segment table.
        planner: the op's planner.
        token_dims: dimension of each input that runs over tokens.
        mixed: inputs that stay in fp32 where the others are bf16.
        decay: the input that makes the state be forgotten at once if multiplied by `forget`.
    """

    draw: Callable[[int, torch.Generator], dict[str, Tensor]]
    op: Callable[[Inputs, tuple[Tensor, Tensor]], Tensor]
    reference: Callable[[Inputs, SegmentTable], Tensor]
    planner: Planner
    token_dims: Mapping[str, int]
    mixed: frozenset[str]
    decay: str
    forget: float = 1e5

    def packed(self, segments: SegmentTable) -> tuple[Tensor, Tensor]:
        return pack_plan(self.planner(segments), "cpu")

    def inputs(self, num_tokens: int, seed: int = 0) -> dict[str, Tensor]:
        return self.draw(num_tokens, torch.Generator().manual_seed(seed))

    def mixed_inputs(self, num_tokens: int) -> dict[str, Tensor]:
        return {
            name: x.to(torch.float32 if name in self.mixed else torch.bfloat16)
            for name, x in self.inputs(num_tokens).items()
        }

    def run(self, inputs: Inputs, segments: SegmentTable) -> dict[str, Tensor]:
        plan = self.packed(segments)
        return with_grads(lambda leaves: self.op(leaves, plan), inputs)

    def run_reference(self, inputs: Inputs, segments: SegmentTable) -> dict[str, Tensor]:
        return with_grads(lambda leaves: self.reference(leaves, segments), inputs)


def with_grads(
    function: Callable[[Inputs], Tensor], inputs: Inputs, seed: int = 1
) -> dict[str, Tensor]:
    """Return the output, and every gradient of a random projection of it."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = function(leaves)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    difference = (got.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def assert_close(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        error = relative_error(value, expected[name])
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def table(name: str) -> SegmentTable:
    return SegmentTable.from_parents(*FORESTS[name])


@st.composite
def forests(draw: st.DrawFn) -> SegmentTable:
    """Any depth-first order, with segments on both sides of the chunk's size."""
    parent: list[int] = []
    path: list[int] = []
    for i in range(draw(st.integers(1, 10))):
        path = path[: draw(st.integers(0, len(path)))]
        parent.append(path[-1] if path else -1)
        path.append(i)
    sizes = st.sampled_from([1, 1, 2, 3, 5, 17, 31, 64, 67])
    return SegmentTable.from_parents(parent, [draw(sizes) for _ in parent])


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _draw_selective_scan(T: int, g: torch.Generator, D: int = 3, N: int = 4) -> dict[str, Tensor]:
    return {
        "u": _randn(g, 1, D, T),
        "dt": _randn(g, 1, D, T) - 2,
        "A": -_randn(g, D, N).exp(),
        "B": _randn(g, 1, N, T),
        "C": _randn(g, 1, N, T),
        "D": _randn(g, D),
        "z": _randn(g, 1, D, T),
        "dt_bias": _randn(g, D),
    }


def _draw_delta_rule(
    T: int, g: torch.Generator, G: int = 2, H: int = 4, K: int = 5, V: int = 3, decays: int = 1
) -> dict[str, Tensor]:
    decay_shape = (1, T, H) if decays == 1 else (1, T, H, K)
    return {
        "q": _randn(g, 1, T, G, K),
        "k": _randn(g, 1, T, G, K),
        "v": _randn(g, 1, T, H, V),
        "g": -0.1 * _randn(g, *decay_shape).exp(),
        "beta": _randn(g, 1, T, H).sigmoid(),
    }


def _delta_rule(normalise: bool, planner: Planner, **shape: int) -> OpCase:
    return OpCase(
        draw=lambda T, generator: _draw_delta_rule(T, generator, **shape),
        op=lambda x, plan: tree_delta_rule(*x.values(), *plan, normalise),
        reference=lambda x, segments: tree_delta_rule_reference(*x.values(), segments, normalise),
        planner=planner,
        token_dims=dict.fromkeys(("q", "k", "v", "g", "beta"), 1),
        mixed=frozenset({"g"}),
        decay="g",
    )


CASES: dict[str, OpCase] = {
    "selective_scan": OpCase(
        draw=_draw_selective_scan,
        op=lambda x, plan: tree_selective_scan(*x.values(), *plan, True),
        reference=lambda x, segments: tree_selective_scan_reference(*x.values(), segments),
        planner=plan_selective_scan,
        token_dims=dict.fromkeys(("u", "dt", "B", "C", "z"), 2),
        mixed=frozenset({"A", "D", "dt_bias"}),
        decay="A",
    ),
    "gated_delta_rule": _delta_rule(True, plan_delta_rule),
    "kimi_delta_attention": _delta_rule(True, plan_channel_delta_rule, G=3, H=3, decays=2),
    "rglru": OpCase(
        draw=lambda T, g: {"x": _randn(g, 1, T, 5), "a": (_randn(g, 1, T, 5) + 3).sigmoid()},
        op=lambda x, plan: tree_rglru(*x.values(), *plan),
        reference=lambda x, segments: tree_rglru_reference(*x.values(), segments),
        planner=plan_rglru,
        token_dims=dict.fromkeys(("x", "a"), 1),
        mixed=frozenset({"a"}),
        decay="a",
        forget=0.0,
    ),
}
