"""Train unmodified attention/Mamba hybrids on a prefix forest, exactly.

>>> from prefix_rewrite import CapturedCall, PrefixForest
>>> calls = [CapturedCall([1, 2, 3], [4, 5]), CapturedCall([1, 2, 3], [6])]
>>> PrefixForest.from_calls(calls).num_tokens
6
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefix_rewrite.calls import CapturedCall
    from prefix_rewrite.compile import prefix_compile
    from prefix_rewrite.errors import (
        Finding,
        ForestError,
        LayoutError,
        PrefixRewriteError,
        UnsupportedModelError,
    )
    from prefix_rewrite.explanation import ModelReport, explain
    from prefix_rewrite.forest import PrefixForest
    from prefix_rewrite.output import ForestOutput
    from prefix_rewrite.targets import register_mixer
    from prefix_rewrite.verification import verify
    from prefix_rewrite.verification_report import VerifyReport

# Loaded on first use: the forest half then needs no torch, and a pass module can come first.
_HOMES = {
    "CapturedCall": "calls",
    "Finding": "errors",
    "ForestError": "errors",
    "ForestOutput": "output",
    "LayoutError": "errors",
    "ModelReport": "explanation",
    "PrefixForest": "forest",
    "PrefixRewriteError": "errors",
    "UnsupportedModelError": "errors",
    "VerifyReport": "verification_report",
    "explain": "explanation",
    "prefix_compile": "compile",
    "register_mixer": "targets",
    "verify": "verification",
}

__all__ = [
    "CapturedCall",
    "Finding",
    "ForestError",
    "ForestOutput",
    "LayoutError",
    "ModelReport",
    "PrefixForest",
    "PrefixRewriteError",
    "UnsupportedModelError",
    "VerifyReport",
    "explain",
    "prefix_compile",
    "register_mixer",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
