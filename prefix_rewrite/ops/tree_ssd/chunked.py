"""Chunked Mamba-2 scan on a forest: forward and hand-written backward, in blocks of chunks.

Shapes: T tokens, G groups of R heads (H = G*R), P head width, N state width, I state rows;
n chunks of a block, Q their padded size. Inside a block all is [n, G, R, Q, ..], with R = 1 for
what the heads of a group share; states are [I, G, R, N, P].

The state space dual form (Dao and Gu 2024, section 6), with `c` the sum of `a = dt A` from a
chunk's entry along the path to a token, and `u = dt x`:
    y_i = sum_{j visible} exp(c_i - c_j) (C_i . B_j) u_j + exp(c_i) C_i E + D x_i
    end = sum_j exp(c_last - c_j) B_j u_j^T + exp(c_last) E
where E is the state that enters the chunk. No exponent is ever positive, since A is negative.
"""

from __future__ import annotations

import torch

from prefix_rewrite.ops.chunk_tree import ChunkTree, carry_down, carry_up
from prefix_rewrite.ops.tree_ssd.block import Block, SsdInputs


def scan_forward(inputs: SsdInputs, tree: ChunkTree) -> torch.Tensor:
    """Return y [T, H, P]."""
    blocks = list(inputs.blocks(tree))
    states, _ = _end_states(inputs, tree, blocks)
    out = inputs.new_rows(*inputs.x.shape[1:])
    for block in blocks:
        x = block.gather(inputs.x)
        B, C = block.groups(inputs.B), block.groups(inputs.C)
        y = block.decays().mul_(C @ B.mT) @ block.inflow(x)
        if block.chunks.parents is not None:
            add_product(y, C * block.decay_in, block.entering(states))
        y = block.by_token(y)
        if inputs.D is not None:
            y = torch.addcmul(y, x, inputs.D_rows, out=torch.empty_like(x))
        block.scatter(out, y)
    return out[:-1]


def scan_backward(
    grad: torch.Tensor, inputs: SsdInputs, tree: ChunkTree
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, dt, A, B, C, D, in the type of compute, from that of y.

    Nothing but the inputs is kept from the forward: states are cheap to compute again.
    """
    blocks = list(inputs.blocks(tree))
    states, decay = _end_states(inputs, tree, blocks)
    grad_states = _end_state_grads(grad, inputs, tree, blocks, decay)
    H, P = inputs.x.shape[1:]
    dx, ddt, da = inputs.new_rows(H, P), inputs.new_rows(H), inputs.new_rows(H)
    dB, dC = (inputs.new_rows(*inputs.B.shape[1:]) for _ in range(2))
    dD = None if inputs.D is None else dx.new_zeros(H, P)
    for block in blocks:
        x, dy = block.gather(inputs.x), block.gather_valid(grad)
        du, da_block, dB_block, dC_block = _block_grads(block, x, dy, states, grad_states)
        du = block.by_token(du)
        block.scatter(ddt, (x * du).sum(-1))
        block.scatter(da, block.by_token(da_block))
        block.scatter(dB, block.by_token(dB_block))
        block.scatter(dC, block.by_token(dC_block))
        dx_block = torch.mul(du, block.dt[..., None], out=torch.empty_like(x))
        if dD is not None:
            dx_block.addcmul_(dy, inputs.D_rows)
            dD += (dy * x).sum((0, 1))
        block.scatter(dx, dx_block)
    da = da[:-1]
    ddt = torch.addcmul(ddt[:-1], inputs.A.to(da.dtype), da)
    dA = (inputs.dt.to(da.dtype) * da).sum(0)
    if dD is not None and inputs.D is not None and inputs.D.dim() == 1:
        dD = dD.sum(1)
    return dx[:-1], ddt, dA, dB[:-1], dC[:-1], dD


def _end_states(
    inputs: SsdInputs, tree: ChunkTree, blocks: list[Block]
) -> tuple[torch.Tensor, torch.Tensor]:
    """End states of the inner chunks [I, G, R, N, P], and their decays [I, G, R, 1, 1]."""
    states = inputs.new_states(tree)
    decay = states.new_empty(*states.shape[:3], 1, 1)
    for block in blocks:
        rows = block.chunks.states
        if rows is not None:
            weighted = block.groups(inputs.B) * block.decay_out
            torch.matmul(weighted.mT, block.inflow(block.gather(inputs.x)), out=states[rows])
            decay[rows] = block.decay_through
    carry_down(states, decay, tree)
    return states, decay


def _end_state_grads(
    grad: torch.Tensor,
    inputs: SsdInputs,
    tree: ChunkTree,
    blocks: list[Block],
    decay: torch.Tensor,
) -> torch.Tensor:
    """Gradient of each inner chunk's end state, by all that descends from it."""
    grads = torch.zeros_like(inputs.new_states(tree))
    for block in blocks:
        if block.chunks.parents is not None:
            weighted = block.groups(inputs.C) * block.decay_in
            read = weighted.mT @ block.by_head(block.gather_valid(grad))
            grads.index_add_(0, block.chunks.parents, read)
    carry_up(grads, decay, tree)
    return grads


def _block_grads(
    block: Block,
    x: torch.Tensor,
    dy: torch.Tensor,
    states: torch.Tensor,
    grad_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of u [n,G,R,Q,P], a [n,G,R,Q], B and C [n,G,1,Q,N]."""
    B, C = block.groups(block.inputs.B), block.groups(block.inputs.C)
    u, dy = block.inflow(x), block.by_head(dy)

    # Inside the chunk.
    scores, decays = C @ B.mT, block.decays()
    du = (decays * scores).mT @ dy
    dweights = (dy @ u.mT).mul_(decays)
    dscores = dweights.sum(2, keepdim=True)
    dB, dC = dscores.mT @ C, dscores @ B
    da = block.sum_over_pairs(dweights.mul_(scores))

    # From the entering state and to the end state.
    entering = None
    if block.chunks.parents is not None:
        entering = block.entering(states)
        read = (dy @ entering.mT).mul_(block.decay_in)
        dC += read.sum(2, keepdim=True)
        da += block.sum_over_descendants(read.mul_(C).sum(-1))
    if block.chunks.states is not None:
        dend = grad_states[block.chunks.states]
        add_product(du, B * block.decay_out, dend)
        written = (u @ dend.mT).mul_(block.decay_out)
        dB += written.sum(2, keepdim=True)
        da += block.sum_over_ancestors(written.mul_(B).sum(-1))
        if entering is not None:
            da += ((dend * entering).sum((3, 4)) * block.decay_through[..., 0, 0])[..., None]
    return du, da, dB, dC


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add `a @ b` to `out` in place, [n, G, R, ..] each."""
    out.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))
