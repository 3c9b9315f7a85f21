"""Where the tokens are in a value: the abstract state that the token-locality pass computes.

A tensor is *per token* when each of its elements is owned by one token and depends on that token
alone. One dimension then holds outer x T x inner elements, and its element i is owned by token
(i // inner) % T. What a view or a product does to the owners is arithmetic on these numbers.

Shapes: T physical tokens; sizes are ints, or symbols that Dynamo recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Node

REMEDY = "keep each token's row apart: only attention, causal convs and scans may mix tokens"


class Refusal(Exception):
    """An op can't be proven token-local; the pass turns it into a finding.

    Attributes:
        reason: what the op does, to be read after its name.
        remedy: what the user can do about it.
        node: the op to blame, where it is another than the one looked at.
    """

    def __init__(self, reason: str, remedy: str = REMEDY, node: Node | None = None):
        super().__init__(reason)
        self.reason, self.remedy, self.node = reason, remedy, node


@dataclass(frozen=True)
class Same:
    """A value that no token has a part in."""


@dataclass(frozen=True)
class Unproven:
    """A value of an op that was refused: nothing that uses it is refused for that again."""


@dataclass(frozen=True)
class PerToken:
    """Each element is owned by one token and depends on that token alone.

    Attributes:
        dim: the dimension that holds outer x T x inner elements.
        order: the sort whose permutation that dimension is in, None for the tokens' own order.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    order: Node | None = None

    @property
    def rows(self) -> tuple[int, int, Node | None]:
        """How its dimension's elements follow from the tokens, whichever dimension it is."""
        return self.outer, self.inner, self.order

    @property
    def plain(self) -> bool:
        """Whether its dimension is the tokens, one by one, in their own order."""
        return self.rows == (1, 1, None)

    def at(self, dim: int) -> PerToken:
        return replace(self, dim=dim)


class Special:
    """A value that only the rules of expert dispatch may use; see `locality_experts`."""

    def misused(self) -> Refusal:
        """Refuse any other use."""
        return Refusal("uses what was sorted by expert in a way that is not known to be per token")


@dataclass(frozen=True)
class StorageIndex(Special):
    """0, 1, 2 ... along a dimension as long as the tokens, made by `node`."""

    node: Node

    def misused(self) -> Refusal:
        reason = "counts the places where tokens are stored, which are not positions in a call"
        return Refusal(reason, "take position_ids in forward and use them", self.node)


State: TypeAlias = "Same | Unproven | PerToken | Special | tuple[State, ...]"
SAME = Same()
UNPROVEN = Unproven()


def sorts_tokens(sort: Node) -> Refusal:
    return Refusal("sorts tokens other than to send them to experts and back", node=sort)


class Tokens:
    """The symbolic number of tokens, and how sizes follow from it."""

    def __init__(self, tokens: torch.SymInt):
        self.symbol: Any = tokens.node.expr
        self._factors: dict[Any, int] = {}

    def factor(self, size: Any) -> int:
        """Return c where a size is c x T, 0 where it doesn't depend on T, -1 for anything else."""
        if not isinstance(size, torch.SymInt):
            return 0
        expr = size.node.expr
        if expr not in self._factors:
            self._factors[expr] = self._read(expr)
        return self._factors[expr]

    def _read(self, expr: Any) -> int:
        if self.symbol not in expr.free_symbols:
            return 0
        ratio = expr / self.symbol
        return int(ratio) if ratio.is_Integer else -1

    def in_shape(self, shape: Sequence[Any]) -> list[int]:
        """Dimensions whose size depends on T."""
        return [dim for dim, size in enumerate(shape) if self.factor(size)]

    def in_number(self, value: Any) -> bool:
        """Say whether a number, or a size among several, depends on T."""
        if isinstance(value, (tuple, list)):
            return any(self.in_number(item) for item in value)
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return False
        return self.symbol in value.node.expr.free_symbols

    def by_shape(self, value: Any) -> State:
        """Guess a state from a shape: right if the value is per token, or has no tokens."""
        if isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value):
            return tuple(self.by_shape(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return SAME
        dims = self.in_shape(value.shape)
        if not dims:
            return SAME
        inner = self.factor(value.shape[dims[0]])
        if len(dims) > 1 or inner < 0:
            return UNPROVEN
        return PerToken(dims[0], inner=inner)


def states_in(state: State) -> Iterator[State]:
    """Yield the states in a nest of tuples."""
    if isinstance(state, tuple):
        for item in state:
            yield from states_in(item)
    else:
        yield state


def per_token(states: Sequence[State]) -> list[PerToken]:
    return [state for state in states if isinstance(state, PerToken)]


def reshape(state: PerToken, old: Sequence[Any], new: Sequence[Any], tokens: Tokens) -> PerToken:
    """Follow a change of shape that keeps the row-major order of the elements.

    Raises:
        Refusal: a dimension of the new shape crosses the border between two tokens.
    """
    below = _size(old[state.dim + 1 :]) * state.inner  # elements of a token in one run
    dims = tokens.in_shape(new)
    if len(dims) == 1 and tokens.factor(new[dims[0]]) > 0 and below:
        factor, rest = tokens.factor(new[dims[0]]), _size(new[dims[0] + 1 :])
        inner, odd = divmod(below, rest)
        if not odd and not factor % inner:
            return PerToken(dims[0], factor // inner, inner, state.order)
    raise Refusal("lays the elements of several tokens into one row")


def _size(sizes: Sequence[Any]) -> int:
    """Number of elements of known sizes.

    Raises:
        Refusal: a size is a symbol.
    """
    known = [s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes]
    if not all(isinstance(s, int) or s.is_Integer for s in known):
        raise Refusal("has sizes that the graph doesn't fix", "register plain tensors as buffers")
    return math.prod(int(s) for s in known)


def aligned(states: Sequence[tuple[State, int]], ndim: int) -> State:
    """Return the state of values, each with its number of dimensions, broadcast to `ndim`.

    Raises:
        Refusal: an element would meet elements of two tokens.
    """
    found = {
        state.at(state.dim + ndim - own) for state, own in states if isinstance(state, PerToken)
    }
    if len(found) > 1:
        sorts = [state.order for state in found if state.order is not None]
        raise sorts_tokens(sorts[0]) if sorts else Refusal("pairs elements of different tokens")
    return found.pop() if found else SAME
