"""The table of known mixer calls. Recognition is by call target only."""

from __future__ import annotations

from torch.fx import Node

from prefix_rewrite.mixers.attention import ATTENTION
from prefix_rewrite.mixers.base import Signature, Target
from prefix_rewrite.mixers.conv import CONV
from prefix_rewrite.mixers.delta_rule import CHANNEL_DELTA_RULE, DELTA_RULE
from prefix_rewrite.mixers.selective_scan import SELECTIVE_SCAN
from prefix_rewrite.mixers.ssd import SSD

TARGETS: tuple[Target, ...] = (
    ATTENTION,
    CONV,
    SSD,
    SELECTIVE_SCAN,
    DELTA_RULE,
    CHANNEL_DELTA_RULE,
)


def find_target(node: Node) -> tuple[Target, Signature] | None:
    """Look a call up in the table."""
    if node.op != "call_function":
        return None
    for target in TARGETS:
        signature = target.signatures.get(node.target)  # type: ignore[arg-type]
        if signature is not None:
            return target, signature
    return None
