"""Draw a forest, and how the reward went."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rollout import Rollout

from prefix_rewrite import PrefixForest
from prefix_rewrite.plot import draw_forest


@dataclass
class Curve:
    """Mean reward of a call and fraction of games solved, by step; step 0 is before training."""

    steps: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    solved: list[float] = field(default_factory=list)

    def add(self, step: int, rollout: Rollout) -> None:
        self.steps.append(step)
        self.reward.append(rollout.reward)
        self.solved.append(rollout.solved)


def draw(
    path: Path,
    forest: PrefixForest,
    *,
    skip: int = 0,
    curve: Curve | None = None,
    warm_up: int = 0,
) -> None:
    """Write a picture of a forest and, if given, of a reward curve.

    Args:
        path: the file; its folder is made.
        forest: the forest.
        skip: tokens of its trunk to leave out, so that the branches can be seen.
        curve: the rewards.
        warm_up: steps of imitation, shaded.
    """
    figure = Figure(figsize=(13 if curve else 8, 5.5), layout="constrained")
    panels = figure.subplots(1, 2 if curve else 1, squeeze=False)[0]
    draw_forest(forest, panels[0])
    if skip:
        panels[0].set_xlim(left=skip)
        panels[0].set_xlabel(f"depth in tokens (the first {skip} are one trunk, not drawn)")
    if curve:
        _draw_curve(panels[1], curve, warm_up)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_curve(ax: Axes, curve: Curve, warm_up: int) -> None:
    ax.axvspan(0, warm_up, color="#eef1f4", label="imitation")
    ax.plot(curve.steps, curve.reward, color="#2e6f9e", label="mean reward of a call")
    ax.plot(curve.steps, curve.solved, color="#e4572e", label="games solved")
    ax.set_xlim(0, max(1, *curve.steps))
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("training step")
    ax.set_title("what the agents earn")
    ax.legend(loc="lower right")
