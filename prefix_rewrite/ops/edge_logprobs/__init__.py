"""Log-probabilities of sampled edges, without ever holding a row of logits for each."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_rewrite.ops.edge_logprobs import op as _op  # noqa: F401  registers the op
from prefix_rewrite.ops.edge_logprobs.sharded import is_sharded, sharded_edge_logprobs

__all__ = ["edge_logprobs", "is_sharded", "logits_logprobs"]


def edge_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    edge_row: Tensor,
    edge_targets: Tensor,
    temperature: Tensor,
    *,
    steps: str = "",
    constants: list[float] | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Project the edges' source rows on the vocabulary, and keep each edge's log-probability.

    log softmax(f(hidden @ weight.T + bias) / temperature)[target], f being `steps`. The head
    computes in `hidden`'s dtype, as `F.linear` would: under autocast hidden is cast first, and the
    weight and bias follow. The division and the softmax are in fp32 (fp64 for fp64 logits). Logits
    exist a tile at a time and are recomputed in the backward; differentiable once, in hidden,
    weight and bias.

    Args:
        hidden: [1, R, D] rows, each distinct source once.
        weight: [V, D]; a DTensor sharded by vocabulary stays so, with the other arguments the same
            on every rank of its mesh.
        bias: [V] or None.
        edge_row: [E] int64 row of each edge, in any order.
        edge_targets: [E] int64 sampled id of each edge.
        temperature: [1] fp32.
        steps: comma-separated steps the model applies to its logits, in its order: 'mul', 'div',
            'add', 'sub', 'tanh', 'float' (a cast to fp32).
        constants: right operands of the arithmetic steps, in order.
        entropy: whether to return the entropy of each edge's distribution.

    Returns:
        log-probabilities [E] and entropies [E] (or [0]), fp32, fp64 for fp64 logits.

    Raises:
        LayoutError: a target is not in the vocabulary.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    op = sharded_edge_logprobs if is_sharded(weight) else torch.ops.prefix_rewrite.edge_logprobs
    logprobs, entropy_R, _ = op(
        hidden,
        weight,
        bias,
        edge_row,
        edge_targets,
        temperature,
        steps,
        constants or [],
        entropy,
    )
    return logprobs, entropy_R.index_select(0, edge_row) if entropy else entropy_R


def logits_logprobs(
    logits: Tensor, edge_row: Tensor, edge_targets: Tensor, temperature: Tensor, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return what `edge_logprobs` does, from the model's own logits [1, R, V].

    For heads that are more than a projection (an adapter's); holds [R, V] in fp32.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_probs = (logits[0].to(dtype) / temperature.to(dtype)).log_softmax(-1)
    logprobs = log_probs[edge_row, edge_targets]
    if not entropy:
        return logprobs, logprobs.new_empty(0)
    entropy_R = -(log_probs.exp() * log_probs).sum(-1)
    return logprobs, entropy_R.index_select(0, edge_row)
