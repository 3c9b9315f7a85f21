"""The seams act on our own captures only: a user's own `torch.compile` sees the plain model."""

from __future__ import annotations

import pytest
import torch
from compiled import shared_pair
from families import build_model
from forests import SHAPES, calls_of
from oracle import assert_equal_results, run_forest, run_rows

from prefix_rewrite import PrefixForest

IDS = torch.arange(3, 12)[None]


class Graphs:
    """A user's backend that keeps the graphs it is given."""

    def __init__(self):
        self.targets: set[str] = set()

    def __call__(self, graph_module, inputs):
        self.targets |= {str(node.target) for node in graph_module.graph.nodes}
        return graph_module.forward


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_users_own_compile_is_the_plain_model_before_and_after_a_forest(family):
    model, compiled = shared_pair(family)
    calls = calls_of(SHAPES["nested"])
    forest = PrefixForest.from_calls(calls)
    plain = model(input_ids=IDS, use_cache=False).logits
    graphs = Graphs()
    users = torch.compile(model, backend=graphs)
    for _ in range(2):
        torch.testing.assert_close(users(input_ids=IDS, use_cache=False).logits, plain)
        assert_equal_results(run_forest(compiled, forest), run_rows(model, calls))
    assert graphs.targets and not [t for t in graphs.targets if "prefix_rewrite" in t]


def test_a_users_own_compile_of_another_model_of_the_family_is_unaffected():
    shared_pair("bamba")
    other = build_model("bamba", seed=5, num_hidden_layers=2).eval()
    plain = other(input_ids=IDS, use_cache=False).logits
    graphs = Graphs()
    users = torch.compile(other, backend=graphs)
    torch.testing.assert_close(users(input_ids=IDS, use_cache=False).logits, plain)
    assert not [t for t in graphs.targets if "prefix_rewrite" in t]
