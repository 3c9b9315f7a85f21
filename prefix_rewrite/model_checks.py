"""What a model's modules say about themselves, before its graph is looked at.

Only what a captured graph can't show is judged here: an attention function that our seam would
silently stand in for, kernels that replace whole layers, a wrapper that must see each call, and
position embeddings whose values depend on how long the sequence is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from prefix_rewrite.errors import Finding

# Attention functions of transformers: plain softmax attention over what they are given.
_KNOWN_ATTENTION = {"eager", "sdpa", "flex_attention"}
_KNOWN_ATTENTION |= {f"flash_attention_{version}" for version in (2, 3, 4)}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def model_findings(model: nn.Module) -> list[Finding]:
    """Look at every module; return the reasons against a rewrite, in module order."""
    findings = attention_findings(attention_configs(model))
    if isinstance(model, DistributedDataParallel):
        findings.append(
            Finding(
                "is wrapped in DistributedDataParallel, which must see each call",
                "wrap the compiled model: DistributedDataParallel(prefix_compile(model))",
            )
        )
    findings.extend(_fsdp_findings(model))
    for name, module in model.named_modules():
        findings.extend(_rope_findings(name, module))
        if getattr(module, "_use_kernels", False):
            findings.append(
                Finding("uses hub kernels that replace whole layers", "load it without", name)
            )
    return findings


def _fsdp_findings(model: nn.Module) -> list[Finding]:
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not names:
        return []
    what = f"{len(names)} module(s) are wrapped by fully_shard, whose hooks cut the graph at each"
    remedy = (
        "FSDP2 is not supported yet: use DDP around the compiled model, cp_mesh, tensor parallel"
    )
    return [Finding(what, remedy, names[0])]


def attention_findings(configs: Iterable[Any]) -> list[Finding]:
    """Refuse attention functions that we don't know, before our seam stands in for them."""
    names = dict.fromkeys(config._attn_implementation for config in configs)
    return [
        Finding(
            f"attention implementation {name!r} is not one of transformers' own",
            "call set_attn_implementation('sdpa')",
        )
        for name in names
        if name is not None and (name not in _KNOWN_ATTENTION or _is_replaced(name))
    ]


def attention_configs(model: nn.Module) -> Iterator[Any]:
    """Yield each config object that names an attention implementation, once."""
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal") and id(config) not in seen:
            seen.add(id(config))
            yield config


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
