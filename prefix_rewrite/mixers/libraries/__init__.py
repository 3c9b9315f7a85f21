"""Kernel libraries: how their own functions are called, by full name, one file a library.

A model that calls a library's function, by whatever name its file has for it, shows the call by
the leaf of the mixer that the function is. Nothing is imported: a function of a package that
isn't loaded can't be called either.
"""

from __future__ import annotations

from prefix_rewrite.mixers.base import Seams
from prefix_rewrite.mixers.libraries.causal_conv1d import CAUSAL_CONV1D_SEAMS
from prefix_rewrite.mixers.libraries.fla import FLA_SEAMS
from prefix_rewrite.mixers.libraries.flash_attn import FLASH_ATTN_SEAMS
from prefix_rewrite.mixers.libraries.flex_attention import FLEX_ATTENTION_SEAMS
from prefix_rewrite.mixers.libraries.mamba_norms import MAMBA_NORM_SEAMS
from prefix_rewrite.mixers.libraries.mamba_ssm import MAMBA_SSM_SEAMS

LIBRARY_SEAMS: Seams = {
    **CAUSAL_CONV1D_SEAMS,
    **FLA_SEAMS,
    **FLASH_ATTN_SEAMS,
    **FLEX_ATTENTION_SEAMS,
    **MAMBA_NORM_SEAMS,
    **MAMBA_SSM_SEAMS,
}
