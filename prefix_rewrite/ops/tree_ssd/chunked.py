"""Chunked Mamba-2 scan on a forest: forward and hand-written backward, in blocks of chunks.

Shapes: T tokens, H heads, P head width, G groups of R = H/G heads, N state width, I state rows;
n chunks of a block, Q their padded size.
States lie as [I, G, N, R*P], so that reading and writing them is one matrix product a group.

The state space dual form (Dao and Gu 2024, section 6), with `c` the sum of `a = dt A` from a
chunk's entry along the path to a token:
    y_i = sum_{j visible} exp(c_i - c_j) (C_i . B_j) dt_j x_j + exp(c_i) C_i E + D x_i
    end = sum_j exp(c_last - c_j) B_j (dt_j x_j)^T + exp(c_last) E
where E is the state that enters the chunk. No exponent is ever positive, since A is negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from prefix_rewrite.ops.chunk_tree import ChunkBlock, ChunkTree, carry_down, carry_up

# Most elements of a block's [n, H, Q, Q] weights; on CPU they stay in the cache.
MAX_WEIGHTS = {"cpu": 1 << 20}
MAX_WEIGHTS_ELSEWHERE = 1 << 26

# Below it exp2 is exactly 0, so a token that forgets all before it keeps the sums small.
LEAST_EXPONENT = {torch.float32: -150.0, torch.float64: -1080.0}


@dataclass(frozen=True)
class SsdInputs:
    """The scan's inputs: x [T,H,P], dt [T,H], A [H], B and C [T,G,N], D [H], [H,P] or None."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """The type of compute, of states and of the output: fp32, or fp64 if any input is."""
        return compute_dtype(self.x, self.dt, self.A, self.B, self.C, self.D)

    def blocks(self, tree: ChunkTree) -> list[Block]:
        most = MAX_WEIGHTS.get(self.x.device.type, MAX_WEIGHTS_ELSEWHERE)
        return [Block(self, chunks) for chunks in tree.blocks(most // (64 * self.x.shape[1]))]

    def new_states(self, tree: ChunkTree) -> torch.Tensor:
        """[I, G, N, R*P] zeros."""
        G, N = self.B.shape[1:]
        width = self.x.shape[1] * self.x.shape[2] // G
        return self.x.new_zeros(tree.num_states, G, N, width, dtype=self.dtype)

    def new_rows(self, *shape: int) -> torch.Tensor:
        """[T + 1, ...]: padding is written to the last row, which is dropped in the end."""
        return self.x.new_empty(self.x.shape[0] + 1, *shape, dtype=self.dtype)


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    is_double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if is_double else torch.float32


class Block:
    """One block of chunks: its inputs gathered, its decays, its share of each result."""

    def __init__(self, inputs: SsdInputs, chunks: ChunkBlock):
        self.inputs, self.chunks = inputs, chunks
        self.n, self.Q = chunks.tokens.shape
        self.H, self.P = inputs.x.shape[1:]
        self.G, self.N = inputs.B.shape[1:]
        self.tokens = chunks.tokens.reshape(-1)
        if chunks.ragged:
            dump = torch.full_like(chunks.tokens, len(inputs.x))
            self.targets = torch.where(chunks.valid, chunks.tokens, dump).reshape(-1)
        else:
            self.targets = self.tokens

    # Layouts: [n, Q, H, P] by token, [n*H, Q, P] by head, [n*G, Q, R*P] by group.

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] to [n, Q, ...] in the type of compute."""
        picked = rows.index_select(0, self.tokens).to(self.inputs.dtype)
        return picked.view(self.n, self.Q, *rows.shape[1:])

    def gather_grad(self, rows: torch.Tensor) -> torch.Tensor:
        """The same, 0 at padding."""
        picked = self.gather(rows)
        if self.chunks.ragged:
            picked.masked_fill_(~self.chunks.valid[..., None, None], 0)
        return picked

    def scatter(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """[n, Q, ...] to the block's rows of [T + 1, ...]."""
        out.index_copy_(0, self.targets, values.reshape(-1, *out.shape[1:]))

    def by_group(self, values: torch.Tensor) -> torch.Tensor:
        grouped = values.reshape(self.n, self.Q, self.G, -1).transpose(1, 2)
        return grouped.reshape(self.n * self.G, self.Q, -1)

    def by_head(self, values: torch.Tensor) -> torch.Tensor:
        return values.transpose(1, 2).reshape(self.n * self.H, self.Q, self.P)

    def from_group(self, values: torch.Tensor, *shape: int) -> torch.Tensor:
        grouped = values.view(self.n, self.G, self.Q, -1).transpose(1, 2)
        return grouped.reshape(self.n, self.Q, *shape)

    def from_head(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(self.n, self.H, self.Q, self.P).transpose(1, 2)

    @cached_property
    def dt(self) -> torch.Tensor:
        """[n, Q, H], 0 at padding: decay 1 and no input."""
        return self.gather(self.inputs.dt) * self.chunks.valid[..., None]

    @cached_property
    def exponent(self) -> torch.Tensor:
        """[n, Q, H] base-2 logarithm of the decay from the chunk's entry through each token."""
        # NOTE [Base 2]: exp2 is vectorised for all values; exp takes 5 to 30 times longer where
        # the result is subnormal or the exponent is -inf, as in half of each weight matrix.
        a = self.dt * (self.inputs.A.to(self.inputs.dtype) * math.log2(math.e))
        a.clamp_(min=LEAST_EXPONENT[a.dtype])
        return torch.bmm(self.chunks.visible.to(a.dtype), a)

    @cached_property
    def last_exponent(self) -> torch.Tensor:
        """[n, 1, H] the same, through the whole chunk."""
        rows = torch.arange(self.n, device=self.tokens.device)
        return self.exponent[rows, self.chunks.last].unsqueeze(1)

    @cached_property
    def decay_in(self) -> torch.Tensor:
        """[n, Q, H, 1] decay from the chunk's entry through each token."""
        return self.exponent.exp2().unsqueeze(-1)

    @cached_property
    def decay_out(self) -> torch.Tensor:
        """[n, Q, H, 1] decay from after each token to the chunk's end."""
        return (self.last_exponent - self.exponent).clamp_(max=0).exp2_().unsqueeze(-1)

    def state_decay(self) -> torch.Tensor:
        """[n, G, 1, R*P] decay of a state through the whole chunk."""
        decay = self.last_exponent.exp2().repeat_interleave(self.P, dim=2)
        return decay.view(self.n, self.G, 1, -1)

    def decays(self) -> torch.Tensor:
        """[n, H, Q, Q] decay from after the key to the query, 0 where the key is not visible."""
        c = self.exponent.transpose(1, 2).contiguous()
        exponents = c[..., :, None] - c[..., None, :]
        hidden = torch.zeros_like(self.chunks.visible, dtype=c.dtype)
        hidden.masked_fill_(~self.chunks.visible, -torch.inf)
        return torch.minimum(exponents, hidden[:, None], out=exponents).exp2_()

    def own_states(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write what the chunks add to their end states: [n, G, N, R*P]."""
        B = self.by_group(self.gather(self.inputs.B))
        inflow = self.by_group(x * (self.decay_out * self.dt[..., None]))
        torch.bmm(B.mT, inflow, out=out.view(self.n * self.G, self.N, -1))

    def entering(self, states: torch.Tensor) -> torch.Tensor:
        """[n*G, N, R*P] the states that enter the chunks."""
        assert self.chunks.parents is not None
        return states.index_select(0, self.chunks.parents).view(self.n * self.G, self.N, -1)


def _end_states(
    inputs: SsdInputs, tree: ChunkTree, blocks: list[Block]
) -> tuple[torch.Tensor, torch.Tensor]:
    """End states of the inner chunks [I, G, N, R*P] and their decays [I, G, 1, R*P]."""
    states = inputs.new_states(tree)
    decay = torch.empty_like(states[:, :, :1])
    for block in blocks:
        rows = block.chunks.states
        if rows is not None:
            block.own_states(block.gather(inputs.x), states[rows])
            decay[rows] = block.state_decay()
    carry_down(states, decay, tree)
    return states, decay


def scan_forward(inputs: SsdInputs, tree: ChunkTree) -> torch.Tensor:
    """Return y [T, H, P]."""
    blocks = inputs.blocks(tree)
    states, _ = _end_states(inputs, tree, blocks)
    out = inputs.new_rows(*inputs.x.shape[1:])
    for block in blocks:
        x = block.gather(inputs.x)
        B, C = (block.by_group(block.gather(t)) for t in (inputs.B, inputs.C))
        scores = torch.bmm(C, B.mT).view(block.n, block.G, 1, block.Q, block.Q)
        weights = block.decays().view(block.n, block.G, -1, block.Q, block.Q).mul_(scores)
        weights = weights.view(-1, block.Q, block.Q)
        y = block.from_head(torch.bmm(weights, block.by_head(x * block.dt[..., None])))
        if block.chunks.parents is not None:
            read = block.from_group(torch.bmm(C, block.entering(states)), block.H, block.P)
            y = torch.addcmul(y, read, block.decay_in)
        if inputs.D is not None:
            y = torch.addcmul(y, x, _rows(inputs.D, inputs.dtype))
        block.scatter(out, y)
    return out[:-1]


def scan_backward(
    grad: torch.Tensor, inputs: SsdInputs, tree: ChunkTree
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, dt, A, B, C, D, in their own types, from that of y.

    Nothing but the inputs is kept from the forward: states are cheap to compute again.
    """
    blocks = inputs.blocks(tree)
    states, decay = _end_states(inputs, tree, blocks)
    grad_states = _end_state_grads(grad, inputs, tree, blocks, decay)
    H, P = inputs.x.shape[1:]
    dx, da, du = inputs.new_rows(H, P), inputs.new_rows(H), inputs.new_rows(H)
    dB, dC = (inputs.new_rows(*inputs.B.shape[1:]) for _ in range(2))
    dD = torch.zeros(H, P, dtype=inputs.dtype, device=grad.device)
    for block in blocks:
        x, dy = block.gather(inputs.x), block.gather_grad(grad)
        dinput, da_block, dB_block, dC_block = _block_grads(block, x, dy, states, grad_states)
        block.scatter(da, da_block)
        block.scatter(du, (x * dinput).sum(-1))
        block.scatter(dB, dB_block)
        block.scatter(dC, dC_block)
        dinput.mul_(block.dt[..., None])
        if inputs.D is not None:
            dinput.addcmul_(dy, _rows(inputs.D, inputs.dtype))
            dD += (dy * x).sum((0, 1))
        block.scatter(dx, dinput)
    A, dt = inputs.A.to(inputs.dtype), inputs.dt.to(inputs.dtype)
    da, du = da[:-1], du[:-1]
    grads = (dx[:-1], du + A * da, (dt * da).sum(0), dB[:-1], dC[:-1])
    given = (inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C)
    out: list[torch.Tensor | None] = [g.to(t.dtype) for g, t in zip(grads, given, strict=True)]
    if inputs.D is None:
        return (*out, None)
    return (*out, (dD if inputs.D.dim() == 2 else dD.sum(1)).to(inputs.D.dtype))


def _end_state_grads(
    grad: torch.Tensor,
    inputs: SsdInputs,
    tree: ChunkTree,
    blocks: list[Block],
    decay: torch.Tensor,
) -> torch.Tensor:
    """Gradient of each inner chunk's end state, by all that descends from it."""
    grads = inputs.new_states(tree)
    for block in blocks:
        parents = block.chunks.parents
        if parents is not None:
            C = block.by_group(block.gather(inputs.C))
            read = block.by_group(block.gather_grad(grad) * block.decay_in)
            grads.index_add_(0, parents, torch.bmm(C.mT, read).view(block.n, *grads.shape[1:]))
    carry_up(grads, decay, tree)
    return grads


def _block_grads(
    block: Block,
    x: torch.Tensor,
    dy: torch.Tensor,
    states: torch.Tensor,
    grad_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of dt x [n,Q,H,P], of a = dt A [n,Q,H], of B and of C [n,Q,G,N]."""
    n, Q, H, G, N = block.n, block.Q, block.H, block.G, block.N
    B, C = (block.by_group(block.gather(t)) for t in (block.inputs.B, block.inputs.C))
    visible = block.chunks.visible.to(x.dtype)

    # Inside the chunk.
    scores = torch.bmm(C, B.mT).view(n, G, 1, Q, Q)
    decays = block.decays().view(n, G, -1, Q, Q)
    dy_heads = block.by_head(dy)
    weights = (decays * scores).view(n * H, Q, Q)
    dinput = block.from_head(torch.bmm(weights.mT, dy_heads))
    dweights = torch.bmm(dy_heads, block.by_head(x * block.dt[..., None]).mT)
    dscaled = dweights.view(n, G, -1, Q, Q).mul_(decays)
    dscores = dscaled.sum(2).view(n * G, Q, Q)
    dB, dC = torch.bmm(dscores.mT, C), torch.bmm(dscores, B)
    # NOTE [Decay gradients]: a pair (query i, key j) holds the decays of the tokens after j, up
    # to i. The pair i = j holds none and would cancel; it is left out, since its rounding could
    # outweigh all others where the decay is strong.
    dexponents = dscaled.mul_(scores).view(n, H, Q, Q)
    dexponents.diagonal(dim1=2, dim2=3).zero_()
    dsum = (dexponents.sum(3) - dexponents.sum(2)).transpose(1, 2)

    # From the entering state and to the end state.
    entering = None
    if block.chunks.parents is not None:
        entering = block.entering(states)
        read = dy * block.decay_in
        dsum = dsum + (read * block.from_group(torch.bmm(C, entering), H, -1)).sum(-1)
        dC.baddbmm_(block.by_group(read), entering.mT)
    da = torch.bmm(visible.mT, dsum)
    if block.chunks.states is not None:
        dend = grad_states[block.chunks.states]
        flat = dend.view(n * G, N, -1)
        dinflow = block.from_group(torch.bmm(B, flat), H, -1) * block.decay_out
        dinput = dinput + dinflow
        inflow = x * block.dt[..., None]
        dB.baddbmm_(block.by_group(inflow * block.decay_out), flat.mT)
        da += torch.bmm(visible.tril(-1), (inflow * dinflow).sum(-1))
        if entering is not None:
            through = (dend * entering.view_as(dend)).view(n, G, N, -1, block.P).sum((2, 4))
            da += (through.view(n, H) * block.last_exponent.squeeze(1).exp2())[:, None]
    return dinput, da, block.from_group(dB, G, N), block.from_group(dC, G, N)


def _rows(D: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[H] or [H, P] to [H, 1] or [H, P]."""
    D = D.to(dtype)
    return D[:, None] if D.dim() == 1 else D
