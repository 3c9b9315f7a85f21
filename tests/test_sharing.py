"""Every fork is reported once, with what really differs there."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.sharing import Fork, describe_fork, explain_sharing

rows = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), min_size=1)


@st.composite
def calls_with_context(draw):
    calls = []
    for row in draw(st.lists(rows, max_size=7)):
        ids, routes, mask = (list(column) for column in zip(*row, strict=True))
        calls.append(
            CapturedCall.from_tokens(
                ids,
                [False, *mask[1:]],
                routing=draw(st.sampled_from([None, routes])),
                provenance=draw(st.sampled_from([None, "a"])),
            )
        )
    return calls


def common(a: CapturedCall, b: CapturedCall, *, routing: bool = True) -> int:
    """Tokens that two calls have in common, one token at a time."""
    n = 0
    while n < min(a.num_tokens, b.num_tokens) and a.token_ids[n] == b.token_ids[n]:
        if routing and (a.routing is None) != (b.routing is None):
            break
        if routing and a.routing is not None and not np.array_equal(a.routing[n], b.routing[n]):
            break
        n += 1
    return n


@settings(deadline=None, max_examples=100)
@given(calls_with_context())
def test_each_fork_is_what_it_says(calls):
    forest = PrefixForest.from_calls(calls)
    report = explain_sharing(calls)
    for fork in report.forks:
        call, other = calls[fork.call], calls[fork.other]
        if fork.kind == "provenance":
            assert call.provenance != other.provenance and fork.at == 0
        else:
            assert fork.at == 0 or call.provenance == other.provenance
            assert fork.at == 0 or fork.at == common(call, other)
        if fork.kind in ("routing", "provenance"):
            assert fork.tokens == common(call, other, routing=False) - fork.at > 0
        else:
            assert call.token_ids[fork.at] != other.token_ids[fork.at]
            later = np.flatnonzero(call.sampled[fork.at :])
            assert fork.tokens == (later[0] if len(later) else call.num_tokens - fork.at)
        assert describe_fork(fork, calls).startswith(f"call {fork.call} leaves call {fork.other}")
    stats = forest.stats()
    if stats.num_roots:
        assert len(report.forks) == stats.num_leaves - 1
    assert sum(report.num_forks().values()) == len(report.forks)


@settings(deadline=None, max_examples=100)
@given(calls_with_context())
def test_blocked_tokens_are_the_physical_tokens_that_equality_of_ids_would_save(calls):
    def physical(with_routing: bool, with_provenance: bool) -> int:
        keys = set()
        for call in calls:
            routes = None if call.routing is None or not with_routing else call.routing.tolist()
            kind = (call.provenance if with_provenance else 0, routes is None)
            ids = call.token_ids.tolist()
            for n in range(1, len(ids) + 1):
                keys.add((kind, tuple(ids[:n]), routes and tuple(routes[:n])))
        return len(keys)

    report = explain_sharing(calls)
    assert report.blocked_by_provenance == physical(True, True) - physical(True, False)
    assert report.blocked_by_routing == physical(True, False) - physical(False, False)


def test_a_stripped_turn_is_told_from_a_second_sample():
    calls = [
        CapturedCall([1, 2], [7, 8, 9]),
        CapturedCall([1, 2], [7, 5]),  # a second sample
        CapturedCall([1, 2, 8, 9, 3, 4], [6]),  # the first answer without its first token
        CapturedCall([1, 4, 4], [6]),  # another task
    ]
    report = explain_sharing(calls)
    assert report.forks == (
        Fork("rewritten", call=2, other=0, at=2, tokens=4),
        Fork("context", call=3, other=0, at=1, tokens=2),
        Fork("sampled", call=1, other=0, at=3, tokens=0),
    )
    text = describe_fork(report.examples("rewritten")[0], calls)
    assert text == "call 2 leaves call 0 after 2 tokens: after 1 2 comes 8 9 3 4, not 7 8 9"
    words = describe_fork(report.forks[0], calls, decode=lambda ids: "-".join(map(str, ids)))
    assert words.endswith("after '1-2' comes '8-9-3-4', not '7-8-9'")


def test_routes_and_provenance_are_shown():
    calls = [
        CapturedCall([1, 2], [3], routing=[[0, 1], [0, 1], [0, 1]], provenance="step 1"),
        CapturedCall([1, 2], [3], routing=[[0, 1], [0, 2], [0, 1]], provenance="step 1"),
        CapturedCall([1, 2], [3], routing=[[0, 1], [0, 1], [0, 1]], provenance="step 2"),
    ]
    report = explain_sharing(calls)
    told = {fork.kind: describe_fork(fork, calls) for fork in report.forks}
    assert "after 1 tokens: routes [0, 2], not [0, 1]; 2 further tokens" in told["routing"]
    assert "provenance 'step 2', not 'step 1'; 3 tokens have equal ids" in told["provenance"]
    assert (report.blocked_by_routing, report.blocked_by_provenance) == (2, 3)


def test_no_calls_and_one_call_have_no_fork():
    assert explain_sharing([]).forks == ()
    assert explain_sharing([CapturedCall([1], [2])]).forks == ()
    pairs = [CapturedCall([i], [1]) for i in range(3)]
    assert len(explain_sharing(pairs).forks) == len(list(combinations(pairs, 2))) - 1 == 2
