"""Chunked gated delta rule on a forest: forward and hand-written backward, in blocks of chunks.

Shapes: T tokens, H heads, K and V head widths, I state rows, X = 1 or K decays a head; n chunks
of a block, b = n H, Q their padded size.

With `c` the sum of g from a chunk's entry along the path to a token, and E the state that enters
(Yang et al. 2024, section 3.3, with a tree where they have a sequence):
    (I + A) u = beta (v - (k e^c) E),  A_ij = beta_i k_i . e^(c_i - c_j) k_j, j a true ancestor
    o_i = (q_i e^(c_i)) E + sum_{j visible} (q_i . e^(c_i - c_j) k_j) u_j
    end = e^(c_last) E + sum_j (k_j e^(c_last - c_j)) u_j^T
In depth-first order A is strictly lower triangular for tiles of siblings, too. u is affine in E,
so a chunk maps E to `M E + S` with matrices M [K, K] and S [K, V].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from prefix_rewrite.ops.chunk_rows import (
    LEAST_EXPONENT,
    ChunkRows,
    compute_dtype,
    decay_between,
    new_rows,
)
from prefix_rewrite.ops.chunk_tree import ChunkBlock, ChunkTree, carry_down, carry_up
from prefix_rewrite.ops.tree_delta_rule.decays import ChannelDecay, HeadDecay

# Most elements of a block's [n, H, Q, Q] scores; on CPU they stay in the cache.
MAX_SCORES = {"cpu": 1 << 20}
MAX_SCORES_ELSEWHERE = 1 << 26


@dataclass(frozen=True)
class DeltaInputs:
    """q and k [T,H,K], v [T,H,V], g [T,H] or [T,H,K] log decay, at most 0, beta [T,H]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.q, self.k, self.v, self.g, self.beta)

    def blocks(self, tree: ChunkTree) -> list[DeltaBlock]:
        most = MAX_SCORES.get(self.q.device.type, MAX_SCORES_ELSEWHERE)
        return [DeltaBlock(self, chunks) for chunks in tree.blocks(most // (64 * self.q.shape[1]))]

    def new_states(self, tree: ChunkTree) -> torch.Tensor:
        """[I, H, K, V] zeros."""
        _, H, K = self.q.shape
        return self.v.new_zeros(tree.num_states, H, K, self.v.shape[2], dtype=self.dtype)


class DeltaBlock(ChunkRows):
    """One block of chunks: its inputs by head [b, Q, ..], its decays, its triangular system."""

    def __init__(self, inputs: DeltaInputs, chunks: ChunkBlock):
        super().__init__(chunks, len(inputs.q), inputs.dtype)
        self.inputs = inputs
        self.H = inputs.q.shape[1]

    def by_head(self, values: torch.Tensor) -> torch.Tensor:
        """[n, Q, H, ..] to [b, Q, ..], with a last dimension of 1 where there is none."""
        return values.reshape(self.n, self.Q, self.H, -1).transpose(1, 2).flatten(0, 1)

    def from_head(self, values: torch.Tensor) -> torch.Tensor:
        """[b, Q, X] to [n, Q, H, X]."""
        return values.view(self.n, self.H, self.Q, -1).transpose(1, 2)

    def along_paths(self, sums: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Sum values [b, Q, X] over the places that `sums` [n, Q, Q] picks."""
        flat = self.from_head(values).reshape(self.n, self.Q, -1)
        return self.by_head(torch.bmm(sums.to(flat.dtype), flat))

    @cached_property
    def q(self) -> torch.Tensor:
        return self.by_head(self.gather(self.inputs.q))

    @cached_property
    def k(self) -> torch.Tensor:
        return self.by_head(self.gather(self.inputs.k))

    @cached_property
    def v(self) -> torch.Tensor:
        return self.by_head(self.gather(self.inputs.v))

    @cached_property
    def beta(self) -> torch.Tensor:
        """[b, Q, 1], 0 at padding: nothing is written."""
        return self.by_head(self.gather_valid(self.inputs.beta))

    @cached_property
    def exponent(self) -> torch.Tensor:
        """[b, Q, X] base-2 logarithm of the decay from the chunk's entry through each token."""
        g = self.by_head(self.gather_valid(self.inputs.g)) * math.log2(math.e)
        return self.along_paths(self.chunks.visible, g.clamp_(min=LEAST_EXPONENT[g.dtype]))

    @cached_property
    def last_exponent(self) -> torch.Tensor:
        """[b, 1, X] the same, through the whole chunk."""
        c = self.exponent.view(self.n, self.H, self.Q, -1)
        rows = torch.arange(self.n, device=c.device)
        return c[rows, :, self.chunks.last].reshape(self.n * self.H, 1, -1)

    @cached_property
    def decay_in(self) -> torch.Tensor:
        """[b, Q, X] decay from the chunk's entry through each token."""
        return self.exponent.exp2()

    @cached_property
    def decay_out(self) -> torch.Tensor:
        """[b, Q, X] decay from after each token to the chunk's end."""
        return decay_between(self.exponent, self.last_exponent)

    @cached_property
    def decay(self) -> HeadDecay | ChannelDecay:
        if self.inputs.g.dim() == 2:
            return HeadDecay(self.exponent, self.chunks.visible)
        return ChannelDecay(self.exponent)

    @cached_property
    def key_scores(self) -> torch.Tensor:
        """[b, Q, Q] of a key with its true ancestors' keys."""
        return self.decay.scores(self.k, self.k).tril_(-1)

    @cached_property
    def query_scores(self) -> torch.Tensor:
        """[b, Q, Q]"""
        return self.decay.scores(self.q, self.k)

    @cached_property
    def _system(self) -> torch.Tensor:
        """A, [b, Q, Q]; the solver reads the unit diagonal of I + A as given."""
        return self.beta * self.key_scores

    def solve(self, right: torch.Tensor) -> torch.Tensor:
        """(I + A)^-1 right"""
        return torch.linalg.solve_triangular(self._system, right, upper=False, unitriangular=True)

    def solve_transposed(self, right: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(
            self._system.mT, right, upper=True, unitriangular=True
        )

    def entering(self, states: torch.Tensor) -> torch.Tensor | None:
        """[b, K, V] the states that enter the chunks, None where these are roots."""
        if self.chunks.parents is None:
            return None
        return states.index_select(0, self.chunks.parents).flatten(0, 1)

    def unwritten(self, entering: torch.Tensor | None) -> torch.Tensor:
        """[b, Q, V] v - (k e^c) E: what the chunk's entry does not know of each value."""
        if entering is None:
            return self.v
        return torch.baddbmm(self.v, self.k * self.decay_in, entering, alpha=-1)


def _compose(out: torch.Tensor, maps: torch.Tensor, states: torch.Tensor) -> None:
    """Add `maps @ states` to `out` in place."""
    out += maps @ states


def _end_states(
    inputs: DeltaInputs, tree: ChunkTree, blocks: list[DeltaBlock]
) -> tuple[torch.Tensor, torch.Tensor]:
    """End states of the inner chunks [I, H, K, V], and their maps M [I, H, K, K]."""
    states = inputs.new_states(tree)
    K = inputs.k.shape[2]
    maps = states.new_empty(*states.shape[:2], K, K)
    for block in blocks:
        rows = block.chunks.states
        if rows is None:
            continue
        right = torch.cat([block.v, block.k * block.decay_in], -1) * block.beta
        own, held = block.solve(right).split([block.v.shape[-1], K], -1)
        keys = (block.k * block.decay_out).mT
        states[rows] = torch.bmm(keys, own).view_as(states[rows])
        through = torch.bmm(keys, held).neg_()
        through.diagonal(dim1=1, dim2=2).add_(block.last_exponent.squeeze(1).exp2())
        maps[rows] = through.view_as(maps[rows])
    carry_down(states, maps, tree, _compose)
    return states, maps


def delta_forward(inputs: DeltaInputs, tree: ChunkTree) -> torch.Tensor:
    """Return o [T, H, V]."""
    blocks = inputs.blocks(tree)
    states, _ = _end_states(inputs, tree, blocks)
    out = new_rows(inputs.v, *inputs.v.shape[1:], dtype=inputs.dtype)
    for block in blocks:
        entering = block.entering(states)
        written = block.solve(block.beta * block.unwritten(entering))
        o = torch.bmm(block.query_scores, written)
        if entering is not None:
            o.baddbmm_(block.q * block.decay_in, entering)
        block.scatter(out, block.from_head(o))
    return out[:-1]


def delta_backward(
    grad: torch.Tensor, inputs: DeltaInputs, tree: ChunkTree
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, g and beta, in the type of compute, from that of o.

    Nothing but the inputs is kept from the forward: states are cheap to compute again.
    """
    blocks = inputs.blocks(tree)
    states, maps = _end_states(inputs, tree, blocks)
    grad_states = _end_state_grads(grad, inputs, tree, blocks, maps)
    given = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    grads = [new_rows(x, *x.shape[1:], dtype=inputs.dtype) for x in given]
    for block in blocks:
        rows = block.chunks.states
        dend = None if rows is None else grad_states[rows].flatten(0, 1)
        parts = _block_grads(block, grad, block.entering(states), dend)
        for out, part in zip(grads, parts, strict=True):
            block.scatter(out, block.from_head(part))
    return tuple(out[:-1] for out in grads)


def _end_state_grads(
    grad: torch.Tensor,
    inputs: DeltaInputs,
    tree: ChunkTree,
    blocks: list[DeltaBlock],
    maps: torch.Tensor,
) -> torch.Tensor:
    """Gradient of each inner chunk's end state, by all that descends from it."""
    grads = inputs.new_states(tree)
    for block in blocks:
        parents = block.chunks.parents
        if parents is None:
            continue
        do = block.by_head(block.gather_valid(grad))
        dright = block.solve_transposed(torch.bmm(block.query_scores.mT, do))
        read = torch.bmm((block.q * block.decay_in).mT, do)
        read.baddbmm_((block.k * block.decay_in * block.beta).mT, dright, alpha=-1)
        grads.index_add_(0, parents, read.view(block.n, *grads.shape[1:]))
    carry_up(grads, maps.mT, tree, _compose)
    return grads


def _block_grads(
    block: DeltaBlock,
    grad: torch.Tensor,
    entering: torch.Tensor | None,
    dend: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v, g, beta [b, Q, ..]; `dend` [b, K, V] is that of the end state."""
    q, k, beta, decay = block.q, block.k, block.beta, block.decay
    do = block.by_head(block.gather_valid(grad))
    unwritten = block.unwritten(entering)
    written = block.solve(beta * unwritten)

    # o = scores u + (q e^c) E
    dwritten = torch.bmm(block.query_scores.mT, do)
    if dend is not None:
        dwritten.baddbmm_(k * block.decay_out, dend)
    dscores = torch.bmm(do, written.mT)
    dq, dk, dsum = decay.scores_grad(dscores, q, k, block.query_scores)

    # (I + A) u = beta (v - (k e^c) E)
    dright = block.solve_transposed(dwritten)
    dsystem = torch.bmm(dright, written.mT).tril_(-1).neg_()
    dbeta = (dright * unwritten).sum(-1, keepdim=True)
    dbeta += (dsystem * block.key_scores).sum(-1, keepdim=True)
    dleft, dright_keys, dkeys_sum = decay.scores_grad(dsystem * beta, k, k, block.key_scores)
    dk, dsum = dk + dleft + dright_keys, dsum + dkeys_sum
    dv = beta * dright
    if entering is not None:
        dread = torch.bmm(do, entering.mT) * block.decay_in
        dheld = torch.bmm(dv, entering.mT).neg_() * block.decay_in
        dq, dk = dq + dread, dk + dheld
        dsum = dsum + decay.reduce(q * dread + k * dheld)

    # An exponent c_i holds the decays of all tokens that i sees; c_last - c_j those after j.
    dg = block.along_paths(block.chunks.visible.mT, dsum)
    if dend is not None:
        dkeys = torch.bmm(written, dend.mT) * block.decay_out
        dk = dk + dkeys
        dg += block.along_paths(block.chunks.visible.tril(-1), decay.reduce(k * dkeys))
        if entering is not None:
            through = decay.reduce((dend * entering).sum(-1).unsqueeze(1))
            dg += through * block.last_exponent.exp2()
    return dq, dk, dv, dg, dbeta
