"""`explain` names every mixer and every refusal, on a model or on its config alone."""

from __future__ import annotations

import pytest
import torch
from families import build_model
from typer.testing import CliRunner

from prefix_rewrite import UnsupportedModelError, explain, prefix_compile
from prefix_rewrite.cli import app


def test_each_mixer_is_named_with_its_module():
    report = explain(build_model("bamba"))
    assert report.supported
    found = [(mixer.kind, mixer.module) for mixer in report.mixers]
    assert found == [
        ("conv", "model.layers.0.mamba"),
        ("ssd", "model.layers.0.mamba"),
        ("attention", "model.layers.1.self_attn"),
        ("conv", "model.layers.2.mamba"),
        ("ssd", "model.layers.2.mamba"),
    ]
    assert all("modeling_bamba.py:" in mixer.source for mixer in report.mixers)
    assert report.proven["linear"] > 5, "the proof must have seen the linear layers"
    assert report.guards.total() > 0
    assert "runs exactly on a forest" in str(report)


def test_refusals_are_those_of_prefix_compile():
    model = build_model("llama", attention_dropout=0.1)
    report = explain(model)
    assert not report.supported
    assert [mixer.kind for mixer in report.mixers] == ["attention", "attention"]
    with pytest.raises(UnsupportedModelError) as refused:
        prefix_compile(model)
    assert report.findings == refused.value.findings
    assert "refused: model.layers.0.self_attn" in str(report)


@pytest.mark.parametrize(
    ("dropout", "status", "said"), [(0.0, 0, "runs exactly"), (0.1, 1, "dropout")]
)
def test_a_config_is_enough(tmp_path, dropout, status, said):
    build_model("llama", attention_dropout=dropout).config.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == status, result.output
    assert said in result.output


def test_explaining_leaves_the_model_as_it_was():
    model = build_model("llama")
    setting, weights = model.config._attn_implementation, model.lm_head.weight.clone()
    explain(model)
    assert model.config._attn_implementation == setting
    assert torch.equal(model.lm_head.weight, weights)
    assert all(p.grad is None for p in model.parameters())


def test_a_folder_without_a_config_is_named(tmp_path):
    result = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 1
    assert "cannot read a model config" in result.output
