"""The table of known mixer calls. Recognition is by call target only."""

from __future__ import annotations

from torch.fx import Node

from prefix_rewrite.errors import PrefixRewriteError
from prefix_rewrite.mixers.attention import ATTENTION
from prefix_rewrite.mixers.base import Seams, Signature, Target
from prefix_rewrite.mixers.conv import CONV
from prefix_rewrite.mixers.delta_rule import CHANNEL_DELTA_RULE, DELTA_RULE
from prefix_rewrite.mixers.libraries.causal_conv1d import CAUSAL_CONV1D_SEAMS
from prefix_rewrite.mixers.libraries.fla import FLA_SEAMS
from prefix_rewrite.mixers.libraries.flash_attn import FLASH_ATTN_SEAMS
from prefix_rewrite.mixers.libraries.flex_attention import FLEX_ATTENTION_SEAMS
from prefix_rewrite.mixers.libraries.mamba_norms import MAMBA_NORM_SEAMS
from prefix_rewrite.mixers.libraries.mamba_ssm import MAMBA_SSM_SEAMS
from prefix_rewrite.mixers.load_balancing import LOAD_BALANCING
from prefix_rewrite.mixers.rglru import RGLRU
from prefix_rewrite.mixers.selective_scan import SELECTIVE_SCAN
from prefix_rewrite.mixers.ssd import SSD

TARGETS: list[Target] = [
    ATTENTION,
    CONV,
    SSD,
    SELECTIVE_SCAN,
    DELTA_RULE,
    CHANNEL_DELTA_RULE,
    LOAD_BALANCING,
    RGLRU,
]

# By full name. One call may become several mixers, so these are no target's own.
LIBRARY_SEAMS: Seams = {
    **CAUSAL_CONV1D_SEAMS,
    **FLA_SEAMS,
    **FLASH_ATTN_SEAMS,
    **FLEX_ATTENTION_SEAMS,
    **MAMBA_NORM_SEAMS,
    **MAMBA_SSM_SEAMS,
}


def register_mixer(target: Target) -> None:
    """Teach the library a mixer of your own, for every model compiled from then on.

    `prefix_rewrite.mixers.base` holds what a target is made of; docs/mixers.md goes through one.

    Args:
        target: how calls are recognised, read, judged, planned and replaced.

    Raises:
        PrefixRewriteError: its kind, a call target or a seam's name is taken.
    """
    if not isinstance(target, Target):
        raise PrefixRewriteError(f"a mixer must be a Target, got {type(target).__name__}")
    if taken := [name for name in target.seams if name in LIBRARY_SEAMS]:
        raise PrefixRewriteError(f"a mixer's names must be new, got {', '.join(taken)}; rename")
    for known in TARGETS:
        taken = [str(call) for call in known.signatures if call in target.signatures]
        taken += [name for name in known.seams if name in target.seams]
        if known.kind == target.kind:
            taken.append(f"the kind {target.kind!r}")
        if taken:
            raise PrefixRewriteError(
                f"a mixer's names must be new, got {', '.join(taken)} of {known.kind!r}; rename"
            )
    TARGETS.append(target)


def find_target(node: Node) -> tuple[Target, Signature] | None:
    """Look a call up in the table."""
    if node.op != "call_function":
        return None
    for target in TARGETS:
        signature = target.signatures.get(node.target)  # type: ignore[arg-type]
        if signature is not None:
            return target, signature
    return None
