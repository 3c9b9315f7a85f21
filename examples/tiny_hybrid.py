"""A hybrid small enough to train on two cores: Bamba, unmodified from transformers."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BambaConfig, BambaForCausalLM, logging

logging.set_verbosity_error()  # it would say once a layer that this is the plain torch path


def build_model(vocab_size: int, seed: int) -> nn.Module:
    """Return a Mamba-2, attention, Mamba-2 model with random weights."""
    torch.manual_seed(seed)
    config = BambaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=64,  # the fastest for single calls as well
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    return BambaForCausalLM(config).train()
