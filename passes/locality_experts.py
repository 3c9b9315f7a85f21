"""Token-locality of the dispatch of a mixture of experts: sort, grouped products, sort back.

Each token names the experts of its rows. The rows are sorted by expert, each group of rows is
multiplied by its expert's weights, and the rows are put back. What a row becomes depends on its
own expert alone, whatever the order within a group and whoever shares it. To know that, the rules
follow the sort: its permutation, its inverse, and the sizes of the groups of its keys.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from prefix_rewrite.passes.locality_call import Call, is_changed, read_op
from prefix_rewrite.passes.locality_layout import (
    SAME,
    PerToken,
    Refusal,
    Special,
    State,
    StorageIndex,
    sorts_tokens,
)
from prefix_rewrite.passes.locality_rules import expert_rule, rule
from prefix_rewrite.passes.nodes import same_size, shape_of

_GROUPED = ("grouped_mm", "_grouped_mm", "transformers.grouped_mm_fallback")
_CASTS = {"contiguous", "detach", "float", "int", "long", "to", "type"}
_RESHAPES = {"flatten", "ravel", "reshape", "squeeze", "unsqueeze", "view"}


@dataclass(frozen=True)
class Sorted(Special):
    """What the rules know of one sort.

    Attributes:
        sort: the sort of the keys.
        inner: rows of each token.
    """

    sort: Node
    inner: int

    def misused(self) -> Refusal:
        return sorts_tokens(self.sort)


@dataclass(frozen=True)
class Permutation(Sorted):
    """For each row in sorted order its row before the sort."""


@dataclass(frozen=True)
class Inverse(Sorted):
    """For each row before the sort its row in sorted order."""


@dataclass(frozen=True)
class TokenOfRow(Sorted):
    """For each row in sorted order its token."""


@dataclass(frozen=True)
class Groups(Special):
    """How many rows have each key, or where its rows end once they are sorted.

    Attributes:
        keys: the keys of the rows, before any sort.
        count: the op that counts them.
    """

    keys: Node
    count: Node
    ends: bool = False

    def misused(self) -> Refusal:
        return Refusal("counts tokens other than to group rows by expert", node=self.count)


@expert_rule("argsort", "sort", args="input dim descending stable")
def sort_by_expert(call: Call) -> State | None:
    """Sort the keys of all rows, or invert a permutation by sorting it."""
    keys, descending = call.get("input"), call.get("descending", False)
    state, ndim = call.state(keys), len(shape_of(keys))
    if isinstance(state, Permutation) and not descending:
        found = Inverse(state.sort, state.inner)
        return found if call.op == "argsort" else (StorageIndex(call.node), found)
    if ndim != 1 or descending or not isinstance(state, PerToken):
        return None
    if state.rows != (1, state.inner, None):
        return None
    permutation = Permutation(call.node, state.inner)
    sorted_keys = PerToken(0, inner=state.inner, order=call.node)
    return permutation if call.op == "argsort" else (sorted_keys, permutation)


@expert_rule(*_CASTS, args="input *how")
def cast(call: Call) -> State | None:
    state = call.state(call.inputs[0])
    return state if isinstance(state, (Sorted, Groups)) else None


@expert_rule("floor_divide", "div", args="input other rounding_mode")
def token_of_row(call: Call) -> State | None:
    state, by = call.state(call.get("input")), call.get("other")
    floors = call.op == "floor_divide" or call.get("rounding_mode") == "floor"
    if isinstance(state, Permutation) and floors and by == state.inner:
        return TokenOfRow(state.sort, state.inner)
    return None


@expert_rule("getitem", args="input index")
def take_rows(call: Call) -> State | None:
    source, index = call.node.args
    return _rows_taken(
        call, source, index[0] if isinstance(index, tuple) and len(index) == 1 else index
    )


@expert_rule("index_select", args="input dim index")
def select_rows(call: Call) -> State | None:
    if call.get("dim", 0) % len(shape_of(call.get("input"))):
        return None
    return _rows_taken(call, call.get("input"), call.get("index"))


def _rows_taken(call: Call, source: Any, index: Any) -> State | None:
    """Rows into sorted order, once for each of their token's rows, or out of it again."""
    state, picks = call.state(source), call.state(index)
    if not isinstance(state, PerToken) or state.dim != 0:
        return None
    if isinstance(picks, TokenOfRow) and state.plain:
        return PerToken(0, inner=picks.inner, order=picks.sort)
    if isinstance(picks, Permutation) and state.rows == (1, picks.inner, None):
        return PerToken(0, inner=picks.inner, order=picks.sort)
    if isinstance(picks, Inverse) and state.rows == (1, picks.inner, picks.sort):
        return PerToken(0, inner=picks.inner)
    return None


