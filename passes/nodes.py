"""Reading captured graphs: walk them, say where a node comes from, copy them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_OWN_FILES = re.compile(r"(?:^|/)prefix_rewrite/(?:entry|seams|capture|mixers/[\w/]+)\.py$")


def walk(graph_module: GraphModule) -> Iterator[tuple[GraphModule, Node]]:
    """Yield every node with the graph it is in, sub-graphs of checkpoints included, in order."""
    for node in graph_module.graph.nodes:
        yield graph_module, node
        if node.op == "get_attr":
            child = get_attribute(graph_module, str(node.target))
            if isinstance(child, GraphModule):
                yield from walk(child)


def get_attribute(graph_module: GraphModule, path: str) -> Any:
    owner: Any = graph_module
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def value_of(node: Any) -> Any:
    """Return the fake value Dynamo recorded for a node; a constant is its own value."""
    if isinstance(node, Node):
        return node.meta.get("example_value", node.meta.get("val"))
    return node


def shape_of(node: Any) -> tuple[Any, ...]:
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def same_size(a: Any, b: Any) -> bool:
    """Compare two sizes without installing a guard: symbols are equal if they are the same."""
    a_expr, b_expr = (x.node.expr if isinstance(x, torch.SymInt) else x for x in (a, b))
    return bool(a_expr == b_expr)


def depends_on(size: Any, symbol: Any) -> bool:
    """Say whether a number is a function of a symbolic size."""
    if not isinstance(size, _SYMBOLIC) or not isinstance(symbol, torch.SymInt):
        return same_size(size, symbol)
    return not symbol.node.expr.free_symbols.isdisjoint(size.node.expr.free_symbols)


def module_path(node: Node) -> str:
    """Qualified name of the module whose forward made the call, '' for the model itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return ""
    root, path = stack[0][0], stack[-1][0]
    relative = path.removeprefix(root).lstrip(".")
    # A module whose class overrides attribute access, as PEFT's do, is read from __dict__.
    relative = re.sub(r"__dict__\['_modules'\]\['([^']+)'\]", r"\1", relative)
    return re.sub(r"_modules\['?([^'\]]+)'?\]", r"\1", relative)


def source_line(node: Node) -> str:
    """'file:line' of the innermost frame outside this library, '' where Dynamo kept none."""
    frames = [
        match
        for match in _FRAME.finditer(node.meta.get("stack_trace") or "")
        if not _OWN_FILES.search(match["file"])
    ]
    return f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else ""


def target_name(node: Node) -> str:
    """The called function or method, as a person would write it."""
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", str(node.target))
    return str(node.target) if "torch.ops" in str(node.target) else name


def copy_graph(graph_module: GraphModule) -> GraphModule:
    """Copy a graph and its sub-graphs; parameters and other attributes stay shared.

    Dynamo reads its own graph again after the backend returns, so that one must stay whole.
    """
    graph = Graph()
    output = graph.graph_copy(graph_module.graph, {})
    source = graph_module.graph.output_node()
    graph.output(output)
    graph.output_node().meta = dict(source.meta)
    copy = GraphModule(graph_module, graph)
    copy.meta.update(graph_module.meta)
    for name, child in graph_module.named_children():
        if isinstance(child, GraphModule):
            setattr(copy, name, copy_graph(child))
    return copy
