"""What a transformers model asks of attention and positions is found in its calls, not config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from compiled import shared_pair
from families import ATTENTION, COMMON, build_model
from forests import SHAPES, calls_of
from oracle import assert_equal_results, run_forest, run_rows
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from prefix_rewrite import PrefixForest, UnsupportedModelError, prefix_compile

CALLS = calls_of(SHAPES["nested"])
SMALL = {"num_hidden_layers": 2, "intermediate_size": 32, "head_dim": 8}
FULL, SLIDING = "full_attention", "sliding_attention"


def make(name: str, **settings) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **ATTENTION, **SMALL, **settings})
    return AutoModelForCausalLM.from_config(config).train()


def findings_of(model: torch.nn.Module, match: str) -> list:
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        prefix_compile(model)
    return list(caught.value.findings)


def assert_accepted(model: torch.nn.Module) -> None:
    got = run_forest(prefix_compile(model), PrefixForest.from_calls(CALLS))
    assert_equal_results(got, run_rows(model, CALLS))


def test_sliding_window():
    for finding, layer in zip(
        findings_of(make("mistral", sliding_window=4), "sliding window of 4"), (0, 1), strict=True
    ):
        assert finding.module == f"model.layers.{layer}.self_attn"
        assert "modeling_mistral.py:" in finding.source
    assert_accepted(make("mistral", sliding_window=None))


def test_softcap_and_windows_of_some_layers():
    settings = {"layer_types": [SLIDING, FULL], "sliding_window": 4}
    found = findings_of(make("gemma2", attn_logit_softcapping=50.0, **settings), "soft-capped")
    reasons = [(f.module.split(".")[2], f.what.split(" at ")[0]) for f in found]
    capped, windowed = "attention scores are soft-capped", "attention has a sliding window of 4"
    assert sorted(reasons) == [("0", windowed), ("0", capped), ("1", capped)]
    # Capped logits of the head are per row, and fine.
    assert_accepted(make("gemma2", attn_logit_softcapping=None, layer_types=[FULL, FULL]))


def test_sinks():
    model = make("gpt_oss", layer_types=[FULL, FULL], num_local_experts=2, num_experts_per_tok=1)
    assert "attention has sinks" in {f.what for f in findings_of(model, "sinks")}


def test_a_window_set_on_one_layer_after_loading_is_found():
    model = make("qwen3")
    model.model.layers[1].self_attn.sliding_window = 3
    (finding,) = findings_of(model, "sliding window of 3")
    assert finding.module == "model.layers.1.self_attn"


def test_a_window_set_after_compiling_is_found():
    model = make("qwen3")
    compiled = prefix_compile(model)
    forest = PrefixForest.from_calls(CALLS)
    expected = compiled(forest).logprobs
    model.model.layers[0].self_attn.sliding_window = 3
    with pytest.raises(UnsupportedModelError, match="sliding window of 3"):
        compiled(forest)
    model.model.layers[0].self_attn.sliding_window = None
    assert torch.equal(compiled(forest).logprobs, expected)


def test_attention_dropout_in_training():
    model = make("llama", attention_dropout=0.1)
    findings_of(model, "attention dropout is 0.1 in training")
    compiled = prefix_compile(model.eval())
    forest = PrefixForest.from_calls(CALLS)
    assert_equal_results(run_forest(compiled, forest), run_rows(model, CALLS))
    with pytest.raises(UnsupportedModelError, match="attention dropout is 0.1"):
        compiled.train()(forest)


def test_residual_and_embedding_dropout():
    def gpt2(**dropouts):
        sizes = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 64, "vocab_size": 97}
        config = AutoConfig.for_model("gpt2", **sizes, **dropouts, attn_pdrop=0.0)
        return AutoModelForCausalLM.from_config(config).train()

    found = findings_of(gpt2(resid_pdrop=0.1, embd_pdrop=0.3), "dropout of 0.3 in training")
    assert [f.module for f in found] == [
        "transformer.drop",
        "transformer.h.0.attn.resid_dropout",
        "transformer.h.0.mlp.dropout",
    ]
    assert_accepted(gpt2(resid_pdrop=0.0, embd_pdrop=0.0))


def rope(kind: str, **settings) -> torch.nn.Module:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **settings}
    return make("llama", rope_parameters=parameters)


def test_positions_that_depend_on_the_length():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for model, kind in (
        (rope("dynamic", factor=2.0), "dynamic"),
        (rope("longrope", factor=2.0, original_max_position_embeddings=16, **factors), "longrope"),
    ):
        finding, *_ = findings_of(model, f"'{kind}' RoPE rotates a prefix differently")
        assert finding.module == "model.rotary_emb"
    assert_accepted(rope("yarn", factor=2.0, original_max_position_embeddings=16))


def biased_by_key(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key + 0.1, value, attention_mask, **kwargs)


@contextmanager
def registered(name: str, function) -> Iterator[None]:
    functions = AttentionInterface()
    before = functions.get(name)
    AttentionInterface.register(name, function)
    try:
        yield
    finally:
        if before is None:
            del AttentionInterface._global_mapping[name]
        else:
            AttentionInterface.register(name, before)


@pytest.mark.parametrize("name", ["biased_by_key", "sdpa"])
def test_an_attention_function_of_the_users_own(name):
    """Under a new name, and under a known name registered again."""
    model = make("llama")
    with registered(name, biased_by_key):
        model.config._attn_implementation = name
        (finding,) = findings_of(model, f"attention implementation '{name}'")
        assert model.config._attn_implementation == name
    model.config._attn_implementation = "sdpa"
    assert_accepted(model)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_transformers_own_attention_functions_are_accepted(name):
    model = make("llama")
    model.config._attn_implementation = name
    assert_accepted(model)
    assert model.config._attn_implementation == name


FORBIDDEN = {
    "attention_mask": torch.ones(1, 7),
    "cache_position": torch.arange(7),
    "inputs_embeds": torch.zeros(1, 7, 32),
    "input_ids": torch.zeros(1, 7, dtype=torch.int64),
    "labels": torch.zeros(1, 7, dtype=torch.int64),
    "past_key_values": object(),
    "pixel_values": torch.zeros(1, 3, 2, 2),
    "position_ids": torch.zeros(3, 1, 7, dtype=torch.int64),
    "use_cache": True,
    "logits_to_keep": 3,
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_an_argument_beside_the_forest(name):
    _, compiled = shared_pair("llama")
    forest = PrefixForest.from_calls(CALLS)
    with pytest.raises(UnsupportedModelError, match=f"a forest was given together with {name}"):
        compiled(forest, **{name: FORBIDDEN[name]})
    compiled(forest, **{name: None})
    compiled(forest=forest)


def test_arguments_beside_the_forest_are_all_named():
    _, compiled = shared_pair("llama")
    forest = PrefixForest.from_calls(CALLS)
    with pytest.raises(UnsupportedModelError) as caught:
        compiled(forest, torch.ones(1, 7), use_cache=True)
    assert len(caught.value.findings) == 2
    with pytest.raises(UnsupportedModelError, match="a forest that is not the first argument"):
        compiled(torch.ones(1, 7), forest)


def test_the_default_cache_setting_trains_and_returns_no_cache():
    model = build_model("llama", use_cache=True, num_hidden_layers=1)
    assert model.config.use_cache
    assert_accepted(model)
    assert model.config.use_cache
