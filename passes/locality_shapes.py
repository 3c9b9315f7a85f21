"""Token-locality of ops that only rearrange, repeat or make elements."""

from __future__ import annotations

from typing import Any

import torch

from prefix_rewrite.passes.locality_call import Call
from prefix_rewrite.passes.locality_layout import (
    UNPROVEN,
    PerToken,
    Refusal,
    State,
    StorageIndex,
    aligned,
    reshape,
)
from prefix_rewrite.passes.locality_rules import rule
from prefix_rewrite.passes.nodes import shape_of, value_of


@rule(
    *("flatten", "ravel", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view"),
    *("atleast_2d", "atleast_3d", "view_as"),
    args="input *shape",
    sizes=True,
)
def keep_order(call: Call) -> State:
    """Another shape over the same row-major order of elements."""
    source = call.inputs[0]
    state = call.state(source)
    if not isinstance(state, PerToken):
        raise Refusal("takes only its shape from the tokens")
    if any(isinstance(item, torch.dtype) for item in call.node.args):
        raise Refusal("reads the bytes of its elements as another type", "cast with to()")
    return reshape(state, shape_of(source), call.shape, call.tokens)


@rule("permute", args="input *dims")
def permute(call: Call) -> State:
    state = call.only("input")
    ndim = len(call.shape)
    order = [int(dim) % ndim for dim in call.get("dims")]
    return state.at(order.index(state.dim))


@rule("transpose", "swapaxes", "swapdims", args="input dim0 dim1")
def transpose(call: Call) -> State:
    ndim = len(call.shape)
    names = ("axis0", "axis1") if "axis0" in call.arguments else ("dim0", "dim1")
    return _swap(call, *(int(call.arguments[name]) % ndim for name in names))


@rule("t", "T", "mT", args="input name")
def transpose_last(call: Call) -> State:
    ndim = len(call.shape)
    if ndim > 2 and call.op == "T":
        return call.only("input").at(ndim - 1 - call.only("input").dim)
    return _swap(call, max(ndim - 2, 0), ndim - 1)


def _swap(call: Call, first: int, second: int) -> State:
    state = call.only("input")
    return state.at({first: second, second: first}.get(state.dim, state.dim))


@rule("movedim", "moveaxis", args="input source destination")
def movedim(call: Call) -> State:
    state = call.only("input")
    ndim = len(call.shape)
    moved = dict(zip(_ints(call, "destination"), _ints(call, "source"), strict=True))
    rest = iter(dim for dim in range(ndim) if dim not in moved.values())
    order = [moved[dim] if dim in moved else next(rest) for dim in range(ndim)]
    return state.at(order.index(state.dim))


def _ints(call: Call, name: str) -> list[int]:
    value = call.get(name, 0)
    ndim = len(call.shape)
    return [int(item) % ndim for item in (value if isinstance(value, (tuple, list)) else [value])]


@rule("expand", "expand_as", "broadcast_to", args="input *sizes", sizes=True)
def expand(call: Call) -> State:
    """Stretch dimensions of size 1: what no token has a part in is equal for all of them."""
    source = call.inputs[0]
    state = call.state(source)
    if isinstance(state, PerToken):
        return aligned([(state, len(shape_of(source)))], len(call.shape))
    return made(call)


@rule("repeat", "tile", args="input *repeats", sizes=True)
def repeat(call: Call) -> State:
    """Element i of a repeated dimension is element i % size of what is repeated."""
    source = call.get("input")
    state = call.state(source)
    if not isinstance(state, PerToken):
        return made(call)
    moved = aligned([(state, len(shape_of(source)))], len(call.shape))
    assert isinstance(moved, PerToken)
    factor = call.tokens.factor(call.shape[moved.dim])
    if call.tokens.in_shape(call.shape) != [moved.dim] or factor < 0:
        raise Refusal("repeats tokens once for each token")
    return PerToken(moved.dim, factor // moved.inner, moved.inner, moved.order)


@rule("repeat_interleave", args="input repeats dim output_size")
def repeat_interleave(call: Call) -> State:
    state = call.only("input")
    repeats, dim = call.get("repeats"), call.get("dim")
    if not isinstance(repeats, int) or dim is None:
        raise Refusal("repeats by a tensor, or without a dim", "pass a number and a dim")
    if dim % len(call.shape) != state.dim:
        return state
    return PerToken(state.dim, state.outer, state.inner * repeats, state.order)


@rule("cat", "concat", "concatenate", args="tensors dim")
def cat(call: Call) -> State:
    """Join along a dimension that doesn't hold the tokens."""
    ndim = len(call.shape)
    state = aligned([(call.state(node), len(shape_of(node))) for node in call.inputs], ndim)
    if not isinstance(state, PerToken) or state.dim == call.get("dim", 0) % ndim:
        raise Refusal("joins tensors along the tokens")
    return state


@rule("stack", args="tensors dim")
def stack(call: Call) -> State:
    ndim = len(call.shape)
    state = aligned([(call.state(node), ndim - 1) for node in call.inputs], ndim - 1)
    assert isinstance(state, PerToken)
    return state.at(state.dim + (state.dim >= call.get("dim", 0) % ndim))


@rule("chunk", "split", "split_with_sizes", "tensor_split", args="input sizes dim")
def split(call: Call) -> State:
    state = call.only("input")
    if call.get("dim", 0) % len(shape_of(call.get("input"))) == state.dim:
        raise Refusal("splits the tokens")
    return state


@rule("unbind", "select", args="input dim index")
def unbind(call: Call) -> State:
    """Take one place, or every place, of a dimension away."""
    state = call.only("input")
    dim = call.get("dim", 0) % len(shape_of(call.get("input")))
    if dim == state.dim:
        raise Refusal("takes tokens apart")
    return state.at(state.dim - (state.dim > dim))


@rule("narrow", args="input dim start length")
def narrow(call: Call) -> State:
    state = call.only("input")
    if call.get("dim") % len(call.shape) == state.dim:
        raise Refusal("takes some of the tokens")
    return state


@rule("tril", "triu", args="input diagonal")
def triangle(call: Call) -> State:
    state = call.only("input")
    if state.dim >= len(call.shape) - 2:
        raise Refusal("keeps or drops elements by where a token is stored")
    return state


@rule("unfold", args="input dimension size step")
def unfold(call: Call) -> State:
    state = call.only("input")
    if call.get("dimension") % len(shape_of(call.get("input"))) == state.dim:
        raise Refusal("puts neighbouring tokens side by side")
    return state


@rule("pad", "constant_pad_nd", args="input pad mode value")
def pad(call: Call) -> State:
    """`pad` holds two numbers a dimension, the last dimension's first."""
    state = call.only("input")
    at = 2 * (len(call.shape) - 1 - state.dim)
    if any(call.get("pad")[at : at + 2]):
        raise Refusal("adds places before or after the tokens")
    return state


@rule(
    *("empty", "full", "ones", "zeros", "new_empty", "new_full", "new_ones", "new_zeros"),
    args="input *rest",
    sizes=True,
)
def made(call: Call) -> State:
    """A constant; each element of the dimension as long as the tokens is given to its token."""
    if call.op in ("full", "new_full") and call.tokens.in_number(value_of(_fill(call))):
        raise Refusal("computes with the number of tokens", "use a constant")
    guess = call.tokens.by_shape(call.output)
    if guess == UNPROVEN:
        raise Refusal("makes a tensor with a place for every pair of tokens")
    return guess


def _fill(call: Call) -> Any:
    place = 1 if call.op == "full" else 2
    given = call.node.args[place] if len(call.node.args) > place else None
    return call.node.kwargs.get("fill_value", given)


@rule("arange", args="*limits", sizes=True)
def arange(call: Call) -> State:
    """Count storage places, which are not positions in a call."""
    limits = [value_of(limit) for limit in call.get("limits", ())]
    if limits[:-1] not in ([], [0]):
        raise StorageIndex(call.node).misused()
    return StorageIndex(call.node)
