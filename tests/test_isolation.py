"""What a branch does not see has no effect on it: outputs bit-identical, gradients exactly zero.

No oracle is needed, so these tests see leaks that are far below any tolerance.
"""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from compiled import changed, shared_pair
from families import FAMILIES
from oracle import Result, take_gradients

from prefix_rewrite import PrefixForest

# Two roots; forks at depths inside one scan chunk and inside the conv's reach. `c` has an odd
# length over two attention tiles' edges, so that a tile below the diagonal holds siblings.
PARENT = {"p": None, "a": "p", "b": "p", "c": "p", "d": "b", "e": "b", "r": None, "s": "r"}
LENGTH = {"p": 5, "a": 3, "b": 2, "c": 131, "d": 4, "e": 3, "r": 4, "s": 3}
# Blind to each other: siblings, cousins, a nephew, another root in either direction.
BLIND = [("a", "c"), ("c", "a"), ("c", "e"), ("d", "e"), ("a", "d"), ("r", "e"), ("p", "s")]
# Each node's tokens come from a range of its own, at every depth different.
IDS = {name: range(10 + 150 * i, 10 + 150 * (i + 1)) for i, name in enumerate(PARENT)}


def make_forest(replaced: str | None = None) -> PrefixForest:
    """The forest above; the tokens of one node may be others, of its own range too."""
    graph = nx.DiGraph()
    for name, above in PARENT.items():
        ids = torch.tensor(IDS[name])[: LENGTH[name]]
        if name == replaced:
            ids = ids.flip(0) + 7
        graph.add_node(name, token_ids=ids, sampled=[i > 0 for i in range(len(ids))])
        if above is not None:
            graph.add_edge(above, name)
    return PrefixForest.from_graph(graph)


def run_node(compiled: torch.nn.Module, forest: PrefixForest, node: str) -> Result:
    """Log-probabilities of one node's tokens, and the gradients of their weighted sum alone."""
    compiled.zero_grad()
    logprobs = compiled(forest).per_node()[node]
    (logprobs * torch.arange(1, len(logprobs) + 1)).sum().backward()
    return Result(logprobs.detach(), take_gradients(compiled))


def assert_bit_identical(got: Result, expected: Result) -> None:
    assert torch.equal(got.logprobs, expected.logprobs)
    for name, gradient in expected.gradients.items():
        mine = got.gradients[name]
        same = mine is gradient is None or torch.equal(mine, gradient)
        assert same, f"gradient of {name} depends on tokens the loss can't see"


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    return shared_pair(request.param)


@pytest.fixture(scope="module")
def expected(pair):
    forest = make_forest()
    return {seen: run_node(pair[1], forest, seen) for seen in {seen for _, seen in BLIND}}


@pytest.mark.parametrize(("other", "seen"), BLIND)
def test_other_branches_tokens_change_nothing(pair, expected, other, seen):
    assert_bit_identical(run_node(pair[1], make_forest(other), seen), expected[seen])


@pytest.mark.parametrize("seen", ["e", "s"])
def test_ancestors_tokens_do_change_it(pair, expected, seen):
    above = PARENT[seen]
    got = run_node(pair[1], make_forest(above), seen)
    assert not torch.isclose(got.logprobs, expected[seen].logprobs, atol=1e-4).any()


def test_embeddings_of_unseen_tokens_get_exactly_no_gradient(pair, expected):
    model, _ = pair
    table = embedding(model)
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        pytest.skip("a tied head gives every row a gradient; its bits are compared above")
    for seen, result in expected.items():
        rows = result.gradients[table].abs().sum(-1)
        path = set(ancestors(seen))
        for name in PARENT:
            ids = list(IDS[name])[: LENGTH[name]]
            assert bool(rows[ids].any()) == (name in path), f"{name} in the gradient of {seen}"


def embedding(model: torch.nn.Module) -> str:
    tables = (n for n, m in model.named_modules() if isinstance(m, torch.nn.Embedding))
    return f"{next(tables)}.weight"


def ancestors(node: str | None) -> list[str]:
    return [] if node is None else [node, *ancestors(PARENT[node])]


def only_current_tap(weight: torch.Tensor) -> None:
    weight[..., :-1] = 0


# With the other operator silenced, each one alone must keep branches apart.
ONLY_SCAN = {"conv1d.weight": only_current_tap}
ONLY_CONV = {"dt_bias": lambda bias: bias.fill_(-30.0)}


@pytest.mark.parametrize("silenced", [ONLY_SCAN, ONLY_CONV], ids=["scan", "conv"])
@pytest.mark.parametrize(("other", "seen"), [("a", "c"), ("d", "e"), ("r", "e"), ("p", "s")])
def test_each_mamba_operator_isolates_by_itself(silenced, other, seen):
    model, compiled = shared_pair("mamba2")
    with changed(model, silenced):
        alone = run_node(compiled, make_forest(), seen)
        assert_bit_identical(run_node(compiled, make_forest(other), seen), alone)


@pytest.mark.parametrize("removed", ["p", "r"])
def test_a_root_gives_the_same_results_without_the_other(pair, removed):
    """Roots alone or together, in either order, differ by rounding only."""
    kept = "rs" if removed == "p" else "pabcde"
    whole, swapped, alone = (
        PrefixForest.from_graph(graph_of(names)) for names in ("pabcders", "rspabcde", kept)
    )
    for node in (kept[0], kept[-1]):
        results = [run_node(pair[1], forest, node) for forest in (whole, swapped, alone)]
        for result in results[1:]:
            torch.testing.assert_close(result.logprobs, results[0].logprobs, atol=1e-5, rtol=0)


def graph_of(names: str) -> nx.DiGraph:
    """The part of the forest above that has these nodes, inserted in this order."""
    source = make_forest().graph
    graph = nx.DiGraph()
    for name in names:
        ids = source.nodes[name]["token_ids"]
        graph.add_node(name, token_ids=ids, sampled=[i > 0 for i in range(len(ids))])
    graph.add_edges_from((u, v) for u, v in source.edges if u in graph and v in graph)
    return graph
