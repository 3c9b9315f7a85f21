"""What a model's modules say about themselves, before its graph is looked at.

Only what a captured graph can't show is judged here: an attention function that our seam would
silently stand in for, kernels that replace whole layers, and position embeddings whose values
depend on how long the sequence is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from prefix_rewrite.errors import Finding
from prefix_rewrite.mixers.attention import ATTENTION_NAME

# Attention functions of transformers: plain softmax attention over what they are given.
_KNOWN_ATTENTION = {"eager", "sdpa", "flex_attention"}
_KNOWN_ATTENTION |= {f"flash_attention_{version}" for version in (2, 3, 4)}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def model_findings(model: nn.Module) -> list[Finding]:
    """Look at every module; return the reasons against a rewrite, in module order."""
    findings: list[Finding] = []
    seen_configs: set[int] = set()
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is not None and id(config) not in seen_configs:
            seen_configs.add(id(config))
            findings.extend(_attention_findings(name, config))
        findings.extend(_rope_findings(name, module))
        if getattr(module, "_use_kernels", False):
            findings.append(
                Finding("uses hub kernels that replace whole layers", "load it without", name)
            )
    return findings


def attention_configs(model: nn.Module) -> Iterator[Any]:
    """Yield each config object that names an attention implementation, once."""
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal") and id(config) not in seen:
            seen.add(id(config))
            yield config


def _attention_findings(name: str, config: Any) -> Iterator[Finding]:
    implementation = getattr(config, "_attn_implementation", None)
    if implementation in (None, ATTENTION_NAME):
        return
    if implementation not in _KNOWN_ATTENTION or _is_replaced(implementation):
        yield Finding(
            f"attention implementation {implementation!r} is not one of transformers' own",
            "set_attn_implementation('sdpa')",
            name,
        )


def _is_replaced(implementation: str) -> bool:
    """Say whether a known name was registered again with somebody else's function."""
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    if implementation not in functions:  # eager is a function of each modeling file
        return False
    return not functions[implementation].__module__.startswith("transformers.integrations.")


def _rope_findings(name: str, module: nn.Module) -> Iterator[Finding]:
    kinds = getattr(module, "rope_type", None)
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if kind in _LENGTH_DEPENDENT_ROPE:
            yield Finding(
                f"{kind!r} RoPE rotates a prefix differently for paths of different length",
                "use a RoPE type whose angles depend on the position alone",
                name,
            )
