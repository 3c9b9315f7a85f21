"""Adapters on any projection, the head included, are used and get their gradients."""

from __future__ import annotations

import peft
import pytest
import torch
from families import build_model, forward_rows
from forests import SHAPES, calls_of
from oracle import assert_equal_results, run_forest, run_rows
from torch import Tensor, nn

from prefix_rewrite import PrefixForest, prefix_compile

# peft asks transformers by a name that newer versions deprecate.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")

CALLS = calls_of(SHAPES["nested"])
SMALL = {"num_hidden_layers": 2, "tie_word_embeddings": False}

TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "down_proj", "lm_head", "embed_tokens"],
    "bamba": ["in_proj", "out_proj", "k_proj", "up_proj", "lm_head"],
}


def build(family: str) -> nn.Module:
    settings = {"attn_layer_indices": [1]} if family == "bamba" else {}
    return build_model(family, **SMALL, **settings)


def lora_config(family: str) -> peft.LoraConfig:
    # Weights that are not zero: an adapter that is left out must show.
    return peft.LoraConfig(
        r=3, lora_alpha=7, lora_dropout=0.0, target_modules=TARGETS[family],
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip


def check_adapters(adapted: nn.Module, compiled: nn.Module, num_projections: int) -> None:
    """Right, and right because of the adapters: they move the output and are what trains."""
    got = run_forest(compiled, PrefixForest.from_calls(CALLS))
    assert_equal_results(got, run_rows(adapted, CALLS))
    adapters = [name for name in got.gradients if "lora" in name]
    assert len(adapters) == 2 * num_projections
    for name in adapters:
        assert got.gradients[name].abs().max() > 1e-4, f"{name} gets no gradient to speak of"
    assert all(g is None for name, g in got.gradients.items() if "lora" not in name)


@pytest.mark.parametrize("family", TARGETS)
def test_a_peft_model(family):
    adapted = peft.get_peft_model(build(family), lora_config(family))
    compiled = prefix_compile(adapted)
    assert isinstance(compiled, peft.PeftModel)
    per_layer = {"llama": 4 * 2 + 2, "bamba": 2 + 1 + 2 + 1}[family]
    check_adapters(adapted, compiled, per_layer)
    forest = PrefixForest.from_calls(CALLS)
    with_adapters = compiled(forest).logprobs
    with compiled.disable_adapter(), torch.no_grad():
        without = compiled(forest).per_call()[0]
        plain = row_logprobs(adapted)
    assert (with_adapters[: len(plain)] - plain).abs().max() > 1e-2
    torch.testing.assert_close(without, plain, atol=1e-5, rtol=0)
    assert torch.equal(compiled(forest).logprobs, with_adapters)


def row_logprobs(model: nn.Module) -> Tensor:
    """The first call's log-probabilities, from the plain model on its row."""
    call = CALLS[0]
    ids, at = torch.from_numpy(call.token_ids), torch.from_numpy(call.sampled).nonzero()[:, 0]
    return forward_rows(model, ids[None])[0].log_softmax(-1)[at - 1, ids[at]]


def test_a_model_with_adapters_injected_after_wrapping():
    model = build("llama")
    compiled = prefix_compile(model)
    run_forest(compiled, PrefixForest.from_calls(CALLS))
    peft.inject_adapter_in_model(lora_config("llama"), model)
    check_adapters(model, compiled, 10)


def test_adapters_merged_into_the_weights():
    adapted = peft.get_peft_model(build("llama"), lora_config("llama"))
    compiled = prefix_compile(adapted)
    forest = PrefixForest.from_calls(CALLS)
    before = compiled(forest).logprobs.detach()
    adapted.merge_adapter()
    merged = compiled(forest)
    torch.testing.assert_close(merged.logprobs.detach(), before, atol=1e-5, rtol=0)
    with torch.no_grad():
        expected = row_logprobs(adapted)
    torch.testing.assert_close(merged.per_call()[0].detach(), expected, atol=1e-5, rtol=0)


class LowRank(nn.Linear):
    """Somebody's own adapter: a linear layer whose forward adds a low-rank term."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        for parameter in base.parameters():
            parameter.requires_grad_(False)
        self.lora_down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.lora_up = nn.Parameter(torch.randn(base.out_features, rank) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.5 * (x @ self.lora_down.T) @ self.lora_up.T


@pytest.mark.parametrize("family", ["handwritten", "nemotron_h"])
def test_an_adapter_of_ones_own_on_every_projection(family):
    settings = (
        {"layers": 1}
        if family == "handwritten"
        else {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}
    )
    model = build_model(family, **settings)
    model.requires_grad_(False)
    projections = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    for name in projections:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, LowRank(getattr(owner, child)))
    check_adapters(model, prefix_compile(model), len(projections))
