"""Run a model in fp64 throughout: transformers' own casts to fp32 become casts to fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule


def fp64_throughout(graph_module: GraphModule, inputs: list[Any]) -> Any:
    """A backend: the graph as it is, but with no cast below fp64 left."""
    for node in graph_module.graph.nodes:
        node.args = _widened(node.args)
        node.kwargs = _widened(node.kwargs)
        if node.op == "call_method" and node.target == "float":
            node.target = "double"
        if "steps" in node.kwargs:
            node.kwargs = {**node.kwargs, "steps": _without_float(node.kwargs["steps"])}
    graph_module.recompile()
    return graph_module.forward


def _widened(arguments: Any) -> Any:
    return torch.fx.node.map_aggregate(
        arguments, lambda value: torch.float64 if value is torch.float32 else value
    )


def _without_float(steps: str) -> str:
    return ",".join(step for step in steps.split(",") if step and step != "float")
