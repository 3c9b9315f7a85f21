"""Mamba-1 scan, as transformers' modeling files call it.

Shapes: T tokens, D channels, N state size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from prefix_rewrite.distributed.rank_scans import (
    cp_tree_selective_scan,
    plan_selective_scan_share,
)
from prefix_rewrite.mixers.base import (
    Call,
    RankForm,
    Reason,
    Target,
    asked_for,
    define_leaf,
    leaf_signature,
    unknown_reasons,
)
from prefix_rewrite.mixers.ssd import no_fused_kernel
from prefix_rewrite.ops.tree_selective_scan import plan_selective_scan, tree_selective_scan
from prefix_rewrite.passes.nodes import same_size, shape_of


def _fake(u: Tensor, *rest: Any) -> Tensor:
    """With D in fp32, as all models pass it, the torch reference returns fp32."""
    dtype = torch.float64 if u.dtype == torch.float64 else torch.float32
    return torch.empty(u.shape, dtype=dtype, device=u.device)


leaf_selective_scan = define_leaf(
    "leaf_selective_scan",
    "(Tensor u, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "bool dt_softplus, str unknown) -> Tensor",
    _fake,
)


def _selective_scan_seam(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Which torch implementation a model would have used makes no difference here."""
    unknown = asked_for({"return_last_state": return_last_state, **kwargs})
    return leaf_selective_scan(
        hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, unknown
    )


def _inspect(call: Call, tokens: Any) -> list[Reason]:
    reasons = unknown_reasons(call)
    shape = shape_of(call["u"])
    if not (len(shape) == 3 and same_size(shape[0], 1) and same_size(shape[2], tokens)):
        reasons.append((f"Mamba-1 scan runs on {shape}", "pass [1, channels, tokens]"))
    return reasons


def _emit(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    arguments = (*_tensors(call), *plan, call["dt_softplus"])
    return graph.call_function(tree_selective_scan, arguments)


def _emit_rank(graph: Graph, node: Node, call: Call, plan: tuple[Any, ...]) -> Node:
    arguments = (*_tensors(call), call["dt_softplus"], *plan)
    return graph.call_function(cp_tree_selective_scan, arguments)


def _tensors(call: Call) -> tuple[Any, ...]:
    return tuple(call[name] for name in ("u", "dt", "A", "B", "C", "D", "z", "dt_bias"))


SELECTIVE_SCAN = Target(
    kind="selective scan",
    signatures={leaf_selective_scan: leaf_signature(leaf_selective_scan)},
    planner=plan_selective_scan,
    inspect=_inspect,
    emit=_emit,
    seams={"mamba_selective_scan": _selective_scan_seam, "mamba_inner_fn": no_fused_kernel},
    rank_form=RankForm(plan_selective_scan_share, _emit_rank),
)
