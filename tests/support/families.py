"""Tiny random models of every supported family, initialised so that a lost state is visible.

With default weights a wrong context changes a tiny model's output by less than rounding, and
Mamba forgets within a few tokens; see `spread_weights`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 97
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"

COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1}
COMMON |= {"eos_token_id": 2, "initializer_range": 0.1}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
MAMBA |= {"mamba_chunk_size": 8}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16}
LATENT = {**ATTENTION, "num_key_value_heads": 4, "intermediate_size": 48, "kv_lora_rank": 8}
LATENT |= {"moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT |= {"v_head_dim": 8, "mlp_layer_types": ["dense", "sparse", "sparse"]}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
MROPE |= {"mrope_section": [2, 1, 1]}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**ATTENTION, "intermediate_size": 48, "num_hidden_layers": 2,
                        "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**ATTENTION, "head_dim": 8, "intermediate_size": 48,
                        "num_hidden_layers": 2}),
    "mistral": ("mistral", {**ATTENTION, "head_dim": 8, "intermediate_size": 48,
                            "num_hidden_layers": 2, "sliding_window": 4}),
    "gemma2": ("gemma2", {
        **ATTENTION, "head_dim": 8, "intermediate_size": 48, "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL], "sliding_window": 5, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
        "attn_implementation": "eager"}),
    "gemma3": ("gemma3_text", {
        **ATTENTION, "head_dim": 8, "intermediate_size": 48, "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL], "sliding_window": 3, "query_pre_attn_scalar": 8}),
    "mamba2": ("mamba2", {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
                          "state_size": 16, "n_groups": 2, "chunk_size": 8}),
    "bamba": ("bamba", {**ATTENTION, **MAMBA, "intermediate_size": 48, "num_hidden_layers": 3,
                        "attn_layer_indices": [1], "tie_word_embeddings": True}),
    "granitemoehybrid": ("granitemoehybrid", {
        **ATTENTION, **MAMBA, "intermediate_size": 32, "shared_intermediate_size": 32,
        "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "num_local_experts": 0,
        "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2}),
    "nemotron_h": ("nemotron_h", {
        **ATTENTION, "head_dim": 8, "intermediate_size": 48,
        "layers_block_type": [LINEAR, "mlp", FULL, "mlp", LINEAR], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8}),
    "falcon_h1": ("falcon_h1", {
        **ATTENTION, **MAMBA, "intermediate_size": 48, "num_hidden_layers": 2, "mamba_d_ssm": 64,
        "mamba_rms_norm": True, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
        "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.9, "key_multiplier": 0.7, "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 0.9, "mlp_multipliers": [0.9, 0.8]}),
    "zamba2": ("zamba2", {
        **ATTENTION, "num_key_value_heads": 4, "intermediate_size": 48, "num_hidden_layers": 5,
        "layers_block_type": [LINEAR, "hybrid", "hybrid", LINEAR, "hybrid"], "num_mem_blocks": 2,
        "adapter_rank": 4, "use_shared_attention_adapter": True, "use_mem_rope": True,
        "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 8}),
    "mamba": ("mamba", {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}),
    "falcon_mamba": ("falcon_mamba", {"num_hidden_layers": 2, "state_size": 8,
                                      "time_step_rank": 4}),
    "jamba": ("jamba", {**ATTENTION, "intermediate_size": 48, "num_hidden_layers": 3,
                        "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1,
                        "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}),
    "zamba": ("zamba", {
        **ATTENTION, "num_key_value_heads": 4, "intermediate_size": 48, "num_hidden_layers": 4,
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"]}),
    "qwen3_5": ("qwen3_5_text", {
        **ATTENTION, **DELTA, "head_dim": 8, "intermediate_size": 48, "num_hidden_layers": 3,
        "layer_types": [LINEAR, FULL, LINEAR], "rope_parameters": MROPE}),
    "olmo_hybrid": ("olmo_hybrid", {
        **ATTENTION, **DELTA, "intermediate_size": 48, "num_hidden_layers": 3,
        "layer_types": [LINEAR, FULL, LINEAR]}),
    "lfm2": ("lfm2", {**ATTENTION, "intermediate_size": 48, "block_multiple_of": 8,
                      "num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"],
                      "conv_L_cache": 3}),
    "recurrent_gemma": ("recurrent_gemma", {
        **ATTENTION, "head_dim": 8, "intermediate_size": 48, "num_hidden_layers": 3,
        "lru_width": 32, "sliding_window": 6, "attention_window_size": 6,
        "block_types": ["recurrent", "recurrent", "attention"]}),
    "jamba_moe": ("jamba", {
        **ATTENTION, "intermediate_size": 48, "num_hidden_layers": 3, "attn_layer_period": 3,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}),
    "qwen3_next": ("qwen3_next", {
        **ATTENTION, **DELTA, **EXPERTS, "head_dim": 8, "intermediate_size": 48,
        "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {
        **ATTENTION, **DELTA, **EXPERTS, "head_dim": 8, "num_hidden_layers": 3,
        "layer_types": [LINEAR, FULL, LINEAR], "rope_parameters": MROPE}),
    "kimi_linear": ("kimi_linear", {
        **LATENT, "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR],
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "linear_head_dim": 8,
        "linear_num_heads": 4}),
    "bailing_hybrid": ("bailing_hybrid", {
        **LATENT, "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "n_group": 2,
        "topk_group": 1, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "head_dim": 8}),
    "lfm2_moe": ("lfm2_moe", {
        **ATTENTION, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"], "conv_L_cache": 3,
        "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoehybrid_moe": ("granitemoehybrid", {
        **ATTENTION, **MAMBA, "intermediate_size": 32, "shared_intermediate_size": 32,
        "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "num_local_experts": 4,
        "num_experts_per_tok": 2}),
    "nemotron_h_moe": ("nemotron_h", {
        **ATTENTION, "head_dim": 8, "intermediate_size": 48, "mamba_num_heads": 8,
        "layers_block_type": [LINEAR, "moe", FULL, "moe", LINEAR], "mamba_head_dim": 8,
        "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1}),
    "gpt_oss": ("gpt_oss", {
        **ATTENTION, "head_dim": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL], "sliding_window": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "minimax": ("minimax", {
        **ATTENTION, "intermediate_size": 32, "num_hidden_layers": 3,
        "layer_types": [LINEAR, FULL, LINEAR], "block_size": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2}),
}  # fmt: skip

MOE_FAMILIES = ("jamba_moe", "qwen3_next", "qwen3_5_moe", "kimi_linear", "bailing_hybrid",
                "lfm2_moe", "minimax", "gpt_oss", "granitemoehybrid_moe",
                "nemotron_h_moe")  # fmt: skip
# Norms after a mixer blow rounding up to the usual bounds, also that of the models' own rows.
ROUGH_FAMILIES = ("jamba", "qwen3_5", "olmo_hybrid")
FAMILIES = (
    *(name for name in CONFIGS if name not in MOE_FAMILIES + ROUGH_FAMILIES),
    "handwritten",
)

# Zamba2's shared blocks work on rows twice as wide: rounding alone would reach the bounds.
GAIN = {"zamba2": 0.7}


class HandwrittenBlock(nn.Module):
    """A block of a model that nobody registered anywhere."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class Handwritten(nn.Module):
    """Embeddings with learned positions, blocks, a head; `forward` returns a plain tensor."""

    def __init__(
        self,
        vocab_size: int = VOCAB,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        max_positions: int = 8192,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_positions, width)
        self.blocks = nn.ModuleList(HandwrittenBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    decay: tuple[float, float] = (-4.0, -3.0),
    **overrides: Any,
) -> nn.Module:
    """Build a family's tiny model in training mode, with weights under which state is visible."""
    torch.manual_seed(seed)
    if family == "handwritten":
        model: nn.Module = Handwritten(**overrides)
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        name, settings = CONFIGS[family]
        config = AutoConfig.for_model(name, **{**COMMON, **settings, **overrides})
        model = AutoModelForCausalLM.from_config(config)
    spread_weights(model, seed=seed, decay=decay, gain=GAIN.get(family, 1.0))
    return model.to(dtype).train()


def spread_weights(
    model: nn.Module, *, seed: int, decay: tuple[float, float], gain: float = 1.0
) -> None:
    """Take every parameter away from zeros and ones, and give Mamba a long memory."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                low, high = decay
                parameter.copy_(torch.linspace(low, high, parameter.numel()).view_as(parameter))
            elif parameter.ndim >= 2 and "conv1d" not in name:
                parameter.copy_(gain * noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)


def forward_rows(model: nn.Module, input_ids: Tensor) -> Tensor:
    """The untouched model on one unpadded row [1,N], no cache: logits [1,N,V]."""
    if isinstance(model, Handwritten):
        return model(input_ids, torch.arange(input_ids.shape[1])[None])
    return model(input_ids=input_ids, use_cache=False).logits
