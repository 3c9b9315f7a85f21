"""Reference edge log-probabilities: one log-softmax per sampled edge.

Shapes: R rows, D hidden size, V vocabulary, E edges.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def edge_logprobs_reference(
    hidden_1RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    edge_row: list[int],
    edge_targets: list[int],
    temperature: float,
    after_head: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> tuple[Tensor, Tensor]:
    """Project each edge's row on the vocabulary alone, by a plain loop over the edges.

    Args:
        hidden_1RD: [1, R, D] rows, in the dtype to compute in.
        weight_VD: [V, D] head.
        bias_V: [V] or None.
        edge_row: [E] row of each edge.
        edge_targets: [E] sampled token id of each edge.
        temperature: divides the logits.
        after_head: what the model does to the logits after its head.

    Returns:
        log-probabilities [E] and entropies [E] of softmax(logits / temperature).
    """
    logprobs, entropies = [], []
    for row, target in zip(edge_row, edge_targets, strict=True):
        logits_V = weight_VD @ hidden_1RD[0, row]
        if bias_V is not None:
            logits_V = logits_V + bias_V
        log_probs_V = (after_head(logits_V) / temperature).log_softmax(-1)
        logprobs.append(log_probs_V[target])
        entropies.append(-(log_probs_V.exp() * log_probs_V).sum())
    return torch.stack(logprobs), torch.stack(entropies)
