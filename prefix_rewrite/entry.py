"""The function that is captured: bind the layout, run the model, project its logits.

Shapes: T tokens, R distinct edge sources, E edges, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prefix_rewrite.errors import Finding, UnsupportedModelError
from prefix_rewrite.mixers.base import define_leaf

Projected = tuple[Tensor, Tensor, Tensor]  # logprobs [E], entropy [E], logits [1,R,V]
GraphOutput = tuple[Tensor, Tensor, Tensor, Tensor | None]  # and the model's auxiliary loss


def _project_fake(
    logits: Tensor, others: list[Tensor], edge_source: Tensor, edge_row: Tensor, *rest: Any
) -> Projected:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    edges = (edge_row.shape[0],)
    rows = logits.new_empty(1, edge_source.shape[0], logits.shape[-1])
    return logits.new_empty(edges, dtype=dtype), logits.new_empty(edges, dtype=dtype), rows


leaf_bind = define_leaf(
    "leaf_bind",
    "(Tensor input_ids, Tensor[] plan) -> Tensor",
    lambda input_ids, plan: torch.empty_like(input_ids),
)
leaf_project = define_leaf(
    "leaf_project",
    "(Tensor logits, Tensor[] others, Tensor edge_source, Tensor edge_row, Tensor edge_target, "
    "Tensor temperature, bool entropy, bool logits_wanted) -> (Tensor, Tensor, Tensor)",
    _project_fake,
)


def make_entry(model: nn.Module) -> Callable[..., GraphOutput]:
    """Build the function that Dynamo traces for a model.

    Raises:
        UnsupportedModelError: the model's forward takes no token ids.
    """
    ids_name, takes_positions, constants = _forward_arguments(model)
    forward = cast("Callable[..., Any]", model)

    def entry(
        input_ids: Tensor,
        position_ids: Tensor,
        plan: tuple[Tensor, ...],
        edge_source: Tensor,
        edge_row: Tensor,
        edge_target: Tensor,
        temperature: Tensor,
        entropy: bool,
        logits_wanted: bool,
    ) -> GraphOutput:
        arguments = {ids_name: leaf_bind(input_ids, plan), **constants}
        if takes_positions:
            arguments["position_ids"] = position_ids
        logits, aux_loss, others = _split_output(forward(**arguments))
        if isinstance(logits, DTensor):  # of a head that tensor parallel shards
            logits = logits.to_local()
        edges = (edge_source, edge_row, edge_target)
        projected = leaf_project(logits, others, *edges, temperature, entropy, logits_wanted)
        return (*projected, aux_loss)

    # Dynamo keeps its cache by code object; a copy gives each model a cache of its own.
    entry.__code__ = entry.__code__.replace()
    return entry


def forward_row(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Run the untouched model on one unpadded row, ids [1,N], without a cache: logits [1,N,V]."""
    ids_name, takes_positions, constants = _forward_arguments(model)
    arguments = {ids_name: input_ids, **constants}
    if takes_positions:
        arguments["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    return _split_output(model(**arguments))[0]


def _forward_arguments(model: Any) -> tuple[str, bool, dict[str, Any]]:
    """Return the ids' parameter, whether positions are taken, and what else must be told."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = inspect.signature(inner.forward).parameters
    first = next(iter(parameters), None)
    if first is None:
        raise UnsupportedModelError(
            [Finding("forward takes no arguments", "take token ids as the first one")]
        )
    accepted = set(parameters)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        body = getattr(inner, "base_model", inner)
        accepted |= set(inspect.signature(body.forward).parameters)
    constants = {"use_cache": False} if "use_cache" in accepted else {}
    ids_name = "input_ids" if "input_ids" in accepted else first
    return ids_name, "position_ids" in accepted, constants


def _split_output(output: Any) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Return a model's logits, its auxiliary loss, and every other tensor in its output."""
    if isinstance(output, Tensor):
        return output, None, []
    if isinstance(output, (tuple, list)):
        return output[0], None, _tensors(output[1:])
    fields = dict(output.items())
    logits, aux_loss = fields.pop("logits"), fields.pop("aux_loss", None)
    return logits, aux_loss, _tensors(list(fields.values()))


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(_tensors(value))
    return found