@expert_rule("empty_like", "zeros_like", args="input")
def room_for_inverse(call: Call) -> State | None:
    state = call.state(call.get("input"))
    return PerToken(0, inner=state.inner) if isinstance(state, Permutation) else None


@expert_rule("setitem", args="input index value")
def write_rows(call: Call) -> State | None:
    """`inverse[permutation] = arange(rows)`, or rows out of sorted order into their places."""
    target, index, value = call.node.args
    state, places, written = (call.state(node) for node in (target, index, value))
    if not isinstance(places, Permutation) or state != PerToken(0, inner=places.inner):
        return None
    if written == PerToken(0, inner=places.inner, order=places.sort):
        return state
    if isinstance(written, StorageIndex) and _is_first_use(target, call.node):
        return Inverse(places.sort, places.inner)
    return None


def _is_first_use(made: Any, use: Node) -> bool:
    """Nobody else may hold a name of a tensor that becomes a permutation."""
    return read_op(made)[0] in ("empty_like", "zeros_like") and next(iter(made.users)) is use


@expert_rule("histc", args="input bins min max")
def group_sizes(call: Call) -> State | None:
    """Count the rows of each expert: one bin for each key there can be."""
    state, bins = call.state(call.get("input")), call.get("bins", 100)
    if not isinstance(state, PerToken):
        return None
    keys = _origin(call.get("input"))
    limit = _limit_of(keys)
    if limit != bins or call.get("min", 0) != 0 or call.get("max", 0) != bins - 1:
        raise Refusal("counts over the tokens in bins that are not their experts")
    return Groups(keys, call.node)


@expert_rule("cumsum", args="input dim")
def group_ends(call: Call) -> State | None:
    state = call.state(call.get("input"))
    return replace(state, ends=True) if isinstance(state, Groups) else None


@expert_rule(*_GROUPED, args="input weight offs")
def grouped_product(call: Call) -> State | None:
    """Each group of rows by its expert's weights [experts, in, out]."""
    rows, ends = call.state(call.get("input")), call.state(call.get("offs"))
    weight = call.get("weight")
    if not isinstance(rows, PerToken) or not isinstance(ends, Groups) or rows.order is None:
        return None
    experts_match = same_size(shape_of(weight)[0], shape_of(call.get("offs"))[0])
    same_keys = ends.keys is _origin(rows.order.all_input_nodes[0])
    if rows.dim == 0 and ends.ends and same_keys and experts_match and call.state(weight) == SAME:
        return rows
    return None


@rule(*_GROUPED, args="input weight offs")
def unknown_groups(call: Call) -> State:
    raise Refusal("multiplies groups of rows that are not known to be sorted by expert")


@expert_rule("index_add", args="input dim index source")
def add_rows(call: Call) -> State | None:
    """Add rows in sorted order to their tokens."""
    state, places = call.state(call.get("input")), call.state(call.get("index"))
    source = call.state(call.get("source"))
    if not isinstance(places, TokenOfRow) or call.get("dim") != 0 or state != PerToken(0):
        return None
    return state if source == PerToken(0, inner=places.inner, order=places.sort) else None


def _origin(keys: Node) -> Node:
    """Walk back from keys, sorted or not, cast or not, to those that were sorted.

    Raises:
        Refusal: they were changed in place on the way.
    """
    for node in _back(keys, _CASTS):
        keys = node
    if keys.target is operator.getitem and read_op(keys.all_input_nodes[0])[0] == "sort":
        return _origin(keys.all_input_nodes[0].all_input_nodes[0])
    return keys


def _limit_of(keys: Node) -> int | None:
    """Return the number of values that keys can have: they are indices into a dimension."""
    for node in _back(keys, _CASTS | _RESHAPES):
        keys = node
    if keys.target is operator.getitem and keys.args[1] == 1:
        keys = keys.all_input_nodes[0]
    op, _ = read_op(keys)
    if op not in ("argmax", "max", "sort", "topk"):
        return None
    place = 2 if op == "topk" else 1
    dim = keys.kwargs.get("dim", keys.args[place] if len(keys.args) > place else -1)
    size = shape_of(keys.all_input_nodes[0])[dim]
    return size if isinstance(size, int) else None


def _back(node: Node, ops: set[str]) -> Iterator[Node]:
    """Yield a node and what it was made from by the given ops."""
    while True:
        if is_changed(node):
            raise Refusal("counts keys that are changed in place")
        yield node
        if not node.op.startswith("call") or read_op(node)[0] not in ops:
            return
        node = node.all_input_nodes[0]
