"""The public wrapper: an unmodified model in, the same model that also takes forests out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from prefix_rewrite.capture import CapturedModel
from prefix_rewrite.errors import Finding, PrefixRewriteError, UnsupportedModelError
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.layout import Layout, build_layout
from prefix_rewrite.output import ForestOutput
from prefix_rewrite.plan import Planner

_OPTIONS = ("temperature", "entropy", "logits")


def prefix_compile(
    model: nn.Module,
    *,
    backend: str | Callable[..., Any] = "eager",
    cp_mesh: Any = None,
    mtp: str = "reject",
) -> nn.Module:
    """Rewrite a language model so that it also runs on prefix forests, exactly.

    The module returned shares everything with `model`: parameters, buffers, submodules, hooks,
    config, mode. Called with ordinary arguments it is the unmodified model; called with a
    `PrefixForest` it returns a `ForestOutput`:

        compiled(forest, *, temperature=1.0, entropy=False, logits=False)

    Args:
        model: a causal language model: token ids in, logits `[1, T, V]` (or an output whose
            `logits` or first element they are) out.
        backend: what runs the rewritten graph: 'eager', 'aot_eager', 'inductor' or any backend
            `torch.compile` takes.
        cp_mesh: device mesh of the context-parallel group.
        mtp: 'reject' a head that predicts further ahead, or 'bypass' it: train without it.

    Raises:
        UnsupportedModelError: the model can't be run exactly on a forest in its present mode;
            lists every reason. It may also come from a later call, if the mode changed.
    """
    if not isinstance(model, nn.Module):
        raise PrefixRewriteError(f"model must be an nn.Module, got {type(model).__name__}")
    if mtp not in ("reject", "bypass"):
        raise PrefixRewriteError(f"mtp must be 'reject' or 'bypass', got {mtp!r}")
    if cp_mesh is not None:
        raise PrefixRewriteError("context parallel is not supported yet; pass cp_mesh=None")
    if isinstance(model, _ForestModel):
        model = model._prefix_rewrite_runner.captured.model
    runner = _Runner(model, {"backend": backend, "mtp": mtp})
    return _share(model, runner)


class _Runner:
    """Runs one model on forests; keeps each forest's layout for as long as the forest lives."""

    def __init__(self, model: nn.Module, options: dict[str, Any]):
        self.options = options
        self.captured = CapturedModel(model, **options)
        self.captured.capture()
        self._layouts: WeakKeyDictionary[PrefixForest, dict[Any, Layout]] = WeakKeyDictionary()

    def run(
        self,
        forest: PrefixForest,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        logits: bool = False,
    ) -> ForestOutput:
        if not temperature > 0:
            raise PrefixRewriteError(f"temperature must be above 0, got {temperature}")
        device = next(self.captured.model.parameters()).device
        logprobs, entropies, rows = self.captured(
            lambda planners: self._layout(forest, planners, device),
            torch.tensor([temperature], dtype=torch.float32, device=device),
            entropy=bool(entropy),
            logits=bool(logits),
        )
        layout = self._layout(forest, self.captured.planners, device)
        own = slice(0, layout.num_edges)
        return ForestOutput(
            forest=forest,
            logprobs=logprobs[own],
            entropy=entropies[own] if entropy else None,
            logits=rows[0].index_select(0, layout.edge_row[own]) if logits else None,
        )

    def _layout(
        self, forest: PrefixForest, planners: tuple[Planner, ...], device: torch.device
    ) -> Layout:
        census = self.captured.census
        assert census is not None, "the model is captured when it is wrapped"
        layouts = self._layouts.setdefault(forest, {})
        if (planners, device) not in layouts:
            layouts[planners, device] = build_layout(
                forest,
                planners,
                device,
                num_embeddings=census.num_embeddings,
                vocab_size=census.vocab_size,
            )
        return layouts[planners, device]


class _ForestModel:
    """Mixed into the model's own class: adds forests, changes nothing else."""

    __slots__ = ()
    _prefix_rewrite_runner: _Runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if not any(isinstance(value, PrefixForest) for value in given):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        # Hooks run on the inner model, inside the graph, not a second time out here.
        forest, options = _read_call(*args, **kwargs)
        return self._prefix_rewrite_runner.run(forest, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        runner = self._prefix_rewrite_runner
        model = copy.deepcopy(runner.captured.model, memo)
        return prefix_compile(model, **runner.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        runner = self._prefix_rewrite_runner
        return _restore, (runner.captured.model, runner.options)


def _restore(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    return prefix_compile(model, **options)


def _read_call(*args: Any, **kwargs: Any) -> tuple[PrefixForest, dict[str, Any]]:
    """Accept `(forest, temperature=, entropy=, logits=)` and name everything else given."""
    forest, *rest = args if args else (kwargs.pop("forest", None),)
    unknown = [
        name for name, value in kwargs.items() if name not in _OPTIONS and value is not None
    ]
    unknown += [f"positional argument {i}" for i in range(1, len(rest) + 1)]
    if not isinstance(forest, PrefixForest):
        unknown.insert(0, "a forest that is not the first argument")
    if unknown:
        raise UnsupportedModelError(
            [
                Finding(
                    f"a forest was given together with {name}",
                    "pass the forest alone: ids, positions and what each token sees come from it",
                )
                for name in unknown
            ]
        )
    return forest, {name: kwargs[name] for name in _OPTIONS if name in kwargs}


def _share(model: nn.Module, runner: _Runner) -> nn.Module:
    """Make a second view of `model`: same attributes, and a class that also takes forests."""
    base = type(model)
    namespace = {
        "__slots__": ("_prefix_rewrite_runner",),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    view: Any = object.__new__(type(base.__name__, (_ForestModel, base), namespace))
    object.__setattr__(view, "__dict__", model.__dict__)
    object.__setattr__(view, "_prefix_rewrite_runner", runner)
    return view
