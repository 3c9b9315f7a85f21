"""Read the head: what turns hidden states into logits, and whether it can run on edges alone.

Walking back from the logits, every op must give each token's row from that token's row: a
pointwise op, or a projection, at whose input the rows of the sampled edges can be selected.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.fx import Node

from prefix_rewrite.errors import Finding
from prefix_rewrite.ops.edge_logprobs import is_sharded
from prefix_rewrite.passes.head_moves import move_findings
from prefix_rewrite.passes.locality_call import read_op
from prefix_rewrite.passes.locality_pointwise import cast, pointwise, where
from prefix_rewrite.passes.locality_rules import find_rule
from prefix_rewrite.passes.nodes import (
    depends_on,
    module_path,
    same_size,
    shape_of,
    source_line,
    target_name,
    value_of,
)

_ARITHMETIC = {
    operator.mul: "mul",
    operator.imul: "mul",
    torch.mul: "mul",
    operator.truediv: "div",
    operator.itruediv: "div",
    torch.div: "div",
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    operator.sub: "sub",
    operator.isub: "sub",
    torch.sub: "sub",
}
_PROJECTIONS = {F.linear, torch.matmul, operator.matmul}
RESHARDING = {"redistribute", "to_local"}  # methods that tensor parallel wraps a head in


@dataclass(frozen=True)
class FusedHead:
    """A head that is one linear layer and a program of constant pointwise steps.

    Attributes:
        projection: the linear node.
        steps, constants: the program, as `edge_logprobs` reads it.
    """

    projection: Node
    steps: tuple[str, ...]
    constants: tuple[float, ...]


@dataclass
class Head:
    """The nodes between hidden states and logits.

    Attributes:
        nodes: ops to run on the edges' rows instead of on all tokens, in graph order.
        sources: hidden states at which the edges' rows are selected.
        fused: the same head as one fused op, where it has that form.
        findings: ops that can't be run on selected rows.
        vocab_size: columns of the logits, of all shards together.
        sharded: whether the projection is a DTensor's.
    """

    nodes: list[Node] = field(default_factory=list)
    sources: set[Node] = field(default_factory=set)
    fused: FusedHead | None = None
    findings: list[Finding] = field(default_factory=list)
    vocab_size: int = 0
    sharded: bool = False


def read_head(logits: Node, tokens: Any) -> Head:
    """Walk back from the logits to the hidden states."""
    shape = shape_of(logits)
    if len(shape) != 3 or not (same_size(shape[0], 1) and same_size(shape[1], tokens)):
        return Head(findings=[_not_a_row_each(logits)])
    head = Head(vocab_size=int(shape_of(logits)[-1]))
    met: set[Node] = set()
    pending = [logits]
    while pending:
        node = pending.pop()
        if node in met:
            continue
        met.add(node)
        inputs = node.all_input_nodes
        if is_projection(node, tokens):
            _read_projection(node, head, met)
            inputs.remove(node.args[0])  # type: ignore[arg-type]
        elif not (_is_pointwise(node) or node.target in RESHARDING):
            head.findings.append(_not_per_row(node))
            continue
        rows = [n for n in inputs if has_tokens(n, tokens)]
        if any(_is_made_of_tokens(n, tokens) for n in inputs if n not in rows):
            head.findings.append(_not_per_row(node))
        pending.extend(rows)
    order = {node: i for i, node in enumerate(logits.graph.nodes)}
    head.nodes = sorted(met, key=order.__getitem__)
    head.findings.extend(move_findings(head.nodes, head.sources))
    head.fused = None if head.findings else _read_fused(logits, head)
    return head


def _read_projection(node: Node, head: Head, met: set[Node]) -> None:
    """Note where its rows come from; a DTensor's rows from before it was made one."""
    source: Any = node.args[0]
    head.sharded = isinstance(value_of(node), DTensor)
    if head.sharded:
        head.vocab_size = int(shape_of(node)[-1])
        replicated = isinstance(source, Node) and source.target is DTensor.from_local
        replicated = replicated and tuple(source.args[2:]) == ((Replicate(),),)
        if not replicated or not is_sharded(value_of(node.args[1])):
            head.findings.append(_badly_sharded(node))
            return
        met.add(source)
        source = source.args[0]
    head.sources.add(source)


