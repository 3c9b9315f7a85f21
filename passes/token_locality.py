"""Prove that nothing but the known mixers moves information between tokens.

From the graph's inputs on, each value gets a state: no token has a part in it, or each of its
elements is owned by one token and depends on that token alone (`locality_layout`). Each op has a
rule that says what state its result has, or refuses it (`locality_*.py`, beside each other). A
graph in which no op is refused computes each token's row from that token, its position and what
the mixers bring it: on a forest they bring what they bring on the token's own path, so every row
is what it is there. Only ops that the logits depend on, or that change a tensor in place, count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from prefix_rewrite.errors import Finding
from prefix_rewrite.passes import (  # noqa: F401  (each declares its rules)
    locality_contract,
    locality_experts,
    locality_index,
    locality_pointwise,
    locality_reduce,
    locality_shapes,
    locality_shards,
)
from prefix_rewrite.passes.bind_layout import checkpoint_op
from prefix_rewrite.passes.context import PassContext, PassReport
from prefix_rewrite.passes.graph_census import find_leaf
from prefix_rewrite.passes.head import other_heads
from prefix_rewrite.passes.locality_autograd import autograd_function_op, autograd_function_state
from prefix_rewrite.passes.locality_call import Call, read_op
from prefix_rewrite.passes.locality_layout import (
    SAME,
    UNPROVEN,
    PerToken,
    Refusal,
    State,
    Tokens,
    states_in,
)
from prefix_rewrite.passes.locality_rules import judge
from prefix_rewrite.passes.nodes import (
    get_attribute,
    module_path,
    shape_of,
    source_line,
    value_of,
    walk,
)
from prefix_rewrite.targets import find_target

leaf = torch.ops.prefix_rewrite
ONLY_RETURN = "return it, and add it to the loss outside the model"
KEEP_NOTHING = "keep no state between calls: a forest runs once where its calls run many times"


def token_locality(graph_module: GraphModule, context: PassContext) -> PassReport:
    """Add a finding for every op that is not proven; count those that are."""
    tokens = context.checked_census.tokens
    assert isinstance(tokens, torch.SymInt), (
        "Dynamo must be given 2 tokens or more, marked dynamic"
    )
    findings = list(_branches(tokens))
    counts: Counter[str] = Counter()
    if not tokens.node.expr.is_Integer:
        proof = Proof(Tokens(tokens), context)
        proof.run_model(graph_module)
        findings += proof.findings
        counts = proof.proven
    context.findings.extend(dict.fromkeys(findings))
    return PassReport("token_locality", counts)


def _branches(tokens: torch.SymInt) -> Iterator[Finding]:
    """A graph captured with one number of tokens may not be that of another number.

    Python code that looks at the number leaves a guard that Dynamo itself made; torch's own ops
    leave guards too, but what they compute is the same on both sides.
    """
    symbol = tokens.node._expr
    fixed = bool(tokens.node.expr.is_Integer)
    for guard in tokens.node.shape_env.guards:
        by_code = "torch/_dynamo/" in str(getattr(guard.sloc.framework_loc, "filename", ""))
        if symbol in guard.expr.free_symbols and (fixed or by_code):
            code, _, source = str(guard.sloc.maybe_user_loc or guard.sloc).rpartition("  # ")
            does = f"fixes the number of tokens to {tokens}" if fixed else "branches on it"
            yield Finding(
                f"looks at the number of tokens and {does}, in `{code}`",
                "a forest has more tokens than its calls: decide by position_ids or by the config",
                source=source,
            )


class Proof:
    """Walks one captured graph.

    Attributes:
        findings: what is not proven.
        proven: how many calls of each op are.
    """

    def __init__(self, tokens: Tokens, context: PassContext):
        self.findings: list[Finding] = []
        self.proven: Counter[str] = Counter()
        self._tokens = tokens
        self._context = context
        self._states: dict[Node, State] = {}

    def run_model(self, graph_module: GraphModule) -> None:
        """Start at the ids and the positions, end at the logits and the other outputs."""
        ids = find_leaf(graph_module, leaf.leaf_bind).args[0]
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                known = node is ids or node.target == "L_position_ids_"
                self._states[node] = PerToken(1) if known else SAME
                self._check_placeholder(node, known)
        project = self._context.checked_census.project
        logits: Node = project.args[0]
        returned = graph_module.graph.output_node().all_input_nodes
        totals = [node for node in returned if _is_total(node)]
        self._run(graph_module, [logits, *totals, *self._judged_outputs(graph_module)])
        if self._states[logits] not in (PerToken(1), UNPROVEN):
            self._report(logits, Refusal("returns logits that are not [1, tokens, vocabulary]"))
        for node in returned:
            if project not in node.all_input_nodes and node not in totals:
                self._report(node, Refusal("makes a value that the model keeps", KEEP_NOTHING))

    def _check_placeholder(self, node: Node, known: bool) -> None:
        value = value_of(node)
        if not known and self._tokens.by_shape(value) != SAME:
            self._report(node, Refusal("is a tensor as long as the tokens", KEEP_NOTHING))
        if is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor):
            reason = f"is a {type(value).__name__}, which runs ops that the graph doesn't show"
            self._report(node, Refusal(reason, "use plain tensors"))

    def _judged_outputs(self, graph_module: GraphModule) -> list[Node]:
        """Outputs beside the logits, but for other heads: those are reported as such."""
        census = self._context.checked_census
        if self._context.mtp == "bypass":
            return []
        nodes = (node for _, node in walk(graph_module))
        heads = set(other_heads(census.project, nodes, census.tokens, census.vocab_size))
        others = [node for node in census.project.args[1] if isinstance(node, Node)]
        return [node for node in others if not heads & _ancestors([node])]

    def _run(self, graph_module: GraphModule, outputs: Iterable[Node]) -> None:
        live = _live(graph_module.graph, outputs)
        for node in graph_module.graph.nodes:
            if node.op == "get_attr":
                self._states[node] = SAME
            elif node in live and node.op.startswith("call"):
                self._visit(graph_module, node)

    def _visit(self, graph_module: GraphModule, node: Node) -> None:
        op, in_place = read_op(node)
        try:
            state = self._infer(graph_module, node, op, in_place)
        except Refusal as refusal:
            self._report(refusal.node or node, refusal)
            guess = self._tokens.by_shape(value_of(node))
            state = guess if refusal.node is None or guess == SAME else UNPROVEN
        else:
            self.proven[op] += 1
            if in_place:
                self._states[node.all_input_nodes[0]] = state
        self._states[node] = state

    def _infer(self, graph_module: GraphModule, node: Node, op: str, in_place: bool) -> State:
        if node.target is leaf.leaf_bind:
            return PerToken(1)
        if node.target is checkpoint_op:
            return self._checkpoint(graph_module, node)
        if node.target is autograd_function_op:
            return autograd_function_state(graph_module, node, self._states, self._tokens)
        if find_target(node) is not None:
            return self._mixer(node)
        return judge(Call(node, op, in_place, self._tokens, self._states))

    def _checkpoint(self, graph_module: GraphModule, node: Node) -> State:
        body, *given = node.args
        child = get_attribute(graph_module, str(body.target))  # type: ignore[union-attr]
        inputs = [inner for inner in child.graph.nodes if inner.op == "placeholder"]
        for inner, outer in zip(inputs, given, strict=True):
            self._states[inner] = self._states[outer] if isinstance(outer, Node) else SAME
        results: Sequence[Any] = child.graph.output_node().args[0]
        self._run(child, child.graph.output_node().all_input_nodes)
        return tuple(self._states[r] if isinstance(r, Node) else SAME for r in results)

    def _mixer(self, node: Node) -> State:
        """What it does with tokens is known, if each of its inputs has them one by one."""
        for name, value in _mixer_inputs(node).items():
            for state in states_in(self._states[value]):
                if not (state in (SAME, UNPROVEN) or isinstance(state, PerToken) and state.plain):
                    raise Refusal(f"gets a {name} whose rows are not the tokens in their order")
        if _is_total(node):
            if any(user.op != "output" for user in node.users):
                raise Refusal("is of all calls together, and is used to compute more", ONLY_RETURN)
            return SAME
        result = self._tokens.by_shape(value_of(node))
        if not all(isinstance(s, PerToken) and s.plain or s == SAME for s in states_in(result)):
            raise Refusal("returns rows that are not the tokens")
        return result

    def _report(self, node: Node, refusal: Refusal) -> None:
        """Add a finding, unless the head's own reader refused the same op."""
        op = read_op(node)[0] if node.op.startswith("call") else str(node.target)
        finding = Finding(
            f"{op} {refusal.reason}", refusal.remedy, module_path(node), source_line(node)
        )
        head = self._context.checked_census.head
        reported = {(other.module, other.source) for other in head.findings}
        if node not in head.nodes or (finding.module, finding.source) not in reported:
            self.findings.append(finding)


def _is_total(node: Node) -> bool:
    found = find_target(node)
    return found is not None and found[0].is_total


def _live(graph: Graph, outputs: Iterable[Node]) -> set[Node]:
    """Nodes that outputs depend on, or that change a tensor in place, and what they depend on."""
    changes = (node for node in graph.nodes if node.op.startswith("call") and read_op(node)[1])
    return _ancestors([*outputs, *changes])


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Nodes and all they depend on, but for masks of mixers: those are refused as such."""
    met: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in met:
            met.add(node)
            mixes = find_target(node) is not None
            pending.extend(_mixer_inputs(node).values() if mixes else node.all_input_nodes)
    return met


def _mixer_inputs(node: Node) -> dict[str, Node]:
    """Tensors that a mixer takes, by our names of them."""
    found = find_target(node)
    assert found is not None
    arguments = found[1].read(node)
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Node) and shape_of(value) and name != "mask"
    }
