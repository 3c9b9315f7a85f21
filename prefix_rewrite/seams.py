"""Seams: where an unmodified model's calls to its mixers become single graph nodes.

While Dynamo traces for us, each mixer function that a modeling file calls by name is substituted
(`torch.compiler.substitute_in_graph`) by a leaf op that only knows its output's shape. The graph
then holds one node a call, with the call's real arguments, and the token count stays symbolic.
Nothing is patched: eager code, and anybody else's `torch.compile`, still see the original.

A seam never judges. What a call asks for beyond the plain mixer is written into the leaf's
arguments, and the passes accept or refuse it.

Shapes: T physical tokens, H query heads, K key/value heads, D head dimension, C channels,
P Mamba head dimension, N state size, R distinct edge sources, E edges, V vocabulary.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION_NAME = "prefix_rewrite"

# What transformers' models pass down to every layer and that asks nothing of a mixer.
_PASSED_DOWN = frozenset(
    {"cache", "cache_position", "labels", "output_attentions", "output_hidden_states"}
    | {"output_router_logits", "past_key_values", "position_embeddings", "position_ids"}
    | {"return_dict", "use_cache"}
)
_THREAD = threading.local()
_ORIGINALS: dict[int, Callable[..., Any]] = {}


@contextmanager
def tracing_for_us() -> Iterator[None]:
    """Let the seams act on what Dynamo traces in this thread while the context is open."""
    before = getattr(_THREAD, "active", False)
    _THREAD.active = True
    try:
        yield
    finally:
        _THREAD.active = before


@torch.compiler.assume_constant_result
def _is_ours() -> bool:
    return getattr(_THREAD, "active", False)


def _leaf(name: str, schema: str, fake: Callable[..., Any]) -> None:
    """Define an op that exists in graphs only: it has a shape, but no kernel."""
    qualified = f"prefix_rewrite::{name}"
    torch.library.define(qualified, schema)
    torch.library.register_fake(qualified, fake)
    # Without an autograd rule Dynamo would see outputs that need no gradient.
    torch.library.register_autograd(qualified, lambda ctx, *grads: None)


def _attention_shape(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _scan_shape(x: Tensor, *rest: Any) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _project_shape(
    logits: Tensor, others: list[Tensor], edge_source: Tensor, edge_row: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    edges = (edge_row.shape[0],)
    rows = logits.new_empty(1, edge_source.shape[0], logits.shape[-1])
    return logits.new_empty(edges, dtype=dtype), logits.new_empty(edges, dtype=dtype), rows


_leaf(
    "bind",
    "(Tensor input_ids, Tensor host_plan, Tensor device_plan) -> Tensor",
    lambda input_ids, host_plan, device_plan: torch.empty_like(input_ids),
)
_leaf(
    "leaf_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, float dropout, "
    "int window, float softcap, bool causal, str unknown) -> Tensor",
    _attention_shape,
)
_leaf(
    "leaf_conv",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, str unknown) -> Tensor",
    lambda x, *rest: torch.empty_like(x),
)
_leaf(
    "leaf_ssd",
    "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "bool dt_softplus, float dt_min, float dt_max, str unknown) -> Tensor",
    _scan_shape,
)
_leaf(
    "leaf_unknown_mixer",
    "(Tensor x, str name) -> Tensor",
    lambda x, name: torch.empty_like(x),
)
_leaf(
    "leaf_project",
    "(Tensor logits, Tensor[] others, Tensor edge_source, Tensor edge_row, Tensor edge_target, "
    "Tensor temperature, bool entropy, bool logits_wanted) -> (Tensor, Tensor, Tensor)",
    _project_shape,
)


def _asked_for(arguments: dict[str, Any]) -> str:
    """Name the arguments that ask something of the mixer: neither absent nor False."""
    return ",".join(
        sorted(
            name
            for name, value in arguments.items()
            if name not in _PASSED_DOWN and value is not None and value is not False
        )
    )


def attention_seam(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for a transformers attention function: q [B,H,T,D], k and v [B,K,T,D]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = torch.ops.prefix_rewrite.leaf_attention(
        query,
        key,
        value,
        attention_mask,
        s_aux,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        float(dropout),
        0 if sliding_window is None else sliding_window,
        0.0 if softcap is None else softcap,
        bool(causal),
        _asked_for(kwargs),
    )
    return out, None


def _conv_seam(
    x: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    hidden_states: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    x = hidden_states if x is None else x
    unknown = _asked_for(kwargs)
    return torch.ops.prefix_rewrite.leaf_conv(x, weight, bias, activation or "", unknown)


def _ssd_seam(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Tensor:
    unknown = _asked_for(kwargs)
    low, high = dt_limit
    return torch.ops.prefix_rewrite.leaf_ssd(
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, float(low), float(high), unknown
    )


def _no_fused_kernel(*args: Any, **kwargs: Any) -> None:
    """A fused call declines, so that the model takes its unfused path: conv and scan apart."""
    return None


def _unknown_mixer(name: str) -> Callable[..., Any]:
    def seam(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = torch.ops.prefix_rewrite.leaf_unknown_mixer(x, name)
        return (out, None) if name.startswith(("torch_chunk", "chunk")) else out

    return seam


# The names under which transformers' modeling files call their mixers.
SEAMS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv_seam,
    "mamba2_chunk_scan": _ssd_seam,
    "mamba2_split_conv1d_scan_combined": _no_fused_kernel,
    "mamba_inner_fn": _no_fused_kernel,
    **{
        name: _unknown_mixer(name)
        for name in (
            "chunk_kimi_delta_attention",
            "mamba_selective_scan",
            "torch_chunk_gated_delta_rule",
        )
    },
}


def _clone(function: types.FunctionType) -> Callable[..., Any]:
    """Copy a function, so that Dynamo can trace the original's code under another identity."""
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _substitute(function: types.FunctionType, seam: Callable[..., Any]) -> None:
    if id(function) in _ORIGINALS:
        return
    original = _ORIGINALS[id(function)] = _clone(function)
    _KEEP_ALIVE.append(function)

    @torch.compiler.substitute_in_graph(function, skip_signature_check=True)
    def substitute(*args: Any, **kwargs: Any) -> Any:
        if _is_ours():
            return seam(*args, **kwargs)
        return original(*args, **kwargs)


_KEEP_ALIVE: list[types.FunctionType] = []  # an id in _ORIGINALS must never be reused


def install_seams(model: nn.Module) -> None:
    """Substitute, for our traces only, the mixer functions of the files `model` is written in."""
    files = {sys.modules.get(type(module).__module__) for module in model.modules()}
    for file in files:
        for name, seam in SEAMS.items():
            function = getattr(file, name, None)
            if isinstance(function, types.FunctionType):
                _substitute(function, seam)
