"""Seams: where an unmodified model's calls to its mixers become single graph nodes.

While Dynamo traces for us, each mixer function that a modeling file calls by name is substituted
(`torch.compiler.substitute_in_graph`) by a leaf op that only knows its output's shape. The graph
then holds one node a call, with the call's real arguments, and the token count stays symbolic.
Nothing is patched: eager code, and anybody else's `torch.compile`, still see the original.

A seam is found by the name that the modeling files have for the function, or, for a function of a
kernel library, by its full name `package.module:function`, whatever a file calls it: a library's
functions share names with those of transformers, but not their arguments.

A seam never judges. What a call asks for beyond the plain mixer is written into the leaf's
arguments, and the passes accept or refuse it.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from prefix_rewrite.targets import LIBRARY_SEAMS, TARGETS

_THREAD = threading.local()
_SHARED_FILES = {"transformers.masking_utils"}
_LIBRARIES = {name.partition(".")[0] for name in LIBRARY_SEAMS} - {"torch"}
_SUBSTITUTED: dict[int, types.FunctionType] = {}  # holds the function: its id is never reused


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


def _seams() -> dict[str, Callable[..., Any]]:
    """By the names under which modeling files call their mixers, or by full names."""
    seams = dict(LIBRARY_SEAMS)
    for target in TARGETS:
        seams.update(target.seams)
    return seams


def install_seams(model: nn.Module) -> None:
    """Substitute, for our traces only, the mixer functions of the files `model` is written in.

    And of those where transformers' models look up the functions that make their masks.
    """
    names = {type(module).__module__ for module in model.modules()} | _SHARED_FILES
    files = {sys.modules.get(name) for name in names}
    for name, seam in _seams().items():
        for function in _functions(name, files):
            if isinstance(function, types.FunctionType) and id(function) not in _SUBSTITUTED:
                _SUBSTITUTED[id(function)] = function
                _substitute(function, seam)


@contextmanager
def methods_through_seams(model: nn.Module) -> Iterator[None]:
    """Give modules our seams in place of methods that they call on themselves."""
    by_class: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
    for target in TARGETS:
        for name, seam in target.method_seams.items():
            owner, _, path = name.partition(".")
            by_class.setdefault(owner, []).append((path, seam))
    taken: list[tuple[nn.Module, str]] = []
    try:
        for module in model.modules():
            for name, seam in by_class.get(type(module).__name__, ()):
                path, _, method = name.rpartition(".")
                inner = module.get_submodule(path)
                inner.__dict__[method] = types.MethodType(seam, inner)
                taken.append((inner, method))
        yield
    finally:
        for inner, method in taken:
            inner.__dict__.pop(method, None)


def install_recorders(model: nn.Module) -> None:
    """Let transformers record the routers' logits where a config asks for them.

    It hooks a model at its first such call, under a lock that Dynamo can't trace.
    """
    for module in model.modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            recording = sys.modules.get("transformers.utils.output_capturing")
            if recording is not None and recording._CAN_RECORD_REGISTRY.get(module):
                recording.maybe_install_capturing_hooks(module)


def _functions(name: str, files: Iterable[Any]) -> Iterator[Any]:
    """Yield what a seam's name stands for; a library's functions go by their full names alone."""
    module, colon, own = name.rpartition(":")
    if colon:
        yield _find(sys.modules.get(module), own)
        return
    for file in files:
        function = _find(file, name)
        if str(getattr(function, "__module__", None)).partition(".")[0] not in _LIBRARIES:
            yield function


def _find(file: Any, name: str) -> Any:
    """Return a file's function, or, for `Class.method`, what the method's decorator calls.

    Dynamo looks up the functions that it meets as values, not the methods that it calls itself.
    """
    owner, _, method = name.rpartition(".")
    if not owner:
        return getattr(file, name, None)
    return inspect.unwrap(getattr(getattr(file, owner, None), method, None))  # type: ignore[arg-type]


def _substitute(function: types.FunctionType, seam: Callable[..., Any]) -> None:
    original = _clone(function)

    @torch.compiler.substitute_in_graph(function, skip_signature_check=True)
    def substitute(*args: Any, **kwargs: Any) -> Any:
        if _is_ours():
            return seam(*args, **kwargs)
        return original(*args, **kwargs)


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
