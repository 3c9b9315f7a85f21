"""The errors a user can meet. All derive from one root, so one `except` catches them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class PrefixRewriteError(ValueError):
    """Root of every error this library raises on purpose."""


class ForestError(PrefixRewriteError):
    """The captured calls, or the graph given, are not a prefix forest."""


class LayoutError(PrefixRewriteError):
    """A forest cannot be laid out for, or run by, this model on this device."""


@dataclass(frozen=True)
class Finding:
    """One reason why a model cannot be rewritten exactly.

    Attributes:
        what: what was met, with the value that was got.
        remedy: what the user can do about it.
        module: qualified name of the module that made the call, '' for the model itself.
        source: 'file:line' of the call, '' where there is none.
    """

    what: str
    remedy: str
    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = self.module or "the model"
        at = f" ({self.source})" if self.source else ""
        return f"{where}{at}: {self.what}; {self.remedy}"


class UnsupportedModelError(PrefixRewriteError):
    """The model, or an argument given with a forest, cannot be run exactly on a forest.

    Attributes:
        findings: every reason found, in the order in which the model meets them.
    """

    def __init__(self, findings: Sequence[Finding]):
        assert findings, "an UnsupportedModelError needs at least one finding"
        self.findings = tuple(findings)
        lines = "\n".join(f"  {i}. {finding}" for i, finding in enumerate(findings, 1))
        super().__init__(f"cannot be rewritten exactly, {len(findings)} reason(s):\n{lines}")

    def __reduce__(self) -> tuple[type, tuple[tuple[Finding, ...]]]:
        return type(self), (self.findings,)
