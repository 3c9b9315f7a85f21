"""The experts' load-balancing loss of a forest is that of its calls as rows of one batch."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from families import build_model
from forests import SHAPES, calls_of
from oracle import take_gradients, worst_gradient
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from prefix_rewrite import CapturedCall, PrefixForest, UnsupportedModelError, prefix_compile

CALLS = calls_of(SHAPES["nested"])
REPEATED = [*CALLS, CALLS[0], CapturedCall(CALLS[1].token_ids[:5], [])]


def batch_loss(model: torch.nn.Module, calls: list[CapturedCall]) -> torch.Tensor:
    """The untouched model's own, on one padded batch."""
    longest = max(call.num_tokens for call in calls)
    ids, mask = torch.zeros(2, len(calls), longest, dtype=torch.int64)
    for row, call in enumerate(calls):
        ids[row, : call.num_tokens] = torch.from_numpy(call.token_ids)
        mask[row, : call.num_tokens] = 1
    return model(input_ids=ids, attention_mask=mask, use_cache=False).aux_loss


@pytest.mark.parametrize("family", ["gpt_oss", "jamba_moe", "qwen3_next", "minimax"])
def test_equals_the_models_own_on_a_batch(family: str) -> None:
    model = build_model(family, output_router_logits=True)
    out = prefix_compile(model)(PrefixForest.from_calls(REPEATED))
    expected = batch_loss(model, REPEATED)
    assert abs(float((out.aux_loss - expected).detach())) <= 1e-6
    out.aux_loss.backward()
    got = take_gradients(model)
    expected.backward()
    error, name = worst_gradient(got, take_gradients(model))
    assert error <= 1e-4, name


def test_is_not_that_of_the_physical_tokens() -> None:
    model = build_model("gpt_oss", output_router_logits=True)
    out = prefix_compile(model)(PrefixForest.from_calls(REPEATED))
    ids = torch.from_numpy(PrefixForest.from_calls(REPEATED).token_ids)[None]
    shared = model(input_ids=ids, use_cache=False).aux_loss
    assert abs(float((out.aux_loss - shared).detach())) > 1e-4


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_another_backend_gives_the_same() -> None:
    model = build_model("gpt_oss", output_router_logits=True)
    forest = PrefixForest.from_calls(CALLS)
    expected = prefix_compile(model)(forest).aux_loss
    got = prefix_compile(model, backend="aot_eager")(forest).aux_loss
    assert abs(float((got - expected).detach())) <= 1e-6


def test_models_that_return_none_have_none() -> None:
    model = build_model("gpt_oss")
    assert prefix_compile(model)(PrefixForest.from_calls(CALLS)).aux_loss is None


def test_a_forest_without_calls_has_no_loss() -> None:
    model = build_model("gpt_oss", output_router_logits=True)
    assert float(prefix_compile(model)(PrefixForest.from_calls([])).aux_loss.detach()) == 0


class LossInLogits(torch.nn.Module):
    """Adds the loss of all tokens to every token's logits."""

    def __init__(self, leaks: bool):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(97, 8), torch.nn.Linear(8, 97)
        self.gate = torch.nn.Linear(8, 4)
        self.leaks = leaks

    def forward(self, input_ids: torch.Tensor) -> dict:
        hidden = self.embed(input_ids)
        loss = load_balancing_loss_func((self.gate(hidden[0]),), 4, 2)
        logits = self.head(hidden)
        return Output(logits=logits + loss if self.leaks else logits, aux_loss=loss)


class Output(dict):
    """What transformers' models return, in short."""

    def __init__(self, **fields: torch.Tensor):
        super().__init__(fields)
        self.logits = fields["logits"]


def test_a_model_that_uses_the_loss_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="of all calls together, and is used to"):
        prefix_compile(LossInLogits(leaks=True))
    out = prefix_compile(LossInLogits(leaks=False))(PrefixForest.from_calls(CALLS))
    assert out.aux_loss is not None


def test_tokens_count_once_for_each_call_that_contains_them() -> None:
    calls = [
        CapturedCall([1, 2, 3], [4]),
        CapturedCall([1, 2, 3], [4]),
        CapturedCall([1, 2], [9]),
        CapturedCall([1, 2, 3], []),
        CapturedCall([7], []),
    ]
    forest = PrefixForest.from_calls(calls)
    counts = dict(zip(forest.token_ids.tolist(), forest.token_calls.tolist(), strict=True))
    assert counts == {1: 4, 2: 4, 3: 3, 4: 2, 9: 1, 7: 1}
    assert forest.token_calls.sum() == sum(call.num_tokens for call in calls)


def test_a_graphs_calls_are_the_paths_to_its_leaves() -> None:
    graph = nx.DiGraph([("root", "a"), ("root", "b"), ("a", "c")])
    for i, node in enumerate(graph):
        graph.nodes[node]["token_ids"] = [i + 1, i + 10]
    forest = PrefixForest.from_graph(graph)
    counts = dict(zip(forest.token_ids.tolist(), forest.token_calls.tolist(), strict=True))
    assert counts == {1: 2, 10: 2, 2: 1, 11: 1, 3: 1, 12: 1, 4: 1, 13: 1}


@pytest.mark.parametrize("shape", SHAPES)
def test_fragments_count_each_call_once(shape: str) -> None:
    calls = calls_of(SHAPES[shape])
    forest = PrefixForest.from_calls(calls)
    longest = max(call.num_tokens for call in calls)
    for max_tokens in (longest, longest + 7):
        fragments = forest.split(max_tokens)
        total = sum(int(fragment.token_calls.sum()) for fragment in fragments)
        assert total == forest.token_calls.sum()
