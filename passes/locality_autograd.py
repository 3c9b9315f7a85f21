"""Token-locality of a model's own autograd functions, whose backward is code of its own too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from prefix_rewrite.passes.head_moves import MODES
from prefix_rewrite.passes.locality_call import Call, read_op
from prefix_rewrite.passes.locality_layout import SAME, Refusal, State, Tokens, aligned
from prefix_rewrite.passes.locality_rules import POINTWISE, RULES, find_rule, judge
from prefix_rewrite.passes.nodes import get_attribute, shape_of, value_of

autograd_function_op = torch.ops.higher_order.autograd_function_apply


def autograd_function_state(
    graph_module: GraphModule, node: Node, states: Mapping[Node, State], tokens: Tokens
) -> State:
    """Where the tokens are in each result, if forward and backward compute place by place.

    Raises:
        Refusal: an op of either is refused or not pointwise, or an operand's tokens are at
            another place.
    """
    arguments: tuple[Any, ...] = node.args
    inputs = [x for x in arguments[2:] if isinstance(x, Node) and shape_of(x)]
    at = [(states[x], len(shape_of(x))) for x in inputs]
    results = tuple(aligned(at, value.ndim) for value in value_of(node))
    if any(tokens.by_shape(v) != s for v, s in zip(value_of(node), results, strict=True)):
        raise Refusal("returns rows that are not the tokens")
    for body in arguments[:2]:  # forward and backward
        _check_body(get_attribute(graph_module, str(body.target)), tokens)
    return results


def _check_body(body: GraphModule, tokens: Tokens) -> None:
    """Judge each op as any other; all are pointwise, so the shapes say where the tokens are."""
    states: dict[Node, State] = {}
    for node in body.graph.nodes:
        if not node.op.startswith("call") or node.target in MODES:
            tensor = isinstance(value_of(node), torch.Tensor)
            states[node] = tokens.by_shape(value_of(node)) if tensor else SAME
            continue
        op, in_place = read_op(node)
        if in_place or find_rule(op) is not RULES[POINTWISE]:
            raise Refusal(
                f"runs {op} inside, which is not known to be pointwise",
                "use ops that torch differentiates itself, or pointwise ones in both directions",
            )
        try:
            states[node] = judge(Call(node, op, in_place, tokens, states))
        except Refusal as refusal:
            raise Refusal(f"runs {op} inside, which {refusal.reason}", refusal.remedy) from None
