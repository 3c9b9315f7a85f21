"""Why calls do not share more: where their paths part, and what differs there.

Shapes: S segments, T physical tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.segments import IntArray
from prefix_rewrite.trie import NO_CALL, build_radix_tree, common_prefix

ForkKind = Literal["sampled", "rewritten", "context", "routing", "provenance"]

MEANING: dict[ForkKind, str] = {
    "sampled": "another token was sampled: retries, best-of-n, search",
    "rewritten": "context differs from what was sampled there: retokenised, edited or stripped",
    "context": "contexts differ: another task, an edited or elided observation",
    "routing": "equal ids, other expert routes",
    "provenance": "equal ids, other provenance",
}


@dataclass(frozen=True)
class Fork:
    """A call that leaves an earlier path.

    Attributes:
        kind: what differs, see `MEANING`.
        call: the call that leaves.
        other: a call on the path that it leaves.
        at: tokens that the two have in common; the next token differs.
        tokens: for routing and provenance, further tokens with equal ids; else the context tokens
            that follow, up to the call's next sampled token.
    """

    kind: ForkKind
    call: int
    other: int
    at: int
    tokens: int


@dataclass(frozen=True)
class SharingReport:
    """Every fork of a forest, and what routing and provenance cost.

    Attributes:
        forks: all forks, the one with most tokens first.
        blocked_by_routing: physical tokens that equal ids, but other routes, made necessary.
        blocked_by_provenance: the same for provenance.
    """

    forks: tuple[Fork, ...]
    blocked_by_routing: int
    blocked_by_provenance: int

    def num_forks(self) -> dict[ForkKind, int]:
        """Return how many forks there are of each kind."""
        counts = Counter(fork.kind for fork in self.forks)
        return {kind: counts[kind] for kind in MEANING}

    def examples(self, kind: ForkKind, limit: int = 3) -> list[Fork]:
        """Return the forks of one kind with most tokens."""
        return [fork for fork in self.forks if fork.kind == kind][:limit]


def explain_sharing(
    calls: Sequence[CapturedCall], forest: PrefixForest | None = None
) -> SharingReport:
    """Find where and why calls stop sharing.

    Args:
        calls: the captured calls.
        forest: the forest of these calls, if there is one already.
    """
    forest = PrefixForest.from_calls(calls) if forest is None else forest
    forks = sorted(_forks(calls, forest), key=lambda fork: (-fork.tokens, fork.call))
    tokens = [forest.num_tokens] * 3
    if any(call.provenance is not None or call.routing is not None for call in calls):
        tokens[1] = _num_tokens(calls, keep_routing=True)
        tokens[2] = _num_tokens(calls, keep_routing=False)
    return SharingReport(
        forks=tuple(forks),
        blocked_by_routing=tokens[1] - tokens[2],
        blocked_by_provenance=tokens[0] - tokens[1],
    )


def describe_fork(
    fork: Fork,
    calls: Sequence[CapturedCall],
    decode: Callable[[list[int]], str] | None = None,
    around: int = 4,
) -> str:
    """Say in words where a call leaves another one.

    Args:
        fork: the fork.
        calls: the calls that the report was made of.
        decode: turns token ids into text, such as a tokenizer's `decode`; ids are shown without.
        around: tokens to show before and after the fork.
    """
    call, other = calls[fork.call], calls[fork.other]
    head = f"call {fork.call} leaves call {fork.other} after {fork.at} tokens"
    if fork.kind == "provenance":
        return (
            f"{head}: provenance {call.provenance!r}, not {other.provenance!r}; "
            f"{fork.tokens} tokens have equal ids"
        )
    if fork.kind == "routing":
        return (
            f"{head}: routes {_routes(call, fork.at)}, not {_routes(other, fork.at)}; "
            f"{fork.tokens} further tokens have equal ids"
        )

    def show(ids: IntArray) -> str:
        return repr(decode(ids.tolist())) if decode else " ".join(map(str, ids.tolist()))

    before = show(call.token_ids[max(0, fork.at - around) : fork.at])
    after, instead = (show(c.token_ids[fork.at : fork.at + around]) for c in (call, other))
    return f"{head}: after {before or 'the start'} comes {after}, not {instead}"


def _routes(call: CapturedCall, at: int) -> str:
    return "none" if call.routing is None else str(call.routing[at].tolist())


def _num_tokens(calls: Sequence[CapturedCall], *, keep_routing: bool) -> int:
    """Physical tokens if provenance, and perhaps routing, did not matter."""
    tree = build_radix_tree(
        [
            CapturedCall.from_tokens(
                call.token_ids, call.sampled, routing=call.routing if keep_routing else None
            )
            for call in calls
        ]
    )
    return sum(tree.end) - sum(tree.begin)


def _forks(calls: Sequence[CapturedCall], forest: PrefixForest) -> Iterator[Fork]:
    table = forest.segments
    first_call = _first_call(forest)
    is_sampled = np.zeros(forest.num_tokens, dtype=np.bool_)
    is_sampled[forest.edges.token] = True
    sampled = is_sampled[table.start].tolist()
    first_id = forest.token_ids[table.start].tolist()
    depth = table.depth.tolist()
    for siblings in _siblings(table.parent):
        # The path that the others leave: the first call, of those that sampled, if any did.
        siblings.sort(key=lambda i: (not sampled[i], first_call[i]))
        by_id: dict[int, int] = {}
        for segment in siblings:
            other = by_id.setdefault(first_id[segment], segment)
            call, at = first_call[segment], depth[segment]
            if other != segment:
                yield _same_id_fork(calls, call, first_call[other], at)
            elif segment != siblings[0]:
                kind: ForkKind = "context"
                if sampled[siblings[0]]:
                    kind = "sampled" if sampled[segment] else "rewritten"
                rest = calls[call].sampled[at:]
                tokens = int(rest.argmax()) if rest.any() else len(rest)
                yield Fork(kind, call, first_call[siblings[0]], at, tokens)


def _same_id_fork(calls: Sequence[CapturedCall], call: int, other: int, at: int) -> Fork:
    a, b = calls[call].token_ids[at:], calls[other].token_ids[at:]
    tokens = common_prefix(a.tobytes(), b.tobytes()) // a.itemsize
    other_provenance = calls[call].provenance != calls[other].provenance
    return Fork("provenance" if other_provenance else "routing", call, other, at, tokens)


def _first_call(forest: PrefixForest) -> list[int]:
    """Return [S] the first call that runs through each segment."""
    first = [NO_CALL] * forest.segments.num_segments
    for call, segment in enumerate(forest.call_segment.tolist()):
        first[segment] = min(first[segment], call)
    parent = forest.segments.parent.tolist()
    for i in range(len(parent) - 1, 0, -1):
        if parent[i] != -1:
            first[parent[i]] = min(first[parent[i]], first[i])
    return first


def _siblings(parent: IntArray) -> Iterator[list[int]]:
    """Yield the segments below each branch point, and the roots."""
    order = np.argsort(parent, kind="stable")
    cuts = np.flatnonzero(np.diff(parent[order])) + 1
    for group in np.split(order, cuts):
        if len(group) > 1:
            yield group.tolist()
