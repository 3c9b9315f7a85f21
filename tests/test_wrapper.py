"""The wrapper is the model: same parameters, keys, ties, config, hooks; it also takes forests."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from families import Handwritten, build_model
from forests import SHAPES, calls_of
from oracle import assert_equal_results, run_forest, run_rows
from torch import nn

from prefix_rewrite import PrefixForest, prefix_compile

CALLS = calls_of(SHAPES["nested"])
IDS = torch.arange(3, 20)[None]


def build(family: str) -> nn.Module:
    """Tied weights in one family, blocks shared by several layers in the other."""
    if family == "llama":
        return build_model(family, num_hidden_layers=1)
    return build_model(family, num_hidden_layers=3, layers_block_type=["hybrid"] * 3)


@pytest.fixture(scope="module", params=["llama", "zamba2"])
def pair(request):
    model = build(request.param)
    next(model.parameters()).prefix_rewrite_tag = "no decay"
    return model, prefix_compile(model)


def forest() -> PrefixForest:
    return PrefixForest.from_calls(CALLS)


def ties(model: nn.Module) -> list[list[str]]:
    """Groups of names that are one parameter object."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())


def test_parameters_are_the_same_objects_with_their_tags(pair):
    model, compiled = pair
    before = ties(model)
    assert ties(compiled) == before and any(len(group) > 1 for group in before)
    run_forest(compiled, forest())
    torch.optim.SGD(compiled.parameters(), lr=0.0).step()
    assert ties(compiled) == before == ties(model)
    assert next(compiled.parameters()).prefix_rewrite_tag == "no decay"


def test_keys_config_class_and_modules_are_the_models(pair):
    model, compiled = pair
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in model.named_modules()]
    assert [id(b) for b in compiled.buffers()] == [id(b) for b in model.buffers()]
    assert compiled.config is model.config
    assert isinstance(compiled, type(model))
    assert type(compiled).__name__ == type(model).__name__
    assert compiled.device == model.device and compiled.dtype == model.dtype


def test_mode_is_shared(pair):
    model, compiled = pair
    assert compiled.eval() is compiled and not model.training
    assert model.train() is model and compiled.training


def test_an_ordinary_call_is_the_unmodified_model(pair):
    model, compiled = pair
    run_forest(compiled, forest())
    # Positions that start again are the model's own business here.
    packed = torch.tensor([[*range(7), *range(10)]])
    for arguments in ({}, {"position_ids": packed}, {"labels": IDS}, {"use_cache": True}):
        mine, own = (m(input_ids=IDS, **arguments) for m in (compiled, model))
        assert type(mine) is type(own) and mine.keys() == own.keys()
        assert torch.equal(mine.logits, own.logits)
        assert "labels" not in arguments or torch.equal(mine.loss, own.loss)


def test_generation_works(pair):
    model, compiled = pair
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(compiled.generate(IDS, **options), model.generate(IDS, **options))


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_the_attention_setting_is_left_alone(pair, name):
    model, compiled = pair
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        compiled(forest())
        assert model.config._attn_implementation == name
        with pytest.raises(ValueError, match="together with use_cache"):
            compiled(forest(), use_cache=True)
        assert model.config._attn_implementation == name
    finally:
        model.config._attn_implementation = before


def test_saving_and_strict_loading_in_the_plain_class(pair, tmp_path):
    model, compiled = pair
    compiled.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    loaded.load_state_dict(compiled.state_dict(), strict=True)
    fresh = type(model)(model.config)
    fresh.load_state_dict(compiled.state_dict(), strict=True)
    for other in (loaded, fresh):
        assert list(other.state_dict()) == list(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value)


def make_copy(compiled: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(compiled)
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_weights_of_its_own_with_their_ties(pair, how):
    model, compiled = pair
    other = make_copy(compiled, how)
    assert not set(map(id, other.parameters())) & set(map(id, model.parameters()))
    assert ties(other) == ties(model)
    assert list(other.state_dict()) == list(model.state_dict())
    expected = run_rows(model, CALLS)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    assert_equal_results(run_forest(compiled, forest()), expected)
    assert_equal_results(run_forest(other, forest()), run_rows(other, CALLS))


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimiser_made_before_or_after_trains_the_weights_used(when):
    model = build_model("handwritten", layers=1)
    compiled = prefix_compile(model) if when == "before" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    compiled = compiled or prefix_compile(model)
    before = compiled(forest()).logprobs
    (-before.sum()).backward()
    optimizer.step()
    after = compiled(forest())
    assert after.logprobs.sum() > before.sum()
    assert_equal_results(run_forest(compiled, forest()), run_rows(model, CALLS))


def test_hooks_fire_once_a_call_and_may_change_the_output():
    model = build_model("handwritten", layers=1)
    calls = []

    def note(name):
        return lambda *arguments: calls.append(name)

    model.register_forward_pre_hook(note("model before"))
    model.register_forward_hook(note("model after"))
    model.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: output * 1.5)
    model.blocks[0].register_forward_hook(note("block"))
    compiled = prefix_compile(model)
    got = run_forest(compiled, forest())
    calls.clear()
    compiled(forest())
    assert calls == ["model before", "block", "model after"]
    assert_equal_results(got, run_rows(model, CALLS))


def test_attributes_set_on_one_view_are_seen_on_the_other():
    model = build_model("handwritten", layers=1)
    compiled = prefix_compile(model)
    compiled.note = 3
    compiled.head = nn.Linear(32, 50)
    assert model.note == 3 and model.head is compiled.head
    calls = calls_of(SHAPES["star"])
    small = [type(c)(c.token_ids[:4] % 50, c.token_ids[4:] % 50) for c in calls]
    got = run_forest(compiled, PrefixForest.from_calls(small))
    assert_equal_results(got, run_rows(model, small))


def test_wrapping_twice_is_wrapping_once():
    model = build_model("handwritten", layers=1)
    twice = prefix_compile(prefix_compile(model))
    assert isinstance(twice, Handwritten) and twice.head is model.head
    assert_equal_results(run_forest(twice, forest()), run_rows(model, CALLS))


def test_the_model_given_runs_uncompiled_and_knows_no_forests():
    model = build_model("handwritten", layers=1)
    compiled = prefix_compile(model)
    assert type(model) is Handwritten
    positions = torch.arange(IDS.shape[1])[None]
    assert torch.equal(model(IDS, positions), compiled(IDS, positions))
    with pytest.raises(TypeError):
        model(forest())
