"""Token-locality of single ops: the pass accepts what an independent oracle finds local.

The oracle runs the op itself: an op is token-local, and the pass right about where its tokens are,
if each token's rows are what they are when that token is alone (twice, since a compiler may treat
one token specially).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from locality_cases import CASES, Case
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Graph, GraphModule

from prefix_rewrite.passes import token_locality  # noqa: F401  (declares the rules)
from prefix_rewrite.passes.locality_call import Call, read_op
from prefix_rewrite.passes.locality_layout import PerToken, Refusal, Tokens
from prefix_rewrite.passes.locality_rules import RULES, find_rule, judge
from prefix_rewrite.passes.nodes import shape_of

TOKENS = 5


class _Enough(Exception):
    """The graph is there; nobody will run it."""


def capture(function: Callable[..., Tensor], *inputs: Tensor) -> GraphModule:
    """Dynamo's graph of a function of x, ids and a weight, tokens symbolic."""
    graphs: list[GraphModule] = []

    def keep(graph_module: GraphModule, given: list[Any]) -> Callable[..., Any]:
        graphs.append(graph_module)
        raise _Enough

    for value in inputs[:2]:
        for dim in range(value.ndim):
            if dim != 1:
                torch._dynamo.mark_static(value, dim)
    function.__code__ = function.__code__.replace()  # a cache of its own
    run = torch.compile(function, backend=keep, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(specialize_int=True), pytest.raises(BackendCompilerFailed):
        run(*inputs)
    return graphs[0]


@functools.cache
def capture_case(name: str, local: bool) -> GraphModule:
    return capture(CASES[name][not local], *make_inputs())


def infer(graph: Graph) -> PerToken:
    """Where the pass finds the tokens in a function's result.

    Raises:
        Refusal: it is not proven token-local.
    """
    sizes = (size for n in graph.nodes if n.op == "placeholder" for size in shape_of(n))
    tokens = Tokens(next(size for size in sizes if isinstance(size, torch.SymInt)))
    states: dict[Any, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            states[node] = tokens.by_shape(node.meta["example_value"])
        elif node.op != "output":
            op, in_place = read_op(node)
            states[node] = judge(Call(node, op, in_place, tokens, states))
            if in_place:
                states[node.all_input_nodes[0]] = states[node]
    (result,) = graph.output_node().args[0]
    state = states[result]
    if not isinstance(state, PerToken) or state.order is not None:
        raise Refusal("has rows that are not the tokens in their order")
    return state


def make_inputs() -> tuple[Tensor, Tensor, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, TOKENS, 12, generator=generator, dtype=torch.float64)
    ids = torch.tensor([[7, 2, 7, 0, 11]])
    weight = torch.nn.Parameter(torch.randn(12, 12, generator=generator, dtype=torch.float64))
    return x, ids, weight


def rows_of(value: Tensor, state: PerToken, tokens: int) -> Tensor:
    """[tokens, ...]: what a state says each token owns."""
    split = value.movedim(state.dim, 0).unflatten(0, (state.outer, tokens, state.inner))
    return split.movedim(1, 0)


def is_local(case: Case, state: PerToken) -> bool:
    """Compare each token's rows with those it has where it is alone, twice."""
    x, ids, weight = make_inputs()
    together = rows_of(case(x, ids, weight), state, TOKENS)
    for token in range(TOKENS):
        twice = [token, token]
        alone = rows_of(case(x[:, twice], ids[:, twice], weight), state, 2)
        if not torch.allclose(together[token], alone[0], rtol=0, atol=1e-12, equal_nan=True):
            return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_a_local_op_is_proven_and_its_tokens_are_where_the_pass_says(name):
    local, _ = CASES[name]
    assert is_local(local, infer(capture_case(name, local=True).graph))


@pytest.mark.parametrize("name", CASES)
def test_the_nearest_op_that_mixes_tokens_is_refused(name):
    with pytest.raises(Refusal):
        infer(capture_case(name, local=False).graph)


STEPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "swap": lambda x, n: x.transpose(n % x.ndim, (n + 1) % x.ndim),
    "reshape": lambda x, n: x.reshape(*_factors(x, n)),
    "flatten": lambda x, n: x.flatten(n % x.ndim),
    "unsqueeze": lambda x, n: x.unsqueeze(n % x.ndim),
    "repeat": lambda x, n: x.repeat(*(2 if dim == n % x.ndim else 1 for dim in range(x.ndim))),
    "interleave": lambda x, n: x.repeat_interleave(2, n % x.ndim),
    "halve": lambda x, n: x.narrow(n % x.ndim, 0, 1),
    "sum": lambda x, n: x.sum(n % x.ndim, keepdim=True),
    "stack": lambda x, n: torch.stack([x, -x], n % x.ndim),
    "cat": lambda x, n: torch.cat([x, x], n % x.ndim),
}


def _factors(x: Tensor, n: int) -> list[int]:
    """Split one dimension of 2 or more into two, or all into a matrix."""
    divisor = 2 + n % 2
    shape = list(x.shape)
    for dim, size in enumerate(shape):
        if dim != 1 and isinstance(size, int) and size % divisor == 0:
            return [*shape[:dim], divisor, size // divisor, *shape[dim + 1 :]]
    return [-1, shape[-1]]


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5)), max_size=5))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_whatever_is_proven_is_local(steps):
    """Chains of views: the pass may refuse more than it must, never less."""

    def chain(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        for name, n in steps:
            x = STEPS[name](x, n)
        return x

    try:
        state = infer(capture(chain, *make_inputs()).graph)
    except Refusal:
        return
    assert is_local(chain, state)


def test_every_rule_is_tried():
    """A rule that no case reaches could be anything."""
    graphs = [capture_case(name, local).graph for name in CASES for local in (True, False)]
    ops = {read_op(node)[0] for graph in graphs for node in graph.nodes}
    tried = {known.infer for op in ops if (known := find_rule(op)) is not None}
    untried = {known.infer.__name__ for known in RULES.values() if known.infer not in tried}
    assert untried == {"reshard", "unknown_groups"}, "those need a mesh and experts"
