"""The load-balancing loss of a forest's calls, as if each call were a row of one batch.

Shapes: R routed layers, T tokens, X experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from prefix_rewrite.plan import PlanView, register_field
from prefix_rewrite.segments import IntArray, SegmentTable

TOKEN_CALLS = register_field("load_balancing_token_calls", "device")


def plan_load_balancing(segments: SegmentTable) -> Mapping[str, IntArray]:
    """Plan how many calls contain each token."""
    return {TOKEN_CALLS: segments.token_calls}


def load_balancing_loss(
    gate_logits: Tensor,
    host_plan: Tensor,
    device_plan: Tensor,
    top_k: int,
    total: Callable[[Tensor], Tensor] = lambda part: part,
) -> Tensor:
    """X * sum_x f_x P_x over all calls' tokens (Fedus et al. 2021, Switch Transformer, eq. 4-6).

    f_x is the number of times that expert x is among a token's `top_k`, P_x its probability, both
    as the mean over layers and over the calls' tokens: a token counts once for each call that
    contains it. Differentiable in the probabilities, as in transformers.

    Args:
        gate_logits: [R, T, X] logits of the routers.
        host_plan, device_plan: a packed plan with the fields of `plan_load_balancing`.
        top_k: experts that a token goes to.
        total: adds up what is computed of some of the forest's tokens over all of them.

    Returns:
        [] fp32. Without a call it is 0.
    """
    calls_T = token_calls(gate_logits.detach(), host_plan, device_plan)
    num_layers, _, num_experts = gate_logits.shape
    with torch.autocast(gate_logits.device.type, enabled=False):
        probs = gate_logits.softmax(-1)
        chosen = probs.topk(top_k, -1).indices.flatten()
        weight = calls_T[None, :, None].expand(num_layers, -1, top_k).flatten()
        times_X = calls_T.new_zeros(num_experts).index_add(0, chosen, weight)
        times_X, num_tokens = total(torch.cat([times_X, calls_T.sum()[None]])).split(num_experts)
        num_choices = (num_tokens * num_layers).clamp_min(1)
        probs_X = (probs.float() * calls_T[:, None]).sum((0, 1))
        return total(((times_X / num_choices) * (probs_X / num_choices)).sum() * num_experts)


@torch.library.custom_op("prefix_rewrite::token_calls", mutates_args=())
def token_calls(gate_logits: Tensor, host_plan: Tensor, device_plan: Tensor) -> Tensor:
    """[T] fp32 calls that contain each token, read from a plan for the tokens of `gate_logits`."""
    return PlanView(host_plan, device_plan)[TOKEN_CALLS].float()


@token_calls.register_fake
def _(gate_logits: Tensor, host_plan: Tensor, device_plan: Tensor) -> Tensor:
    return gate_logits.new_empty(gate_logits.shape[1], dtype=torch.float32)
