"""Capture a model by Dynamo, with our own backend, and run the rewritten graph.

`torch.compile` does the capture, guards it and recaptures when the model changes (train or eval,
dtype, autocast). The backend rewrites a copy of the graph; the graph's inputs stay Dynamo's own,
so parameters are always the live ones.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals

from prefix_rewrite.distributed.fsdp import gathering_again, is_sharded, parameters_whole
from prefix_rewrite.entry import GraphOutput, make_entry
from prefix_rewrite.errors import Finding, PrefixRewriteError, UnsupportedModelError
from prefix_rewrite.layout import Layout
from prefix_rewrite.mixers.attention import (
    ATTENTION_NAME,
    SDPA_NAME,
    attention_seam,
    sdpa_seam,
)
from prefix_rewrite.model_checks import attention_configs, attention_findings, model_findings
from prefix_rewrite.passes.context import Census, PassContext
from prefix_rewrite.passes.pipeline import rewrite
from prefix_rewrite.seams import (
    install_recorders,
    install_seams,
    methods_through_seams,
    tracing_for_us,
)
from prefix_rewrite.segments import IntArray

Planners = tuple[Callable[[Any], Mapping[str, IntArray]], ...]

# The rewrite needs the whole graph, which inside DDP's forward would be cut into its buckets; and
# each mode (train, gradients, entropy, logits, autocast, ...) is a graph of its own that stays.
_DYNAMO = {"specialize_float": True, "optimize_ddp": False, "recompile_limit": 64}


class _NotPlanned(Exception):
    """The graph was captured, but the layout given was not planned for its ops."""


class CapturedModel:
    """One model's rewritten graphs behind Dynamo's guards.

    Attributes:
        census: what the graph captured last holds.
        planners: what its ops must know of a forest, or of a rank's share of it.
        context: what the passes found in it, also where they refused it.
        guards: what makes Dynamo capture again, counted by kind.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        backend: str | Callable[..., Any],
        mtp: str,
        group: str | None = None,
    ):
        self.model = model
        self.group = group
        self.backend = backend
        self.mtp = mtp
        self.census: Census | None = None
        self.planners: Planners = ()
        self.context: PassContext | None = None
        self.guards: Counter[str] = Counter()
        self._planned: Planners | None = None
        self._lock = threading.RLock()
        install_seams(model)
        self._configs = list(attention_configs(model))
        self._findings: list[Finding] = []
        if self._configs:
            _register_attention()
        self._compiled = torch.compile(
            make_entry(model),
            backend=self._compile_graph,
            fullgraph=True,
            dynamic=True,
            options={"guard_filter_fn": self._count_guards},
        )

    def capture(self) -> Census:
        """Capture and rewrite the model in its present mode, without running it.

        Raises:
            UnsupportedModelError: it can't be run exactly on a forest, with every reason.
        """
        self._findings = model_findings(self.model)
        install_recorders(self.model)
        device = next(self.model.parameters()).device
        self._run(
            _example_layout(device, self.group), None, torch.ones(1, device=device), False, False
        )
        assert self.census is not None, "a run must capture"
        return self.census

    def __call__(
        self,
        layout_for: Callable[[Planners], Layout],
        temperature: Tensor,
        *,
        entropy: bool,
        logits: bool,
    ) -> GraphOutput:
        """Run on a forest, laid out for whatever ops the model's current graph holds."""
        while True:
            planners = self.planners
            result = self._run(layout_for(planners), planners, temperature, entropy, logits)
            if result is not None:
                return result

    def _run(
        self,
        layout: Layout,
        planned: Planners | None,
        temperature: Tensor,
        entropy: bool,
        logits: bool,
    ) -> GraphOutput | None:
        if is_in_any_mode_without_ignore_compile_internals():
            raise PrefixRewriteError(
                "forests must run outside torch dispatch modes, got one: under it Dynamo captures "
                "nothing; leave the mode off around the call"
            )
        if planned is not None:
            self._check_attention()
        with (
            self._lock,
            _attention_through_seam(self._configs),
            parameters_whole(self.model, late=self.backend == "eager"),
            methods_through_seams(self.model),
            tracing_for_us(),
            _translated(self._findings),
        ):
            self._planned = planned
            try:
                with torch._dynamo.config.patch(_DYNAMO):
                    return self._compiled(
                        layout.input_ids,
                        layout.position_ids,
                        layout.plan,
                        layout.edge_source,
                        layout.edge_row,
                        layout.edge_target,
                        temperature,
                        entropy,
                        logits,
                    )
            except _NotPlanned:
                return None

    @property
    def _gathers(self) -> bool:
        """Compilers plan memory themselves; the eager graph gathers sharded parameters late."""
        return self.backend == "eager" and is_sharded(self.model)

    def _count_guards(self, entries: Sequence[Any]) -> list[bool]:
        """Every guard is kept; Dynamo only offers them for choice."""
        self.guards = Counter(entry.guard_type for entry in entries)
        return [True] * len(entries)

    def _check_attention(self) -> None:
        """The implementation may have been set again since the capture."""
        findings = attention_findings(self._configs)
        if findings:
            raise UnsupportedModelError(findings)

    def _compile_graph(self, graph_module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        context = PassContext(
            str(self.backend), self.mtp, self._findings, group=self.group, gathers=self._gathers
        )
        self.context = context
        rewritten = rewrite(graph_module, context)
        census = self.census = context.checked_census
        planners = (
            context.form_of(call.target).planner_of(call.arguments) for call in census.mixers
        )
        needed = tuple(dict.fromkeys(planners))
        self.planners = tuple(dict.fromkeys((*self.planners, *needed)))
        run = self._lower(rewritten, inputs)

        def run_if_planned(*arguments: Any) -> Any:
            if self._planned is None or not set(needed) <= set(self._planned):
                raise _NotPlanned
            return run(*arguments)

        return run_if_planned

    def _lower(self, graph_module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self._gathers:
            return gathering_again(graph_module.forward)
        if self.backend == "eager":
            return graph_module.forward
        return torch._dynamo.lookup_backend(self.backend)(graph_module, inputs)


def _example_layout(device: torch.device, group: str | None) -> Layout:
    """Lengths that differ from each other and from 0 and 1, so that each gets its own symbol."""

    lengths = (23,) if group is None else (23, 37, 17, 19)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return Layout(
        input_ids=zeros(1, 11),
        position_ids=torch.arange(11, device=device)[None],
        plan=(torch.zeros(29, dtype=torch.int64), *(zeros(n) for n in lengths)),
        edge_source=zeros(3),
        edge_row=zeros(5),
        edge_target=zeros(5),
        num_edges=5,
    )


def _register_attention() -> None:
    """Offer our seams to transformers' attention interface; as masks the names are unknown."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_seam)
    AttentionInterface.register(SDPA_NAME, sdpa_seam)


@contextmanager
def _attention_through_seam(configs: list[Any]) -> Iterator[None]:
    """Name our seam as the attention implementation while Dynamo traces or checks guards."""
    before = [config._attn_implementation_internal for config in configs]
    for config, name in zip(configs, before, strict=True):
        config._attn_implementation_internal = SDPA_NAME if name == "sdpa" else ATTENTION_NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


@contextmanager
def _translated(findings: list[Finding]) -> Iterator[None]:
    """Turn Dynamo's errors into ours; `findings` were known before it traced."""
    try:
        yield
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, PrefixRewriteError):
            raise inner from None
        raise
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        raise UnsupportedModelError(findings or [_capture_finding(error)]) from None


def _capture_finding(error: Exception) -> Finding:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    stack = list(getattr(error, "real_stack", None) or [])
    frames = [frame for frame in stack if frame.filename != __file__]
    return Finding(
        what=f"could not be captured as one graph: {' '.join(lines[:3])}",
        remedy="avoid control flow that depends on tensor values, and calls Dynamo can't trace",
        source=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
    )
