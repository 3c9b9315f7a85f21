"""The public wrapper: an unmodified model in, the same model that also takes forests out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from prefix_rewrite.capture import CapturedModel, Planners
from prefix_rewrite.distributed.context_group import ContextGroup, forest_bytes
from prefix_rewrite.distributed.rank_layout import build_rank_layout
from prefix_rewrite.errors import Finding, PrefixRewriteError, UnsupportedModelError
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.layout import Layout, build_layout
from prefix_rewrite.output import ForestOutput

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
        cp_mesh: one-dimensional device mesh of the context-parallel group. Every rank is given
            the same forest, gets all results, computes the same loss and calls `backward()`;
            then `compiled.sync_gradients()` leaves the full gradient on every rank.
        mtp: 'reject' a head that predicts further ahead, or 'bypass' it: train without it.

    Raises:
        UnsupportedModelError: the model can't be run exactly on a forest in its present mode;
            lists every reason. It may also come from a later call, if the mode changed.
    """
    if not isinstance(model, nn.Module):
        raise PrefixRewriteError(f"model must be an nn.Module, got {type(model).__name__}")
    if mtp not in ("reject", "bypass"):
        raise PrefixRewriteError(f"mtp must be 'reject' or 'bypass', got {mtp!r}")
    if isinstance(model, _ForestModel):
        model = model._prefix_rewrite_runner.captured.model
    runner = _Runner(model, {"backend": backend, "cp_mesh": cp_mesh, "mtp": mtp})
    return _share(model, runner)


def compiled_runner(compiled: nn.Module) -> _Runner:
    """Return what runs a compiled model's forests.

    Raises:
        PrefixRewriteError: the model was not compiled.
    """
    if not isinstance(compiled, _ForestModel):
        kind = type(compiled).__name__
        raise PrefixRewriteError(f"needs a model from prefix_compile, got an ordinary {kind}")
    return compiled._prefix_rewrite_runner


@dataclass(frozen=True)
class _Call:
    """A forest, checked and laid out, and what is asked of it."""

    forest: PrefixForest
    temperature: float
    entropy: bool
    logits: bool


class _Runner:
    """Runs one model on forests; keeps each forest's layout for as long as the forest lives."""

    def __init__(self, model: nn.Module, options: dict[str, Any]):
        self.options = options
        capture = {name: value for name, value in options.items() if name != "cp_mesh"}
        mesh = options["cp_mesh"]
        self.group = None if mesh is None else ContextGroup(mesh)
        name = None if self.group is None else self.group.name
        self.captured = CapturedModel(model, group=name, **capture)
        self.captured.capture()
        self._layouts: WeakKeyDictionary[PrefixForest, dict[Any, Layout]] = WeakKeyDictionary()

    def run(self, *args: Any, **kwargs: Any) -> ForestOutput:
        device = next(self.captured.model.parameters()).device

        def prepare() -> _Call:
            call = _read_call(*args, **kwargs)
            self._layout(call.forest, self.captured.planners, device)
            return call

        call = self.group.agree(prepare, self._state, device) if self.group else prepare()
        forest = call.forest
        logprobs, entropies, rows, aux_loss = self.captured(
            lambda planners: self._layout(forest, planners, device),
            torch.tensor([call.temperature], dtype=torch.float32, device=device),
            entropy=call.entropy,
            logits=call.logits,
        )
        layout = self._layout(forest, self.captured.planners, device)
        return ForestOutput(
            forest=forest,
            logprobs=self._all_edges(logprobs, layout),
            entropy=self._all_edges(entropies, layout) if call.entropy else None,
            logits=self._all_edges(rows[0].index_select(0, layout.edge_row), layout)
            if call.logits
            else None,
            aux_loss=aux_loss,
        )

    def sync_gradients(self) -> None:
        if self.group is not None:
            self.group.sum_gradients(self.captured.model.parameters())

    def _all_edges(self, per_edge: Tensor, layout: Layout) -> Tensor:
        """Drop filler; with context parallel, gather what the other ranks own."""
        own = per_edge[: layout.num_edges]
        if self.group is None or layout.edge_order is None:
            return own
        return self.group.in_callers_order(own, layout.edge_order)

    def _state(self, call: _Call) -> bytes:
        """All that the ranks of a group must have in common."""
        options = (call.temperature, call.entropy, call.logits, torch.is_grad_enabled())
        modes = [module.training for module in self.captured.model.modules()]
        return forest_bytes(call.forest) + repr((options, modes)).encode()

    def _layout(self, forest: PrefixForest, planners: Planners, device: torch.device) -> Layout:
        census = self.captured.census
        assert census is not None, "the model is captured when it is wrapped"
        layouts = self._layouts.setdefault(forest, {})
        if (planners, device) not in layouts:
            build = build_layout
            if self.group is not None:
                build = partial(build_rank_layout, rank=self.group.rank, num_ranks=self.group.size)
            layouts[planners, device] = build(
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
        return self._prefix_rewrite_runner.run(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Add up the gradients of the context-parallel group's ranks; nothing without a group.

        Call it once a step, after the last `backward()`; not under DDP or FSDP over the group's
        ranks, which reduce gradients themselves.
        """
        self._prefix_rewrite_runner.sync_gradients()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        runner = self._prefix_rewrite_runner
        model = copy.deepcopy(runner.captured.model, memo)
        return prefix_compile(model, **runner.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        runner = self._prefix_rewrite_runner
        return _restore, (runner.captured.model, runner.options)


def _restore(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    return prefix_compile(model, **options)


def _read_call(*args: Any, **kwargs: Any) -> _Call:
    """Accept `(forest, temperature=, entropy=, logits=)` and name everything else given.

    Raises:
        UnsupportedModelError: something else was given.
        PrefixRewriteError: the temperature is not above 0.
    """
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
    temperature = kwargs.get("temperature", 1.0)
    if not temperature > 0:
        raise PrefixRewriteError(f"temperature must be above 0, got {temperature}")
    wanted = (bool(kwargs.get(name, False)) for name in ("entropy", "logits"))
    return _Call(forest, temperature, *wanted)


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
