"""Captured calls: what the agent's model was given and what it sampled, as exact token ids.

Shapes: N tokens of one call.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefix_rewrite.errors import ForestError
from prefix_rewrite.segments import IntArray

BoolArray = NDArray[np.bool_]


class CapturedCall:
    """One exact model call: context token ids, then sampled token ids.

    Two tokens of two calls share one physical token only if their ids, their routing rows and the
    calls' provenance are equal, and so were all tokens before them.

    Attributes:
        token_ids: [N] int64, context and sampled tokens in the order in which the model saw them.
        sampled: [N] bool, True where the token was sampled; never at the first token.
        routing: [N, ...] integers, the executed expert routes of each token, or None.
        provenance: any hashable that must be equal for two calls to share, or None.

    Example:
        >>> call = CapturedCall([5, 6, 7], [8, 9], provenance="weights at step 3")
        >>> call.token_ids.tolist(), call.sampled.tolist()
        ([5, 6, 7, 8, 9], [False, False, False, True, True])
    """

    __slots__ = ("provenance", "routing", "sampled", "token_ids")

    token_ids: IntArray
    sampled: BoolArray
    routing: NDArray[np.integer[Any]] | None
    provenance: Hashable

    def __init__(
        self,
        context_ids: Any,
        sampled_ids: Any,
        *,
        routing: Any = None,
        provenance: Hashable = None,
    ):
        """Make a call of one context and one sampled span; lists, numpy or torch integers.

        Raises:
            ForestError: ids are negative, not integers or not 1-D; tokens were sampled without
                any context; there is no token at all; `routing` has another length.
        """
        context = as_token_ids(context_ids, "context_ids")
        continuation = as_token_ids(sampled_ids, "sampled_ids")
        sampled = np.zeros(len(context) + len(continuation), dtype=np.bool_)
        sampled[len(context) :] = True
        self._fill(np.concatenate([context, continuation]), sampled, routing, provenance)

    @classmethod
    def from_tokens(
        cls,
        token_ids: Any,
        sampled: Any,
        *,
        routing: Any = None,
        provenance: Hashable = None,
    ) -> CapturedCall:
        """Make a call of a whole row [N] and a boolean mask [N], for several sampled spans.

        Example:
            >>> CapturedCall.from_tokens([5, 6, 7], [False, True, False]).num_sampled
            1

        Raises:
            ForestError: as the constructor; also if the mask has another length than the row.
        """
        call = cls.__new__(cls)
        ids = as_token_ids(token_ids, "token_ids")
        call._fill(ids, as_sampled_mask(sampled, len(ids)), routing, provenance)
        return call

    def _fill(
        self, token_ids: IntArray, sampled: BoolArray, routing: Any, provenance: Hashable
    ) -> None:
        if not len(token_ids):
            raise ForestError("a call must have at least one token, got none; leave it out")
        if sampled[0]:
            raise ForestError(
                f"a sampled token must have a context, got sampled first token {token_ids[0]}; "
                "start the context with the token the model was given, such as the BOS token"
            )
        try:
            hash(provenance)
        except TypeError:
            kind = type(provenance).__name__
            raise ForestError(f"provenance must be hashable, got {kind}; give a tuple") from None
        self.token_ids = token_ids
        self.sampled = sampled
        self.routing = None if routing is None else _as_routing(routing, len(token_ids))
        self.provenance = provenance

    @property
    def num_tokens(self) -> int:
        """Context and sampled tokens N."""
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens: the edges this call puts into a forest."""
        return int(np.count_nonzero(self.sampled))

    def __repr__(self) -> str:
        return f"CapturedCall({self.num_tokens} tokens, {self.num_sampled} sampled)"


def as_token_ids(values: Any, name: str) -> IntArray:
    """Return a new [N] int64 array of token ids.

    Raises:
        ForestError: `values` are not one dimension of integers >= 0.
    """
    array = _as_integers(values, name)
    if array.ndim != 1:
        raise ForestError(
            f"{name} must have one dimension, got shape {array.shape}; give one call's row"
        )
    if array.size and array.min() < 0:
        at = int(array.argmin())
        raise ForestError(
            f"{name} must be >= 0, got {array[at]} at position {at}; "
            "drop padding and ignore labels"
        )
    return array.astype(np.int64)


def as_sampled_mask(values: Any, num_tokens: int) -> BoolArray:
    """Return a new [N] bool array.

    Raises:
        ForestError: `values` are not `num_tokens` booleans (or integers 0 and 1).
    """
    mask = _as_array(values, "sampled")
    if mask.shape != (num_tokens,):
        raise ForestError(
            f"sampled must be one boolean a token, {num_tokens} in all, got shape {mask.shape}; "
            "give True for each sampled token and False for the others"
        )
    is_mask = mask.dtype.kind == "b" or (
        mask.dtype.kind in "iu" and bool(((mask == 0) | (mask == 1)).all())
    )
    if num_tokens and not is_mask:
        raise ForestError(
            f"sampled must be boolean, got {mask.dtype} values; "
            "give True for each sampled token and False for the others"
        )
    return mask.astype(np.bool_)


def _as_routing(values: Any, num_tokens: int) -> NDArray[np.integer[Any]]:
    routing = _as_integers(values, "routing")
    if routing.ndim == 0 or len(routing) != num_tokens:
        raise ForestError(
            f"routing must have one row a token, {num_tokens} in all, got shape {routing.shape}; "
            "give a row for the last sampled token too"
        )
    return np.array(routing)


def _as_integers(values: Any, name: str) -> NDArray[np.integer[Any]]:
    array = _as_array(values, name)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ForestError(f"{name} must be integers, got {array.dtype}; give the exact token ids")
    if array.dtype == np.uint64:
        if array.max() > np.iinfo(np.int64).max:
            raise ForestError(f"{name} must fit in int64, got {array.max()}")
        return array.astype(np.int64)
    return array


def _as_array(values: Any, name: str) -> NDArray[Any]:
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu()
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ForestError(f"{name} must be an array of integers: {error}") from None
