"""What a compiled model returns for a forest."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from prefix_rewrite.forest import PrefixForest


@dataclass(frozen=True)
class ForestOutput:
    """Results of one forest, one a sampled edge, in the caller's order.

    Attributes:
        forest: the forest that was run.
        logprobs: [E] fp32 (fp64 for an fp64 model) log-probability of each sampled token.
        entropy: [E] entropy of the distribution it was sampled from, in nats, if asked for.
        logits: [E, V] the model's logits at each edge, if asked for.
        aux_loss: [] fp32 load-balancing loss, if the model returns one (`output_router_logits`):
            that of the calls as rows of one batch, padding left out, so each physical token counts
            once for each call that contains it. The model's own coefficient is not in it.
    """

    forest: PrefixForest
    logprobs: Tensor
    entropy: Tensor | None = None
    logits: Tensor | None = None
    aux_loss: Tensor | None = None

    def per_call(self) -> list[Tensor]:
        """Return each call's log-probabilities, `[len(sampled_ids)]`, in the caller's order."""
        offsets = self.forest.edges.call_offsets
        return list(self.logprobs.split((offsets[1:] - offsets[:-1]).tolist()))

    def per_node(self) -> dict[Hashable, Tensor]:
        """Return the log-probabilities of each node's own sampled tokens, by node name.

        For a forest made of calls, a node's edges are those of every call through it.
        """
        return {node: self.logprobs[self.forest.node_edges(node)] for node in self.forest.nodes}
