"""Nothing to train on, one token, and lengths that exactly fill a window all just work."""

from __future__ import annotations

import pytest
from compiled import shared_pair
from forests import calls_of
from oracle import assert_equal_results, run_forest, run_rows

from prefix_rewrite import CapturedCall, PrefixForest


@pytest.fixture(scope="module", params=["llama", "bamba", "handwritten"])
def pair(request):
    return shared_pair(request.param)


NOTHING_SAMPLED = {
    "no call": [],
    "one token": [CapturedCall([5], [])],
    "a prompt": [CapturedCall([5, 6, 7], [])],
    "a branching": [CapturedCall([5, 6, 7], []), CapturedCall([5, 8], []), CapturedCall([9], [])],
}


@pytest.mark.parametrize("case", NOTHING_SAMPLED)
def test_without_edges_the_sum_is_zero_and_gradients_are_none_or_zero(pair, case):
    _, compiled = pair
    compiled.zero_grad()
    out = compiled(PrefixForest.from_calls(NOTHING_SAMPLED[case]), entropy=True, logits=True)
    assert out.logprobs.shape == out.entropy.shape == (0,)
    assert len(out.logits) == 0
    assert out.per_call() == [] if case == "no call" else all(not len(x) for x in out.per_call())
    total = out.logprobs.sum()
    total.backward()
    assert total == 0
    for name, parameter in compiled.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


def test_smallest_forests_equal_rows(pair):
    model, compiled = pair
    for calls in ([CapturedCall([5], [6])], [CapturedCall([5], [6]), CapturedCall([5], [7])]):
        assert_equal_results(
            run_forest(compiled, PrefixForest.from_calls(calls)), run_rows(model, calls)
        )


# The same 64, 128 and 256 tokens as a lone root and cut at awkward places; totals around blocks.
CUTS = [(64,), (128,), (127, 1), (1, 127), (256,), (63, 1, 64), (129,), (1025,)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_lengths_that_fill_a_window_equal_rows(pair, cut):
    model, compiled = pair
    (call,) = calls_of([(sum(cut), [])], sampled=9)
    calls = [call]
    begin = 0
    for length in cut[:-1]:  # a call that leaves the row there makes a cut
        begin += length
        calls.append(CapturedCall([*call.token_ids[:begin], 3], [4, 5]))
    forest = PrefixForest.from_calls(calls)
    assert forest.segments.num_segments == 2 * len(cut) - 1
    assert_equal_results(run_forest(compiled, forest), run_rows(model, calls))


def test_positions_are_limited_by_the_longest_path_not_by_the_forest():
    from families import Handwritten, build_model

    from prefix_rewrite import prefix_compile

    model = build_model("handwritten", layers=1, max_positions=16)
    calls = calls_of([(6, [(6, []), (5, []), (6, [(3, []), (4, [])])]), (7, [])])
    forest = PrefixForest.from_calls(calls)
    assert isinstance(model, Handwritten) and forest.num_tokens > 2 * 16
    got = run_forest(prefix_compile(model), forest)
    assert_equal_results(got, run_rows(model, calls))