def _badly_sharded(node: Node) -> Finding:
    return Finding(
        what="the vocabulary projection is a DTensor, but not one sharded by vocabulary alone",
        remedy="parallelize it with ColwiseParallel(input_layouts=Replicate()) on one mesh",
        module=module_path(node),
        source=source_line(node),
    )


def other_heads(project: Node, nodes: Iterator[Node], tokens: Any, vocab_size: int) -> list[Node]:
    """Vocabulary projections, and outputs with a vocabulary's columns, outside the logits."""
    inside = _ancestors(project.args[0])  # type: ignore[arg-type]
    outputs = {node for node in project.args[1] if isinstance(node, Node)}  # type: ignore[union-attr]
    wide = [
        node
        for node in nodes
        if node not in inside
        and (is_projection(node, tokens) or node in outputs)
        and has_tokens(node, tokens)
        and shape_of(node)[-1] == vocab_size
    ]
    # An output that comes from a projection already listed is the same head.
    return [node for node in wide if not (_ancestors(node) - {node}) & set(wide)]


def has_tokens(node: Any, tokens: Any) -> bool:
    return any(depends_on(size, tokens) for size in shape_of(node))


def _is_made_of_tokens(node: Node, tokens: Any) -> bool:
    """A value that has no token dimension but depends on all tokens, or on how many there are."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return depends_on(value, tokens)
    return any(has_tokens(ancestor, tokens) for ancestor in _ancestors(node))


def is_projection(node: Node, tokens: Any) -> bool:
    """A matrix product of per-token rows with something that is the same for all tokens."""
    if node.target not in _PROJECTIONS and node.target != "matmul":
        return False
    if len(node.args) < 2 or not has_tokens(node.args[0], tokens):
        return False
    return not any(has_tokens(argument, tokens) for argument in node.args[1:])


def _ancestors(node: Node) -> set[Node]:
    met: set[Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current not in met:
            met.add(current)
            pending.extend(current.all_input_nodes)
    return met


def _is_pointwise(node: Node) -> bool:
    if not node.op.startswith("call"):
        return False
    if node.target is operator.getitem:
        return _is_whole(node.args[1])
    known = find_rule(read_op(node)[0])
    return known is not None and known.infer in (pointwise, cast, where)


def _is_whole(index: Any) -> bool:
    """An index that takes all of every dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is Ellipsis or part in (slice(None), slice(0, None)) for part in parts)


def _not_per_row(node: Node) -> Finding:
    return Finding(
        what=f"the logits depend on {target_name(node)}, which is not known to be per row",
        remedy="apply only pointwise operations after the vocabulary projection",
        module=module_path(node),
        source=source_line(node),
    )


def _not_a_row_each(logits: Node) -> Finding:
    shape = list(shape_of(logits))
    return Finding(
        what=f"the logits have shape {shape}, not one row a token",
        remedy="return logits of shape [1, T, V], those of all tokens",
        module=module_path(logits),
        source=source_line(logits),
    )


def _read_fused(logits: Node, head: Head) -> FusedHead | None:
    steps: list[str] = []
    constants: list[float] = []
    node = logits
    while node.target is not F.linear:
        step = _read_step(node)
        if step is None or len(node.all_input_nodes) != 1:
            return None
        name, constant = step
        if name:
            steps.append(name)
        if constant is not None:
            constants.append(constant)
        node = node.all_input_nodes[0]
    return FusedHead(node, tuple(reversed(steps)), tuple(reversed(constants)))


def _read_step(node: Node) -> tuple[str, float | None] | None:
    """Read one step as (name, constant), ('', None) for one that changes nothing."""
    if node.target in (torch.tanh, "tanh"):
        return "tanh", None
    if node.target == "float" or (node.target == "to" and torch.float32 in node.args):
        return "float", None
    if node.target == "contiguous" or node.target is operator.getitem:
        return "", None
    if node.target in RESHARDING:
        return "", None
    name = _ARITHMETIC.get(node.target)  # type: ignore[arg-type]
    if name is None and node.op == "call_method" and node.target in ("mul", "div", "add", "sub"):
        name = str(node.target)
    numbers = [a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    swapped = bool(node.args) and node.args[0] in numbers and name in ("div", "sub")
    if name is None or len(numbers) != 1 or len(node.args) != 2 or node.kwargs or swapped:
        return None
    return name, float(numbers[0])
