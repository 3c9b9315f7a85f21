"""What `verify` found, and its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallError:
    """Largest absolute difference of a call's log-probabilities; of its own row for `baseline`."""

    call: int
    error: float
    baseline: float | None


@dataclass(frozen=True)
class ParameterError:
    """Relative L2 difference of a parameter's gradient; of the rows' for `baseline`."""

    name: str
    error: float
    baseline: float | None


@dataclass(frozen=True)
class VerifyReport:
    """The comparison of a forest with its calls alone.

    Attributes:
        dtype: the model's.
        calls: one entry a call that sampled something, in the caller's order.
        parameters: one entry a parameter.
        leaks: what noticed a change in another branch; empty if nothing did.
        bounds: what log-probabilities and gradients may reach.
        by_ratio: whether the bounds are on errors over the rows' own errors, both against fp32.
    """

    dtype: Any
    calls: list[CallError]
    parameters: list[ParameterError]
    leaks: list[str]
    bounds: tuple[float, float]
    by_ratio: bool

    @property
    def worst_call(self) -> CallError:
        return max(self.calls, key=lambda call: call.error)

    @property
    def worst_parameter(self) -> ParameterError:
        return max(self.parameters, key=lambda parameter: parameter.error)

    @property
    def figures(self) -> tuple[float, float]:
        """What the verdict compares with the bounds: log-probabilities, gradients."""
        if not self.by_ratio:
            return self.worst_call.error, self.worst_parameter.error
        return _ratio(self.calls), _ratio(self.parameters)

    @property
    def ok(self) -> bool:
        # Written so that a figure that is not a number fails.
        within = all(f <= b for f, b in zip(self.figures, self.bounds, strict=True))
        return within and not self.leaks

    def __str__(self) -> str:
        verdict = "OK" if self.ok else "FAILED"
        logprobs, gradients = (
            self._compare(figure, bound)
            for figure, bound in zip(self.figures, self.bounds, strict=True)
        )
        call, parameter = self.worst_call, self.worst_parameter
        return "\n".join(
            [
                f"{verdict}: forest against one row per call, {self.dtype}",
                f"  log-probabilities: {logprobs}; largest {call.error:.1e}, "
                f"in call {call.call}, of {len(self.calls)} calls",
                f"  gradients: {gradients}; largest {parameter.error:.1e}, "
                f"in {parameter.name}, of {len(self.parameters)} parameters",
                f"  isolation: {'; '.join(self.leaks) or 'no branch notices another'}",
            ]
        )

    def _compare(self, figure: float, bound: float) -> str:
        if self.by_ratio:
            return f"{figure:.2f} times the rows' own error, may be {bound:.2f}"
        return f"error {figure:.1e}, may be {bound:.1e}"


def _ratio(errors: Any) -> float:
    """Root of the summed squared errors over that of the baselines."""
    mine = sum(entry.error**2 for entry in errors) ** 0.5
    rows = sum(entry.baseline**2 for entry in errors) ** 0.5
    if rows == 0:
        return 0.0 if mine == 0 else float("inf")
    return mine / rows
