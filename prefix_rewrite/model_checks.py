"""What a model's modules say about themselves, before its graph is looked at.

Only what a captured graph can't show is judged here: an attention function that our seam would
silently stand in for, kernels that replace whole layers, a wrapper that must see each call, and
position embeddings whose values depend on how long the sequence is.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prefix_rewrite.distributed.fsdp import fsdp_findings
from prefix_rewrite.errors import Finding

Version = tuple[int, int]
_TORCH: tuple[Version, Version | None] = (2, 11), None
_TRANSFORMERS: tuple[Version, Version | None] = (5, 17), (5, 24)  # 5.24 is what the tests run on
# Attention functions of transformers: plain softmax attention over what they are given.
_KNOWN_ATTENTION = {"eager", "sdpa", "flex_attention"}
_KNOWN_ATTENTION |= {f"flash_attention_{version}" for version in (2, 3, 4)}
# Models whose own eager attention is softmax attention, with the soft caps and sinks it is given.
_PLAIN_EAGER = (
    *("llama", "gemma2", "gpt_oss", "gpt_neox", "bert", "gpt2"),
    *("granite_swa", "mimo_v2_flash"),
)
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def model_findings(model: nn.Module) -> list[Finding]:
    """Look at every module; return the reasons against a rewrite, in module order."""
    configs = list(attention_configs(model))
    findings = [*_version_findings(bool(configs)), *attention_findings(configs)]
    findings.extend(_eager_findings(model))
    if isinstance(model, DistributedDataParallel):
        findings.append(
            Finding(
                "is wrapped in DistributedDataParallel, which must see each call",
                "wrap the compiled model: DistributedDataParallel(prefix_compile(model))",
            )
        )
    findings.extend(fsdp_findings(model))
    for name, module in model.named_modules():
        findings.extend(_rope_findings(name, module))
        if getattr(module, "_use_kernels", False):
            findings.append(
                Finding("uses hub kernels that replace whole layers", "load it without", name)
            )
    return findings


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


def _version_findings(uses_transformers: bool) -> Iterator[Finding]:
    """Refuse versions whose calls of mixers and masks were never looked at."""
    supported = {"torch": _TORCH} | ({"transformers": _TRANSFORMERS} if uses_transformers else {})
    for package, (first, last) in supported.items():
        version = metadata.version(package)
        known = tuple(int(part) for part in version.split(".")[:2])
        if known < first or (last is not None and known > last):
            until = f" to {last[0]}.{last[1]}" if last else " or later"
            yield Finding(
                f"{package} {version} is not supported",
                f"install {package} {first[0]}.{first[1]}{until}",
            )


def _eager_findings(model: nn.Module) -> Iterator[Finding]:
    """Refuse eager attention that does what no argument tells: each modeling file has its own."""
    files: dict[str, str] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "eager":
            files.setdefault(type(module).__module__, name)
    for file, name in files.items():
        eager = getattr(sys.modules.get(file), "eager_attention_forward", None)
        if eager is None:
            continue
        does = _what_it_does(inspect.unwrap(eager).__code__)
        if does not in map(_plain_eager_code, _PLAIN_EAGER):
            yield Finding(
                f"eager attention of {file} is not one that is known to be plain",
                "call set_attn_implementation('sdpa')",
                name,
            )


@functools.cache
def _plain_eager_code(name: str) -> Any:
    """Return what the eager attention of one of transformers' models does; None without it.

    It is read from the file: the module's may have been replaced.
    """
    if importlib.util.find_spec(f"transformers.models.{name}") is None:
        return None
    file = f"transformers.models.{name}.modeling_{name}"
    loader: Any = importlib.util.find_spec(file).loader  # type: ignore[union-attr]
    constants = loader.get_code(file).co_consts
    (eager,) = (x for x in constants if getattr(x, "co_name", None) == "eager_attention_forward")
    return _what_it_does(eager)


def _what_it_does(code: types.CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, code.co_consts


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
