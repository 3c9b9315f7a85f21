"""Recurrences with an elementwise decay, `h_t = decay_t * h_{t-1} + inflow_t`, down a forest.

A decay of its own for every element of the state has no matrix form inside a chunk. Chunks are
scanned place by place instead, all chunks of a block at once: once from zero for the end states
of the inner chunks, and, after these are carried down the chunk tree, once more from the states
that enter. The backward does the same in reverse.

Shapes: T tokens, I inner chunks, n chunks of a block, Q their padded size, [...] the state's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from prefix_rewrite.ops.chunk_tree import ChunkBlock, ChunkTree, carry_down, carry_up

# Most elements of all the states of a block, [Q, n, ...], that the backward keeps at a time.
MAX_STATES = 1 << 25


class Place(Protocol):
    """One place of a block of chunks: n tokens, none of which follows another.

    At padding the decay is 1, and inflow, reads and gradients are 0.
    """

    def decay(self) -> torch.Tensor:
        """[n, ...]"""

    def inflow(self) -> torch.Tensor:
        """[n, ...]"""

    def read(self, state: torch.Tensor) -> None:
        """Write the tokens' outputs, given their states [n, ...]."""

    def state_grad(self) -> torch.Tensor:
        """[n, ...] gradient of the tokens' states by their own outputs."""

    def collect(
        self, before: torch.Tensor, state: torch.Tensor, decay: torch.Tensor, grad: torch.Tensor
    ) -> None:
        """Write the gradients of the tokens' inputs.

        Args:
            before, state: [n, ...] states before and at the tokens.
            decay: [n, ...] as `decay` gave it.
            grad: [n, ...] gradient of `state` by all that comes of it.
        """


class Recurrence(Protocol):
    """An op's recurrence over its inputs and outputs, which it holds."""

    def new_states(self, count: int) -> torch.Tensor:
        """[count, ...] zeros."""

    def place(self, block: ChunkBlock, index: int) -> Place:
        """Return one place of a block, `0 <= index < Q`."""


def scan_forward(recurrence: Recurrence, tree: ChunkTree) -> None:
    """Write every token's output."""
    states, _ = _end_states(recurrence, tree)
    for block in _blocks(recurrence, tree):
        state = _entering(recurrence, block, states)
        for place in _places(recurrence, block):
            state = torch.addcmul(place.inflow(), place.decay(), state)
            place.read(state)


def scan_backward(recurrence: Recurrence, tree: ChunkTree) -> None:
    """Write every gradient; nothing but the inputs is kept from the forward."""
    states, decays = _end_states(recurrence, tree)
    grads = _end_state_grads(recurrence, tree, decays)
    for block in _blocks(recurrence, tree):
        path = [_entering(recurrence, block, states)]
        places = list(_places(recurrence, block))
        for place in places:
            path.append(torch.addcmul(place.inflow(), place.decay(), path[-1]))
        carried = None if block.states is None else grads[block.states]
        for place in reversed(places):
            state = path.pop()
            grad = place.state_grad()
            if carried is not None:
                grad = grad + carried
            decay = place.decay()
            place.collect(path[-1], state, decay, grad)
            carried = grad * decay


def _blocks(recurrence: Recurrence, tree: ChunkTree) -> Iterator[ChunkBlock]:
    return tree.blocks(MAX_STATES // max(1, recurrence.new_states(1).numel()))


def _places(recurrence: Recurrence, block: ChunkBlock) -> Iterator[Place]:
    return (recurrence.place(block, index) for index in range(block.tokens.shape[1]))


def _entering(recurrence: Recurrence, block: ChunkBlock, states: torch.Tensor) -> torch.Tensor:
    """[n, ...] states before the chunks' first tokens."""
    if block.parents is None:
        return recurrence.new_states(len(block.tokens))
    return states.index_select(0, block.parents)


def _end_states(recurrence: Recurrence, tree: ChunkTree) -> tuple[torch.Tensor, torch.Tensor]:
    """End states of the inner chunks [I, ...], and their decays [I, ...] through the chunk."""
    states = recurrence.new_states(tree.num_states)
    decays = torch.ones_like(states)
    for block in _blocks(recurrence, tree):
        if block.states is None:
            continue
        own, through = states[block.states], decays[block.states]
        for place in _places(recurrence, block):
            decay = place.decay()
            own.mul_(decay).add_(place.inflow())
            through.mul_(decay)
    carry_down(states, decays, tree)
    return states, decays


def _end_state_grads(
    recurrence: Recurrence, tree: ChunkTree, decays: torch.Tensor
) -> torch.Tensor:
    """Gradient of each inner chunk's end state [I, ...], by all that descends from it."""
    grads = recurrence.new_states(tree.num_states)
    for block in _blocks(recurrence, tree):
        if block.parents is None:
            continue
        carried = recurrence.new_states(len(block.tokens))
        for place in reversed(list(_places(recurrence, block))):
            carried.add_(place.state_grad()).mul_(place.decay())
        grads.index_add_(0, block.parents, carried)
    carry_up(grads, decays, tree)
    return grads
