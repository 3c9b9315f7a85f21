"""Token-locality of a model's own autograd functions, whose backward is code of its own too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from prefix_rewrite.passes.head_moves import MODES
from prefix_rewrite.passes.locality_call import read_op
from prefix_rewrite.passes.locality_layout import Refusal, State, Tokens, aligned
from prefix_rewrite.passes.locality_rules import POINTWISE, RULES, find_rule
from prefix_rewrite.passes.nodes import get_attribute, shape_of, value_of

autograd_function_op = torch.ops.higher_order.autograd_function_apply


def autograd_function_state(
    graph_module: GraphModule, node: Node, states: Mapping[Node, State], tokens: Tokens
) -> State:
    """Where the tokens are in each result, if forward and backward compute place by place.

    Raises:
        Refusal: an op of either is not pointwise, or an operand's tokens are at another place.
    """
    arguments: tuple[Any, ...] = node.args
    for body in arguments[:2]:  # forward and backward
        for inner in get_attribute(graph_module, str(body.target)).graph.nodes:
            _check_op(inner)
    inputs = [x for x in arguments[2:] if isinstance(x, Node) and shape_of(x)]
    at = [(states[x], len(shape_of(x))) for x in inputs]
    results = tuple(aligned(at, value.ndim) for value in value_of(node))
    if any(tokens.by_shape(v) != s for v, s in zip(value_of(node), results, strict=True)):
        raise Refusal("returns rows that are not the tokens")
    return results


def _check_op(node: Node) -> None:
    if not node.op.startswith("call") or node.target in MODES:
        return
    op, in_place = read_op(node)
    numbers = [x for x in node.all_input_nodes if not isinstance(value_of(x), torch.Tensor)]
    if in_place or numbers or find_rule(op) is not RULES[POINTWISE]:
        raise Refusal(
            f"runs {op} inside, which is not known to be pointwise",
            "use ops that torch differentiates itself, or pointwise ones in both directions",
        )
