"""Numbers come from the modules that compute, not from the config they were made with."""

from __future__ import annotations

import pytest
import torch
from families import FULL, LINEAR, build_model
from forests import SHAPES, calls_of
from oracle import assert_equal_results, run_forest, run_rows
from transformers import BambaForCausalLM

from prefix_rewrite import PrefixForest, prefix_compile

CALLS = calls_of(SHAPES["nested"])

ONE_MIXER = {
    "bamba": {"num_hidden_layers": 1, "attn_layer_indices": []},
    "nemotron_h": {"layers_block_type": [LINEAR]},
    "zamba2": {"num_hidden_layers": 1, "layers_block_type": [LINEAR]},
}


def set_limit(model: torch.nn.Module, limit: tuple[float, float]) -> None:
    mixers = [m for m in model.modules() if hasattr(m, "time_step_limit")]
    assert mixers
    for mixer in mixers:
        mixer.time_step_limit = limit


@pytest.mark.parametrize("family", ONE_MIXER)
def test_the_time_step_is_limited_as_the_module_says(family):
    model = build_model(family, **ONE_MIXER[family])
    compiled = prefix_compile(model)
    forest = PrefixForest.from_calls(CALLS)
    before = run_rows(model, CALLS)
    set_limit(model, (0.3, 0.6))
    expected = run_rows(model, CALLS)
    assert (expected.logprobs - before.logprobs).abs().max() > 1e-2, "nothing to see"
    assert_equal_results(run_forest(compiled, forest), expected)
    assert_equal_results(run_forest(prefix_compile(model), forest), expected)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_gated_norms_over_groups(norm, norm_first):
    settings = {"mamba_rms_norm": norm, "mamba_norm_before_gate": norm_first}
    model = build_model("falcon_h1", num_hidden_layers=1, **settings)
    got = run_forest(prefix_compile(model), PrefixForest.from_calls(CALLS))
    assert_equal_results(got, run_rows(model, CALLS))


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_groups_from_one_for_all_heads_to_one_for_each(groups):
    model = build_model("mamba2", num_hidden_layers=1, n_groups=groups)
    got = run_forest(prefix_compile(model), PrefixForest.from_calls(CALLS))
    assert_equal_results(got, run_rows(model, CALLS))


def test_layers_named_in_the_old_way():
    names = {LINEAR: "mamba", FULL: "attention"}
    new = [LINEAR, FULL]
    models = [
        build_model("granitemoehybrid", num_hidden_layers=2, layer_types=types)
        for types in (new, [names[kind] for kind in new])
    ]
    results = [run_forest(prefix_compile(m), PrefixForest.from_calls(CALLS)) for m in models]
    assert torch.equal(results[0].logprobs, results[1].logprobs)
    assert_equal_results(results[0], run_rows(models[0], CALLS))


class Mine(BambaForCausalLM):
    """A subclass in another file, under a name that nobody knows."""


def test_a_subclass_under_another_name():
    template = build_model("bamba", num_hidden_layers=2)
    model = Mine(template.config).train()
    model.load_state_dict(template.state_dict())
    got = run_forest(prefix_compile(model), PrefixForest.from_calls(CALLS))
    assert_equal_results(got, run_rows(template, CALLS))
