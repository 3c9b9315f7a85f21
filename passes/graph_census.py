"""Count what the captured graph holds, before anything is changed."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from prefix_rewrite.passes.context import Census, MixerCall, PassContext, PassReport
from prefix_rewrite.passes.head import read_head
from prefix_rewrite.passes.nodes import module_path, shape_of, source_line, walk
from prefix_rewrite.targets import find_target

leaf = torch.ops.prefix_rewrite


def graph_census(graph_module: GraphModule, context: PassContext) -> PassReport:
    """Find the mixers, the token count, the vocabulary and the head; change nothing."""
    bind = find_leaf(graph_module, leaf.leaf_bind)
    project = find_leaf(graph_module, leaf.leaf_project)
    tokens = shape_of(bind.args[0])[1]
    head = read_head(project.args[0], tokens)
    census = Census(
        tokens=tokens,
        vocab_size=head.vocab_size,
        num_embeddings=_num_embeddings(graph_module, bind, head.vocab_size),
        project=project,
        head=head,
    )
    for _, node in walk(graph_module):
        found = find_target(node)
        if found is not None:
            target, signature = found
            census.mixers.append(
                MixerCall(target, node, signature.read(node), module_path(node), source_line(node))
            )
    context.census = census
    return PassReport("graph_census", Counter())


def find_leaf(graph_module: GraphModule, op: object) -> Node:
    """Return the one call of a leaf op that the traced entry makes itself."""
    calls = [node for node in graph_module.graph.nodes if node.target is op]
    assert len(calls) == 1, f"expected one {op}, got {len(calls)}"
    return calls[0]


def _num_embeddings(graph_module: GraphModule, bind: Node, vocab_size: int) -> int:
    """Rows of the smallest table that token ids index; the vocabulary where there is none."""
    tables = [
        int(shape_of(node.args[1])[0])
        for node in graph_module.graph.nodes
        if node.target is F.embedding and node.args[0] is bind
    ]
    return min(tables, default=vocab_size)
