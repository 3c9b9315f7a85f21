"""Token-locality of indexing: whole tokens are kept, elements within each token may be chosen."""

from __future__ import annotations

from typing import Any

import torch
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
from prefix_rewrite.passes.nodes import same_size, shape_of, value_of

_CHOOSES = "chooses among the tokens"
_OTHER_PLACES = "writes rows of tokens to other tokens' places"


@rule("getitem", args="input index", sizes=True)
def getitem(call: Call) -> State:
    return indexed(call, *call.node.args)


def indexed(call: Call, source: Any, index: Any) -> State:
    """Follow `source[index]`: the tokens' dimension must be taken whole.

    Raises:
        Refusal: it is not, or places are chosen by where a token is stored.
    """
    state, shape = call.state(source), shape_of(source)
    parts = _spread(index, len(shape))
    new, old = 0, 0  # dimensions of the result, of the source
    kept: int | None = None  # where the result has its tokens
    chosen: int | None = None  # where it has the dimensions of index tensors
    for part in parts:
        if part is None:
            new += 1
            continue
        if isinstance(part, slice):
            _check_slice(call, part, shape[old])
            kept = new if isinstance(state, PerToken) and old == state.dim else kept
            new += 1
        elif _index_shape(part) is not None:
            chosen = new if chosen is None else chosen
        elif isinstance(part, bool) or call.tokens.in_number(value_of(part)):
            raise Refusal("chooses by the number of tokens, or by a bool", "use position_ids")
        old += 1
    if chosen is not None:
        return _chosen(call, state, parts, kept, chosen)
    return _at(state, kept)


def _check_slice(call: Call, part: slice, size: Any) -> None:
    start, stop, step = ends = [value_of(end) for end in (part.start, part.stop, part.step)]
    from_first = start in (None, 0) or same_size(start, -size)
    if from_first and step in (None, 1) and (stop is None or same_size(stop, size)):
        return
    if call.tokens.in_number([size]):
        raise Refusal(_CHOOSES)
    if call.tokens.in_number(ends):
        raise Refusal("takes rows of a table by where tokens are stored", "use position_ids")


def _chosen(call: Call, state: State, parts: list[Any], kept: int | None, chosen: int) -> State:
    """Place the dimensions that index tensors add: where the first is, if they are neighbours."""
    choosers = [part for part in parts if _index_shape(part) is not None]
    shapes = [_index_shape(part) or () for part in choosers]
    ndim = max(len(shape) for shape in shapes)
    picks = aligned([(call.state(c), len(s)) for c, s in zip(choosers, shapes, strict=True)], ndim)
    if isinstance(state, PerToken) and (kept is None or picks != SAME):
        raise Refusal(_CHOOSES)
    places = [i for i, p in enumerate(parts) if p is not None and not isinstance(p, slice)]
    if places != list(range(places[0], places[-1] + 1)):
        raise Refusal("chooses by tensors that are not neighbours", "index in two steps")
    if isinstance(picks, PerToken):
        return picks.at(picks.dim + chosen)
    return _at(state, None if kept is None else kept + ndim * (kept >= chosen))


def _index_shape(part: Any) -> tuple[Any, ...] | None:
    """Shape of an index tensor, None for any other part of an index.

    Raises:
        Refusal: it is a mask.
    """
    if isinstance(part, list):
        return (len(part),)
    value = value_of(part)
    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype == torch.bool:
        raise Refusal("takes a number of elements that depends on their values")
    return tuple(value.shape)


def _at(state: State, kept: int | None) -> State:
    if not isinstance(state, PerToken):
        return state
    if kept is None:
        raise Refusal(_CHOOSES)
    return state.at(kept)


def _spread(index: Any, ndim: int) -> list[Any]:
    """Write an index out: one entry for each dimension of the source, None for a new one."""
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    return [*parts[:at], *[slice(None)] * (ndim - used), *parts[at + 1 :]]


@rule("setitem", args="input index value", sizes=True, in_place=True)
def setitem(call: Call) -> State:
    """What is written must have its tokens where the places written to have them."""
    target, index, value = call.node.args
    state = call.state(target)
    if call.tokens.in_number(value_of(value)):
        raise Refusal("writes the number of tokens", "use a constant")
    places = indexed(call, target, index)
    written = call.state(value)
    if isinstance(written, PerToken):
        ndim = _ndim(target, index)
        if aligned([(places, ndim), (written, len(shape_of(value)))], ndim) != places:
            raise Refusal(_OTHER_PLACES)
    return state


def _ndim(target: Any, index: Any) -> int:
    """Number of dimensions of `target[index]`."""
    parts = _spread(index, len(shape_of(target)))
    shapes = [shape for shape in map(_index_shape, parts) if shape is not None]
    own = sum(part is None or isinstance(part, slice) for part in parts)
    return own + max((len(shape) for shape in shapes), default=0)


@rule("index_select", args="input dim index")
def index_select(call: Call) -> State:
    """A table's rows by the tokens' ids, or the same places in each token."""
    state, picks = call.state(call.get("input")), call.state(call.get("index"))
    dim = call.get("dim") % len(call.shape)
    if isinstance(state, PerToken):
        if picks != SAME or dim == state.dim:
            raise Refusal(_CHOOSES)
        return state
    assert isinstance(picks, PerToken)
    return picks.at(dim)


@rule("gather", args="input dim index")
def gather(call: Call) -> State:
    """Elements of each token by that token's own indices."""
    source, picks = call.state(call.get("input")), call.state(call.get("index"))
    dim = call.get("dim") % len(call.shape)
    if not isinstance(picks, PerToken) or source not in (SAME, picks):
        raise Refusal(_CHOOSES)
    if (source == SAME) != (picks.dim == dim):
        raise Refusal(_CHOOSES)
    return picks


@rule("scatter", "scatter_add", "scatter_reduce", args="input dim index src how", in_place=True)
def scatter(call: Call) -> State:
    """Write into each token, at places that the token itself names."""
    state = call.state(call.get("input"))
    others = (call.get(name) for name in ("index", "src", "value"))
    states = [call.state(node) for node in others if isinstance(node, Node)]
    return _written(call, state, states)


@rule("index_add", "index_copy", "index_fill", args="input dim index source", in_place=True)
def index_add(call: Call) -> State:
    """Write the same places of each token."""
    state = call.state(call.get("input"))
    if call.state(call.get("index")) != SAME:
        raise Refusal(_OTHER_PLACES)
    source = call.state(call.get("source"))
    return _written(call, state, [] if source == SAME else [source])


def _written(call: Call, state: State, others: list[State]) -> State:
    dim = call.get("dim") % len(shape_of(call.get("input")))
    if not isinstance(state, PerToken) or dim == state.dim or any(o != state for o in others):
        raise Refusal(_OTHER_PLACES)
    return state


@rule("embedding", args="input weight padding_idx max_norm norm_type scale_grad_by_freq sparse")
def embedding(call: Call) -> State:
    if call.get("max_norm") is not None or call.get("scale_grad_by_freq", False):
        raise Refusal(
            "changes its table, or scales its gradient, by which tokens share a batch",
            "leave max_norm and scale_grad_by_freq out",
        )
    return call.only("input")
