"""Every causal language model of transformers, made tiny without looking at it.

`python tests/support/causal_models.py` compares each on a forest with its calls as rows, and
writes docs/families.md; `tests/test_causal_models.py` holds the page to what it says.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from families import ATTENTION, COMMON, CONFIGS, LATENT, build_model, spread_weights
from forests import SHAPES, calls_of
from oracle import run_forest, run_rows, worst_gradient
from torch import nn

from prefix_rewrite import PrefixForest, UnsupportedModelError, prefix_compile

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
EXACT, REFUSED, NOT_TRIED = "exact", "refused", "not tried"
LARGEST = 30_000_000  # parameters
LOGPROBS, GRADIENTS = 1e-5, 1e-4

# By the names that configs have for them; one takes what it knows.
SIZES: dict[str, Any] = {**COMMON, **ATTENTION, **LATENT, "head_dim": 8, "num_hidden_layers": 2}
SIZES |= {"num_key_value_heads": 2, "num_experts": 4, "n_routed_experts": 4, "q_lora_rank": 8}
SIZES |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "n_group": 1, "topk_group": 1}
SIZES |= {"first_k_dense_replace": 1, "sliding_window": 5, "state_size": 8, "lru_width": 32}
SIZES |= {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48, "n_positions": 256}
SIZES |= {"d_model": 32, "n_heads": 4, "n_layers": 2, "num_heads": 4, "rotary_dim": 4}
SIZES |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
SIZES |= {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 256}
del SIZES["mlp_layer_types"]
_DROPOUTS = ("dropout", "pdrop", "layerdrop", "dropout_prob")
# With latent attention the rotary head is the rotated part alone, and there is a key a head.
_LATENT = {"head_dim": 4, "num_key_value_heads": 4}
ALSO: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("longcat_flash", "minicpm3", "sarvam_mla", "youtu"), _LATENT),
}


class Outcome(NamedTuple):
    """What became of a model: `reason` says why it was refused or not tried."""

    status: str
    reason: str = ""


def model_types() -> list[str]:
    """All types that `AutoModelForCausalLM` knows."""
    from transformers.models.auto import modeling_auto

    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build_tiny(model_type: str) -> nn.Module:
    """Build a model of random weights: the tests' own of that type, or one by `SIZES`.

    Raises:
        ValueError: sizes alone don't make it small; and whatever its config or class raise.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    own = [name for name, (of_type, _) in CONFIGS.items() if of_type == model_type]
    if own:
        return build_model(own[0])
    default = AutoConfig.for_model(model_type)
    sizes = {name: size for name, size in SIZES.items() if _has(default, name)}
    off = {name: 0.0 for name in vars(default) if name.endswith(_DROPOUTS)}
    config = AutoConfig.for_model(model_type, **{**sizes, **off, **ALSO.get(model_type, {})})
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"has {count:,} parameters at the sizes tried")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    spread_weights(model, seed=0, decay=(-4.0, -3.0))
    return model.float().train()


def _has(config: Any, name: str) -> bool:
    try:
        getattr(config, name)
    except Exception:  # of a property, or of a size that differs by layer
        return False
    settable = getattr(type(config), name, None)
    return not isinstance(settable, property) or settable.fset is not None


def try_model(model_type: str) -> Outcome:
    """Compare a model on a forest with its calls as rows: log-probabilities and gradients.

    Raises:
        AssertionError: they differ.
    """
    calls = calls_of(SHAPES["nested"])
    try:
        model = build_tiny(model_type)
        expected = run_rows(model, calls)
    except Exception as error:  # anything may go wrong in a model that nobody looked at
        return Outcome(NOT_TRIED, _short(f"{type(error).__name__}: {error}"))
    try:
        got = run_forest(prefix_compile(model), PrefixForest.from_calls(calls))
    except UnsupportedModelError as error:
        return Outcome(REFUSED, _short(error.findings[0].what))
    difference = float((got.logprobs - expected.logprobs).abs().max())
    assert difference <= LOGPROBS, f"{model_type}: logprobs differ by {difference:.1e}"
    error, name = worst_gradient(got.gradients, expected.gradients)
    assert error <= GRADIENTS, f"{model_type}: gradient of {name} differs by {error:.1e}"
    return Outcome(EXACT)


def _short(reason: str) -> str:
    """The first line, without what Dynamo explains, and without what a table would not take."""
    line = reason.split(" Explanation:")[0].splitlines()[0].replace("|", "/").strip()
    return line if len(line) <= 120 else f"{line[:117]}..."


def read_page() -> dict[str, Outcome]:
    """Return what docs/families.md says of each model type."""
    rows = (line for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in rows)
    return {name.strip("`"): Outcome(status, reason) for name, status, reason in cells}


def write_page(outcomes: dict[str, Outcome]) -> None:
    import transformers

    counts = {
        status: sum(outcome.status == status for outcome in outcomes.values())
        for status in (EXACT, REFUSED, NOT_TRIED)
    }
    rows = [
        f"| `{name}` | {outcome.status} | {outcome.reason} |" for name, outcome in outcomes.items()
    ]
    summary = (
        f"**{counts[EXACT]} exact, {counts[REFUSED]} refused before any compute, none differs**"
    )
    version = f"transformers {transformers.__version__}"
    head = f"""# Causal language models of transformers

Every type that `AutoModelForCausalLM` of {version} knows, as a tiny random model, on a
forest that branches, against the untouched model on one row a call: log-probabilities within
{LOGPROBS:g}, each parameter's gradient within {GRADIENTS:g}. {summary};
{counts[NOT_TRIED]} not tried, because generic sizes don't make a small model of them.
For a model of your own: `prefix-rewrite explain`.

Written by `python tests/support/causal_models.py`, checked by `tests/test_causal_models.py`.

| model type | on a forest | reason |
|---|---|---|
"""
    PAGE.write_text(head + "\n".join(rows) + "\n")


def main() -> None:
    from rich.progress import track

    warnings.simplefilter("ignore")
    outcomes = {}
    for model_type in track(model_types(), "comparing"):
        outcomes[model_type] = try_model(model_type)
        torch._dynamo.reset()
    write_page(outcomes)


if __name__ == "__main__":
    main()
