"""Replace causal convolutions and Mamba-2 scans by their tree ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from prefix_rewrite.ops.tree_conv import tree_conv
from prefix_rewrite.ops.tree_ssd import tree_ssd
from prefix_rewrite.passes.context import PassContext, PassReport


def _conv_arguments(call: dict[str, Any], plan: Any) -> tuple[Any, ...]:
    return (call["x"], call["weight"], call["bias"], *plan, call["activation"] != "")


def _ssd_arguments(call: dict[str, Any], plan: Any) -> tuple[Any, ...]:
    tensors = (call[name] for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"))
    return (*tensors, *plan, call["dt_softplus"], call["dt_min"], call["dt_max"])


_TREE_OPS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]] = {
    "conv": (tree_conv, _conv_arguments),
    "ssd": (tree_ssd, _ssd_arguments),
}


def replace_mamba(graph_module: GraphModule, context: PassContext) -> PassReport:
    """Every tree op returns what the call it replaces returned."""
    counts: Counter[str] = Counter()
    for call in context.checked_census.mixers:
        if call.target.kind not in _TREE_OPS:
            continue
        op, arguments = _TREE_OPS[call.target.kind]
        graph = call.node.graph
        with graph.inserting_before(call.node):
            out = graph.call_function(op, arguments(call.arguments, context.plan_of(call.node)))
        out.meta = dict(call.node.meta)
        call.node.replace_all_uses_with(out)
        graph.erase_node(call.node)
        counts[call.target.kind] += 1
    return PassReport("replace_mamba", counts)
