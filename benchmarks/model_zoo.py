"""Random models of known shape, of a size that trains on two cores, and their work in FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from prefix_rewrite import PrefixForest

WIDTH, VOCAB = 512, 32_000
COMMON = {"hidden_size": WIDTH, "vocab_size": VOCAB, "tie_word_embeddings": True}
COMMON |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 65_536}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 1408, "num_hidden_layers": 8},
    "bamba": {
        **MAMBA,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "attn_layer_indices": [3, 7],
    },
    "nemotron_h": {
        "head_dim": 64,
        "intermediate_size": 2048,
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "mlp"] * 2
        + ["full_attention", "mlp", "linear_attention", "mlp"],
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 1,
    },
}


@dataclass(frozen=True)
class Work:
    """Multiply-adds of one model's forward.

    Attributes:
        per_token: linear layers, convolutions and scans, a physical token.
        per_pair: attention, an attended (query, key) pair.
        per_source: the vocabulary projection, a distinct edge source.
    """

    per_token: float
    per_pair: float
    per_source: float

    def flops(self, forest: PrefixForest) -> float:
        sources = len(np.unique(forest.edges.source))
        return (
            self.per_token * forest.num_tokens
            + self.per_pair * forest.segments.num_attended_pairs
            + self.per_source * sources
        )


def build(name: str) -> tuple[nn.Module, Work]:
    """Build a model in training mode and count its work."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config).train()
    return model, count_work(model)


def count_work(model: nn.Module) -> Work:
    head = model.get_output_embeddings()
    linear = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, (nn.Linear, nn.Conv1d)) and module is not head
    )
    pair, scan = 0, 0
    for module in model.modules():
        if hasattr(module, "q_proj"):
            pair += 2 * module.q_proj.out_features
        if hasattr(module, "A_log"):
            # Per token and head, chunks of 64: B.C over half a chunk, its product with x, and
            # the state's update and readout.
            heads, width, state = module.num_heads, module.head_dim, module.ssm_state_size
            scan += heads * width * (32 + 2 * state) + 32 * state
    return Work(linear + scan, pair, head.weight.numel())
