"""What a transformers model asks of attention and positions is found in its calls, not config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import pytest
import torch
from compiled import shared_pair
from families import ATTENTION, COMMON, build_model, forward_rows
from forests import SHAPES, calls_of
from oracle import assert_equal_results, run_forest, run_rows
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

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


def assert_accepted(model: torch.nn.Module, forward=forward_rows) -> None:
    got = run_forest(prefix_compile(model), PrefixForest.from_calls(CALLS))
    assert_equal_results(got, run_rows(model, CALLS, forward=forward))


def test_windows_are_those_of_the_mask():
    assert_accepted(make("mistral", sliding_window=4))
    assert_accepted(make("mistral", sliding_window=None))


def test_a_window_that_only_the_mask_or_only_the_call_has():
    settings = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": [SLIDING, FULL]}
    model = make("qwen2_moe", use_sliding_window=True, sliding_window=4, **settings)
    (finding,) = findings_of(model, "window of None where its mask has one of 4")
    assert finding.module == "model.layers.0.self_attn"
    assert "modeling_qwen2_moe.py:" in finding.source


def test_softcap_is_refused_where_the_model_itself_could_not_run_it():
    settings = {"layer_types": [FULL, FULL], "attn_logit_softcapping": 2.0}
    model = make("gemma2", **settings)
    model.config._attn_implementation = "sdpa"
    found = findings_of(model, "a soft cap under SDPA")
    assert [f.module.split(".")[2] for f in found] == ["0", "1"]
    # Capped logits of the head are per row, and fine.
    model.config._attn_implementation = "eager"
    assert_accepted(model)
    assert_accepted(make("gemma2", attn_logit_softcapping=None, layer_types=[FULL, FULL]))


def test_attention_in_chunks():
    chunked = {"attention_chunk_size": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = make("llama4_text", layer_types=["chunked_attention", FULL], **chunked)
    (finding,) = findings_of(model, "attention in chunks of the sequence")
    assert finding.module == "model.layers.0.self_attn"
    findings_of(make("gemma3_text", use_bidirectional_attention=True), "not causal")


class WithItsOwnMask(torch.nn.Module):
    """A model whose mask asks for more than causal attention."""

    def __init__(self, *given, **asked):
        super().__init__()
        self.inner = make("llama")
        self.given = given or (None,)
        self.asked = asked

    def forward(self, input_ids, position_ids):
        hidden = self.inner.model.embed_tokens(input_ids)
        rotated = self.inner.model.rotary_emb(hidden, position_ids=position_ids)
        mask = create_causal_mask(self.inner.config, hidden, None, *self.given, **self.asked)
        for layer in self.inner.model.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotated)
        return self.inner.lm_head(hidden)


@pytest.mark.parametrize(
    "asked",
    [
        {"or_mask_function": lambda batch, head, q, k: k == 0},
        {"and_mask_function": lambda batch, head, q, k: q - k < 2},
        {"block_sequence_ids": torch.zeros(1, 11, dtype=torch.int64)},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_a_mask_of_another_pattern(asked):
    (name,) = asked
    assert len(findings_of(WithItsOwnMask(**asked), f"a mask with {name}")) == 2
    assert_accepted(
        WithItsOwnMask(), lambda model, ids: model(ids, torch.arange(ids.shape[1])[None])
    )


def test_a_mask_of_another_pattern_given_by_position():
    model = WithItsOwnMask(None, None, lambda batch, head, q, k: k == 0)
    findings_of(model, "a mask with arguments by position")


def test_a_mask_wanted_as_a_tensor():
    findings_of(WithItsOwnMask(allow_is_causal_skip=False), "a mask given as a tensor")


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


@pytest.mark.parametrize(
    "package, version, supported",
    [
        ("transformers", "5.16.3", "5.17 to 5.24"),
        ("transformers", "6.0.0.dev0", "5.17 to 5.24"),
        ("torch", "2.10.1+cpu", "2.11 or later"),
    ],
)
def test_versions_that_were_never_tested(package, version, supported, monkeypatch):
    model = make("llama")
    known = metadata.version
    monkeypatch.setattr(metadata, "version", lambda x: version if x == package else known(x))
    (finding,) = findings_of(model, f"{package} {version[:3]}.* is not supported")
    assert finding.remedy == f"install {package} {supported}"


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


def biased_eager(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling + module.slopes
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def test_eager_attention_of_a_modeling_file_that_is_not_plain(monkeypatch):
    model = make("llama", attn_implementation="eager")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased_eager)
    (finding,) = findings_of(model, "is not one that is known to be plain")
    assert "modeling_llama" in finding.what
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
