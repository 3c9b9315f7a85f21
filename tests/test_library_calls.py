"""Models that call kernel libraries by name: a forest equals its calls alone.

The packages are stand-ins with the released signatures (`stand_ins.py`); no kernel runs here.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from forests import SHAPES, calls_of
from library_models import (
    TAPS,
    WIDTH,
    Attention,
    DeltaRule,
    Mamba1,
    Mamba2,
    Prenorm,
    flash,
    flash_packed,
    language,
)
from oracle import assert_equal_results, run_forest, run_rows
from stand_ins import causal_conv1d_fn, stand_ins
from torch import nn

from prefix_rewrite import (
    PrefixForest,
    PrefixRewriteError,
    prefix_compile,
    register_mixer,
    seams,
)
from prefix_rewrite.mixers.conv import CONV

GATES = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
GATES |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}

MODELS = {
    "mamba2": [Mamba2],
    "mamba2 gated in the scan": [lambda: Mamba2(norm=False)],
    "mamba2 with limits": [lambda: Mamba2(dt_limit=(0.5, 1.0))],
    "fused mamba2": [lambda: Mamba2(fused=True)],
    "fused mamba2 gated after the norm": [lambda: Mamba2(fused=True, norm_before_gate=True)],
    "fused mamba2 with an MLP": [lambda: Mamba2(fused=True, norm=False, mlp=8)],
    "fused mamba2 with limits": [lambda: Mamba2(fused=True, mlp=4, dt_limit=(0.5, 1.0))],
    "mamba1": [Mamba1],
    "fused mamba1": [lambda: Mamba1(fused=True)],
    "flash": [lambda: Attention(flash())],
    "flash with a window, a cap and a scale": [
        lambda: Attention(flash(window_size=(2, 0), softcap=2.0, softmax_scale=0.7))
    ],
    "flash, causal by its window": [lambda: Attention(flash(causal=False, window_size=(3, 0)))],
    "packed flash": [lambda: Attention(flash_packed())],
    "gated delta rule": [lambda: DeltaRule(use_qk_l2norm_in_kernel=True)],
    "gated delta rule with gates inside": [lambda: DeltaRule(**GATES)],
    "gated delta rule with a scale": [
        lambda: DeltaRule(scale=0.9, residual=True, use_qk_l2norm_in_kernel=True)
    ],
    "kda": [lambda: DeltaRule("kda", use_qk_l2norm_in_kernel=True)],
    "kda with a gate inside": [lambda: DeltaRule("kda", **GATES)],
    "delta rule": [lambda: DeltaRule("plain", use_qk_l2norm_in_kernel=True)],
    "hybrid": [lambda: Mamba2(fused=True), lambda: Attention(flash()), Mamba2],
}


@pytest.fixture(scope="module", autouse=True)
def packages():
    with stand_ins():
        yield


def assert_exact(model, shapes=("fork_in_conv", "nested")):
    compiled = prefix_compile(model)
    for shape in shapes:
        calls = calls_of(SHAPES[shape])
        got = run_forest(compiled, PrefixForest.from_calls(calls))
        assert_equal_results(got, run_rows(model, calls, forward=lambda m, ids: m(ids)))


@pytest.mark.parametrize("name", MODELS)
def test_a_forest_equals_its_calls_alone(name):
    assert_exact(language(*MODELS[name]))


def test_fused_norms_are_proven_to_be_none_of_the_mixers():
    assert_exact(language(lambda: Mamba2(fused=True), Mamba1, kind=Prenorm))


def test_in_fp64_nothing_is_rounded_to_fp32():
    model = language(*MODELS["hybrid"], lambda: DeltaRule("kda", **GATES)).double()
    calls = calls_of(SHAPES["fork_in_conv"])
    got = run_forest(prefix_compile(model), PrefixForest.from_calls(calls))
    expected = run_rows(model, calls, forward=lambda m, ids: m(ids))
    assert_equal_results(got, expected, logprobs=1e-11, gradients=1e-9)


def test_under_a_compiler():
    model = language(*MODELS["hybrid"])
    calls = calls_of(SHAPES["nested"])
    compiled = prefix_compile(model, backend="aot_eager")
    got = run_forest(compiled, PrefixForest.from_calls(calls))
    assert_equal_results(got, run_rows(model, calls, forward=lambda m, ids: m(ids)))


IDS = torch.arange(3, 14)[None]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, after a graph break
@pytest.mark.parametrize("name", ["mamba2", "fused mamba2", "flash", "gated delta rule"])
def test_nobody_else_notices(name):
    """Eager code and a user's own compile run the package's function, before and after."""
    model = language(*MODELS[name])
    plain = model(IDS)
    targets: set[str] = set()

    def keep(graph_module, inputs):
        targets.update(str(node.target) for node in graph_module.graph.nodes)
        return graph_module.forward

    torch._dynamo.reset()
    compiled = prefix_compile(model)
    users = torch.compile(model, backend=keep)
    for _ in range(2):
        torch.testing.assert_close(model(IDS), plain, rtol=0, atol=0)
        torch.testing.assert_close(users(IDS), plain)
        compiled(PrefixForest.from_calls(calls_of(SHAPES["chain"])))
    assert targets and not [target for target in targets if "prefix_rewrite" in target]


def test_a_package_function_is_not_taken_for_one_of_transformers():
    """The file's name for it is a seam's for transformers, whose fourth argument is another."""

    class ByPosition(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH, TAPS))

        def forward(self, x):
            args = (None, None, None, False, None, "silu")
            return causal_conv1d_fn(x.transpose(1, 2), self.weight, *args).transpose(1, 2)

    assert_exact(language(ByPosition))


def test_a_function_of_an_unknown_release_is_no_seam():
    """Its arguments are unknown, whatever a modeling file calls it; a file's own is one."""

    def elsewhere():
        pass

    file = SimpleNamespace(causal_conv1d_fn=elsewhere)
    assert list(seams._functions("causal_conv1d_fn", [file])) == [elsewhere]
    elsewhere.__module__ = "causal_conv1d.of_another_release"
    assert not list(seams._functions("causal_conv1d_fn", [file]))


def test_a_librarys_name_is_taken():
    name = "flash_attn.flash_attn_interface:flash_attn_func"
    mine = dataclasses.replace(CONV, kind="mine", signatures={}, seams={name: print})
    with pytest.raises(PrefixRewriteError, match=name):
        register_mixer(mine)
