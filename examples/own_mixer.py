"""Teach the library a mixer of your own: an exponential moving average over the context.

    python examples/own_mixer.py

The model below calls `moving_average`, which nothing in the library knows. Without the
registration it is refused; with it, it runs on a forest, and `verify` compares it with the
untouched model, one row a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from prefix_rewrite import (
    CapturedCall,
    UnsupportedModelError,
    prefix_compile,
    register_mixer,
    verify,
)
from prefix_rewrite.mixers.base import Call, Reason, Target, define_leaf, leaf_signature
from prefix_rewrite.plan import PlanView, register_field
from prefix_rewrite.segments import SegmentTable

VOCAB, WIDTH = 64, 16


def moving_average(x: Tensor, decay: Tensor) -> Tensor:
    """y_t = decay * y_(t-1) + (1 - decay) * x_t over a row: x [1, T, D], decay [D]."""
    rows, last = [], torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        last = decay * last + (1 - decay) * x[:, t]
        rows.append(last)
    return torch.stack(rows, dim=1)


class TinyModel(nn.Module):
    """Somebody's model: it is not changed for the library."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.decay = nn.Parameter(torch.linspace(-1.0, 3.0, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + self.mix(moving_average(x, self.decay.sigmoid()))
        return self.head(x)


# 1. What the op must know of a forest: each segment's first and last token, and its parent.
SEGMENTS = register_field("moving_average_segments", "host")


def plan_moving_average(segments: SegmentTable) -> dict[str, Any]:
    end = segments.start + segments.length
    return {SEGMENTS: np.stack([segments.start, end, segments.parent], axis=1)}


# 2. The same maths on a forest: a segment starts from where its parent ended.
def tree_moving_average(
    x: Tensor, decay: Tensor, host_plan: Tensor, device_plan: Tensor
) -> Tensor:
    ends: list[Tensor] = []
    rows: list[Tensor] = []
    for begin, end, parent in PlanView(host_plan, device_plan)[SEGMENTS].tolist():
        last = torch.zeros_like(x[:, 0]) if parent < 0 else ends[parent]
        for t in range(begin, end):
            last = decay * last + (1 - decay) * x[:, t]
            rows.append(last)
        ends.append(last)
    return torch.stack(rows, dim=1)


# 3. A leaf op stands for the call while the model is captured: it has the result's shape.
leaf = define_leaf("leaf_moving_average", "(Tensor x, Tensor decay) -> Tensor",
                   lambda x, decay: torch.empty_like(x))  # fmt: skip


# 4. What of a call can't be run exactly. Sizes may be symbols; never compare tokens to a number.
def inspect_moving_average(call: Call, tokens: Any) -> list[Reason]:
    return []


# 5. How the call is replaced in the graph.
def emit_moving_average(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    return graph.call_function(tree_moving_average, (call["x"], call["decay"], *plan))


MOVING_AVERAGE = Target(
    kind="moving average",
    signatures={leaf: leaf_signature(leaf)},
    planner=plan_moving_average,
    inspect=inspect_moving_average,
    emit=emit_moving_average,
    seams={"moving_average": lambda x, decay: leaf(x, decay)},
)


def main() -> None:
    torch.manual_seed(0)
    model = TinyModel()
    try:
        prefix_compile(model)
    except UnsupportedModelError as error:
        print(f"before: {error}\n")
    register_mixer(MOVING_AVERAGE)
    calls = [CapturedCall([5, 6, 7, 8], [9, 10]), CapturedCall([5, 6, 7, 8], [11]),
             CapturedCall([5, 6, 12], [13, 14, 15])]  # fmt: skip
    print(f"after: {verify(prefix_compile(model), calls)}")


if __name__ == "__main__":
    main()
