"""Whether a head may be run at the end of the graph instead of where it stands.

The head's ops are copied to the graph's end, on the edges' rows. That is the same thing unless
what they read is changed in place in between, or they stand in a block of another mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from prefix_rewrite.errors import Finding
from prefix_rewrite.passes.locality_call import read_op, storage_of
from prefix_rewrite.passes.nodes import module_path, source_line

set_grad_enabled = torch._C._set_grad_enabled
enter_autocast, exit_autocast = torch.amp._enter_autocast, torch.amp._exit_autocast
MODES = frozenset({set_grad_enabled, enter_autocast, exit_autocast})


def move_findings(nodes: Sequence[Node], sources: set[Node]) -> Iterator[Finding]:
    """Look at everything between a head, given in graph order, and the end of the graph."""
    if not nodes:
        return
    read = {storage_of(node) for node in (*nodes, *sources)}
    blocks: set[object] = set()  # autocast blocks that are open, and 'no_grad'
    inside, met = set(nodes), False
    for node in nodes[0].graph.nodes:
        _follow_modes(node, blocks)
        met = met or node in inside
        if node in inside:
            if blocks:
                yield _at(
                    node,
                    "the logits are made in an autocast or no_grad block of the model's own",
                    "open the block around the whole model",
                )
                return
        elif met and _changes(node, read):
            yield _at(
                node,
                f"{read_op(node)[0]} changes the logits, or what they are made of, in place",
                "make a new tensor, by where() or masked_fill() for example",
            )


def _changes(node: Node, storages: set[Node]) -> bool:
    """Say whether an op changes one of some tensors in place."""
    in_place = node.op.startswith("call") and read_op(node)[1]
    return in_place and storage_of(node.all_input_nodes[0]) in storages


def _follow_modes(node: Node, blocks: set[object]) -> None:
    if node.target is enter_autocast:
        blocks.add(node)
    elif node.target is exit_autocast:
        blocks.discard(node.args[0])
    elif node.target is set_grad_enabled:
        blocks.discard("no_grad") if node.args[0] else blocks.add("no_grad")


def _at(node: Node, what: str, remedy: str) -> Finding:
    return Finding(what, remedy, module_path(node), source_line(node))
