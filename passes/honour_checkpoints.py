"""Run checkpointed sub-graphs under `torch.utils.checkpoint`, where no compiler would do it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from prefix_rewrite.passes.context import PassContext, PassReport
from prefix_rewrite.passes.nodes import walk


def honour_checkpoints(graph_module: GraphModule, context: PassContext) -> PassReport:
    """Compilers partition the checkpoint op themselves; eager mode gets the plain function."""
    counts: Counter[str] = Counter()
    if context.backend == "eager":
        for _, node in walk(graph_module):
            if node.target is torch.ops.higher_order.tag_activation_checkpoint:
                node.target = run_checkpointed
                node.kwargs = {}
                counts["checkpoint"] += 1
    return PassReport("honour_checkpoints", counts)


def run_checkpointed(sub_graph: GraphModule, *inputs: Any) -> Any:
    """Non-reentrant whatever the model asked for: same numbers, and gradients always flow."""
    return checkpoint(sub_graph, *inputs, use_reentrant=False)
