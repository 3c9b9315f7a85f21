"""Token-locality of ops that compute each element from the elements at its own place."""

from __future__ import annotations

from prefix_rewrite.passes.locality_call import Call
from prefix_rewrite.passes.locality_layout import Refusal, State, aligned
from prefix_rewrite.passes.locality_rules import POINTWISE, rule
from prefix_rewrite.passes.nodes import shape_of


@rule(
    POINTWISE,
    # Pointwise ops that torch doesn't tag as such.
    *("absolute", "alpha_dropout", "complex", "conj", "copy", "divide", "dropout", "dropout1d"),
    *("dropout2d", "dropout3d", "expit", "feature_alpha_dropout", "feature_dropout", "fill"),
    *("float_power", "floor_divide", "hardswish", "imag", "isclose", "log_sigmoid", "logsigmoid"),
    *("multiply", "negative", "not_equal", "polar", "real", "softsign", "special_expit"),
    *("special_logit", "subtract", "tanhshrink", "zero"),
    args="",
    in_place=True,
)
def pointwise(call: Call) -> State:
    """Every operand must have its tokens at the same place, or none."""
    operands = [(call.state(node), len(shape_of(node))) for node in call.inputs]
    return aligned(operands, len(shape_of(call.inputs[0]) if call.in_place else call.shape))


@rule("where", args="condition input other")
def where(call: Call) -> State:
    if call.get("input") is None:
        raise Refusal("finds positions that differ with the tokens", "use where(mask, a, b)")
    return pointwise(call)


@rule(
    *("_get_data_attr", "alias", "bfloat16", "bool", "byte", "char", "contiguous", "cpu", "cuda"),
    *("data", "detach", "double", "float", "half", "int", "long", "requires_grad", "short", "to"),
    *("type", "type_as", "view_as_real"),
    args="",
)
def cast(call: Call) -> State:
    """The same elements in another type, device or memory."""
    return call.state(call.inputs[0])


@rule("empty_like", "full_like", "ones_like", "zeros_like", args="input fill_value")
def constant_like(call: Call) -> State:
    return call.only("input")


@rule("view_as_complex", "glu", args="input dim")
def combine(call: Call) -> State:
    """Combine elements along one dimension, the last one unless said otherwise."""
    state = call.only("input")
    if state.dim == call.get("dim", -1) % len(shape_of(call.get("input"))):
        raise Refusal("combines elements of different tokens")
    return state


@rule("one_hot", args="input num_classes")
def one_hot(call: Call) -> State:
    if call.get("num_classes", -1) < 0:
        raise Refusal("takes the number of classes from all tokens", "pass num_classes")
    return call.only("input")


@rule("prelu", args="input weight")
def prelu(call: Call) -> State:
    state = call.only("input")
    if state.dim == 1 and shape_of(call.get("weight")) not in ((), (1,)):
        raise Refusal("has a weight for each token")
    return state
