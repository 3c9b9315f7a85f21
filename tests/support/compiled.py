"""Compiled models that tests share, since a capture takes seconds.

Whoever changes a shared model's weights or settings must put them back; see `changed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from families import build_model
from torch import Tensor, nn

from prefix_rewrite import prefix_compile

# One of each way to build a model; every other family differs in its mixer alone.
CORE_FAMILIES = ("llama", "qwen3", "mamba2", "bamba", "granitemoehybrid", "nemotron_h",
                 "falcon_h1", "zamba2", "handwritten")  # fmt: skip

# Wide enough for the agent calls that are run, and a size that nothing else in a model has.
WIDE_VOCAB = 1499


@functools.cache
def shared_pair(family: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Return a family's untouched model and its compiled view."""
    model = build_model(family, dtype=dtype, vocab_size=WIDE_VOCAB)
    return model, prefix_compile(model)


@contextmanager
def changed(model: nn.Module, changes: Mapping[str, Callable[[Tensor], object]]) -> Iterator[None]:
    """Change, in place, the parameters whose names end with a key; put them back at the end."""
    before = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if any(name.endswith(end) for end in changes)
    }
    assert before, f"no parameter ends with any of {list(changes)}"
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for end, change in changes.items():
            for name in before:
                if name.endswith(end):
                    change(parameters[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, values in before.items():
                parameters[name].copy_(values)
