"""Causal convolution on a forest by shifted adds: forward and hand-written backward.

In depth-first order most tokens directly follow their path predecessor, so the taps are shifts of
the whole array. The few tokens within reach of a jump (a token whose predecessor lies elsewhere)
are computed again from their gathered predecessors. All of it runs in blocks of tokens that fit
the cache.

Shapes: T tokens, C channels, W taps, J jumps, F tokens to repair; n tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from prefix_rewrite.plan import PlanView, register_field

JUMPS = register_field("conv_jumps", "device")
STRETCHES = register_field("conv_stretches", "host")
PARENT = register_field("conv_parent", "device")

# Most elements [n, C] of a block; on CPU they stay in the cache.
MAX_ELEMENTS = {"cpu": 1 << 18}
MAX_ELEMENTS_ELSEWHERE = 1 << 28


@dataclass(frozen=True)
class ConvBlock:
    """Tokens lo..hi, and those of them to repair.

    Attributes:
        rows: [f] places in the block of the tokens to repair.
        sources: [W-1, f] their predecessors, nearest first; 0 where there is none.
        exists: [W-1, f, 1] whether there is one.
    """

    lo: int
    hi: int
    rows: torch.Tensor
    sources: torch.Tensor
    exists: torch.Tensor


class ConvInputs:
    """The inputs of a convolution, x [T,C], weight [C,W], bias [C] or None, ready for blocks."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
        self.dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float)
        self.x = x if x.stride(1) == 1 else x.contiguous()
        self.taps = weight.to(self.dtype).t().flip(0).contiguous()  # [W, C], nearest first
        self.bias = self.taps.new_zeros(()) if bias is None else bias.to(self.dtype)
        self.W = len(self.taps)

    def blocks(self, host_plan: torch.Tensor, device_plan: torch.Tensor) -> list[ConvBlock]:
        T, C = self.x.shape
        most = MAX_ELEMENTS.get(self.x.device.type, MAX_ELEMENTS_ELSEWHERE)
        step = max(self.W, most // max(C, 1))
        starts = list(range(0, T, step))
        tokens, sources = _repairs(PlanView(host_plan, device_plan), self.W)
        edges = torch.tensor([*starts, T], device=tokens.device)
        cuts = torch.searchsorted(tokens, edges).tolist()
        exists = (sources < T).unsqueeze(-1)
        sources = sources.where(sources < T, 0)
        return [
            ConvBlock(lo, min(lo + step, T), tokens[a:b] - lo, sources[:, a:b], exists[:, a:b])
            for lo, a, b in zip(starts, cuts[:-1], cuts[1:], strict=True)
        ]

    def shifts(self, block: ConvBlock) -> Iterator[tuple[int, torch.Tensor]]:
        """For each distance: its first place in the block, and x from there on, shifted."""
        halo = min(self.W - 1, block.lo)
        x = self.x[block.lo - halo : block.hi].to(self.dtype)
        for distance in range(self.W):
            first = max(0, distance - halo)
            yield first, x[halo - distance + first : max(0, len(x) - distance)]

    def repairs(self, block: ConvBlock) -> Iterator[torch.Tensor]:
        """For each distance from 1: the gathered predecessors [f, C], 0 before the root."""
        if not len(block.rows):
            return
        for sources, exists in zip(block.sources, block.exists, strict=True):
            x = self.x.index_select(0, sources).to(self.dtype)
            yield x.where(exists, 0)

    def convolve(self, block: ConvBlock) -> torch.Tensor:
        """[n, C] before the activation."""
        y = torch.empty(())
        for distance, (first, x) in enumerate(self.shifts(block)):
            if distance == 0:
                y = own = torch.addcmul(self.bias, x, self.taps[0])
                repaired = own.index_select(0, block.rows)
            else:
                y[first:].addcmul_(x, self.taps[distance])
        for distance, x in enumerate(self.repairs(block), 1):
            repaired.addcmul_(x, self.taps[distance])
        return y.index_copy_(0, block.rows, repaired)


def _repairs(plan: PlanView, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [F], ascending, within reach of a jump, and their predecessors [W-1, F] (T: none)."""
    jumps, stretches, parent = plan[JUMPS], plan[STRETCHES], plan[PARENT]
    # Stretches are sorted by length, longest first: those longer than k are the first ones.
    counts = [int((stretches > k).sum()) for k in range(width - 1)]
    tokens = torch.cat([jumps[:0], *(jumps[:count] + k for k, count in enumerate(counts))])
    tokens = tokens.sort().values
    sources = []
    source = tokens
    for _ in range(width - 1):
        source = parent[source]
        sources.append(source)
    return tokens, torch.stack(sources) if sources else tokens.new_empty(0, len(tokens))


def conv_forward(
    inputs: ConvInputs, silu: bool, host_plan: torch.Tensor, device_plan: torch.Tensor
) -> torch.Tensor:
    """Return y [T, C] in the type of x."""
    out = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    for block in inputs.blocks(host_plan, device_plan):
        y = inputs.convolve(block)
        out[block.lo : block.hi] = F.silu(y, inplace=True) if silu else y
    return out


def conv_backward(
    grad: torch.Tensor,
    inputs: ConvInputs,
    silu: bool,
    host_plan: torch.Tensor,
    device_plan: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x [T,C], weight [C,W] and bias [C], in the type of compute."""
    dx = torch.empty(inputs.x.shape, dtype=inputs.dtype, device=grad.device)
    dtaps = torch.zeros_like(inputs.taps)
    dbias = torch.zeros_like(inputs.taps[0])
    for block in inputs.blocks(host_plan, device_plan):
        dy = grad[block.lo : block.hi].to(inputs.dtype)
        if silu:
            dy = torch.ops.aten.silu_backward(dy, inputs.convolve(block))
        dbias += dy.sum(0)
        # The own tap holds for every token and comes first, so that dx needs no zeros; all other
        # tokens that take part in it are of this block or an earlier one.
        torch.mul(dy, inputs.taps[0], out=dx[block.lo : block.hi])
        repaired = dy.index_select(0, block.rows)
        for distance, (first, x) in enumerate(inputs.shifts(block)):
            if distance == 1 and len(block.rows):
                dy = dy.index_fill(0, block.rows, 0)
            part = dy[first:]
            dtaps[distance] += (part * x).sum(0)
            if distance:
                lo = block.lo + first - distance
                dx[lo : lo + len(part)].addcmul_(part, inputs.taps[distance])
        for distance, x in enumerate(inputs.repairs(block), 1):
            dtaps[distance] += (repaired * x).sum(0)
            part = (repaired * inputs.taps[distance]).where(block.exists[distance - 1], 0)
            dx.index_add_(0, block.sources[distance - 1], part)
    return dx, dtaps.flip(0).t(), dbias
