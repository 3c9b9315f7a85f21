"""Token-locality of products that sum over dimensions, all read as one: an Einstein sum.

An operand's dimensions are labelled; labels that the result lacks are summed over. Tokens must
have one label, and the result must have it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch.fx import Node

from prefix_rewrite.passes.locality_call import Call
from prefix_rewrite.passes.locality_layout import (
    SAME,
    PerToken,
    Refusal,
    State,
    aligned,
)
from prefix_rewrite.passes.locality_rules import rule
from prefix_rewrite.passes.nodes import shape_of

Labels = Sequence[Hashable]
Operand = tuple[Node, Labels]


def contract(call: Call, operands: Sequence[Operand], result: Labels) -> State:
    """Return where the tokens are in an Einstein sum.

    Raises:
        Refusal: it sums over tokens, or multiplies rows of different tokens.
    """
    found = set()
    for node, labels in operands:
        state = call.state(node)
        if isinstance(state, PerToken):
            found.add((labels[state.dim], state.rows))
            if labels[state.dim] not in result:
                raise Refusal("sums over the tokens")
    if len(found) > 1:
        raise Refusal("multiplies rows of different tokens")
    if not found:
        return SAME
    label, (outer, inner, order) = found.pop()
    return PerToken(result.index(label), outer, inner, order)


@rule("matmul", "mm", "bmm", "mv", "dot", args="input other")
def matmul(call: Call) -> State:
    return _matmul(call, call.get("input"), call.get("other"), len(call.shape))


def _matmul(call: Call, left: Node, right: Node, ndim: int) -> State:
    """[..., n, k] x [..., k, m]; a vector has k alone, and leaves n or m out."""
    a, b = len(shape_of(left)), len(shape_of(right))
    rows, columns = ["n"] if a > 1 else [], ["m"] if b > 1 else []
    batch: list[Hashable] = list(range(max(a, b, 2) - 2))
    left_labels = [*batch[len(batch) - max(a - 2, 0) :], *rows, "k"]
    right_labels = [*batch[len(batch) - max(b - 2, 0) :], "k", *columns]
    result = [*batch, *rows, *columns]
    assert len(result) == ndim, "a product's result has every label but the one summed over"
    return contract(call, [(left, left_labels), (right, right_labels)], result)


@rule("linear", args="input weight bias")
def linear(call: Call) -> State:
    """[..., k] x [m, k] + [m]"""
    state = call.only("input")
    if state.dim == len(shape_of(call.get("input"))) - 1:
        raise Refusal("sums over the tokens")
    return state


@rule("addmm", "baddbmm", "addbmm", args="input left right beta alpha")
def addmm(call: Call) -> State:
    if call.op == "addbmm":
        raise Refusal("sums over its batch", "use baddbmm")
    added, left, right = (call.get(name) for name in ("input", "left", "right"))
    ndim = len(call.shape)
    product = _matmul(call, left, right, ndim)
    return aligned([(call.state(added), len(shape_of(added))), (product, ndim)], ndim)


@rule("outer", "ger", args="input other")
def outer(call: Call) -> State:
    return contract(call, [(call.get("input"), "n"), (call.get("other"), "m")], "nm")


@rule("einsum", args="equation *operands")
def einsum(call: Call) -> State:
    equation, operands = call.get("equation"), call.get("operands")
    if not isinstance(equation, str):
        raise Refusal("is given labels as numbers", "pass an equation")
    given, arrow, wanted = equation.replace(" ", "").partition("->")
    terms = zip(operands, given.split(","), strict=True)
    labelled = [(node, _labels(term, len(shape_of(node)))) for node, term in terms]
    if not arrow:
        once = sorted(x for x in set(given) if x.isalpha() and given.count(x) == 1)
        wanted = "..." * ("..." in given) + "".join(once)
    return contract(call, labelled, _labels(wanted, len(call.shape)))


def _labels(term: str, ndim: int) -> list[Hashable]:
    """Letters, and for '...' numbers that count from the right: broadcast dimensions align so."""
    before, dots, after = term.partition("...")
    spread = range(-(ndim - len(before) - len(after)), 0) if dots else ()
    return [*before, *spread, *after]


@rule(
    *(f"{name}{n}d" for n in (1, 2, 3) for name in ("conv", "conv_transpose")),
    args="input weight bias stride padding dilation groups more",
)
def conv(call: Call) -> State:
    """Along the last dimensions each place sees its neighbours, unless the kernel has width 1."""
    state = call.only("input")
    n, ndim = int(call.op[-2]), len(call.shape)
    place = state.dim - (ndim - n)
    if place < 0:
        if state.dim == ndim - n - 1:
            raise Refusal("sums over the tokens")
        return state
    one_wide = shape_of(call.get("weight"))[2 + place] == 1
    stays = _at(call.get("stride", 1), place) == 1 and _at(call.get("padding", 0), place) in (
        0,
        "valid",
        "same",
    )
    if "transpose" in call.op or not one_wide or not stays:
        raise Refusal(
            "is a convolution over the tokens that is not known",
            "call the causal_conv1d_fn of the model's family",
        )
    return state


def _at(value: object, place: int) -> object:
    """Read one dimension's entry of a number, or of numbers for all dimensions or for each."""
    if isinstance(value, (tuple, list)):
        return value[place if len(value) > 1 else 0]
    return value
