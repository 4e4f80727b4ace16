"""The geometry of a comparison's figures (pure): timelines on one scale, goodput bars, efficiency over the interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steps import figures
from steps.comparison_record import Arm, Comparison
from steps.figures import BOX, Bar, Curve, Dot, Mark, Plot, path, percent, round_values
from steps.prediction import Costs, walk
from trainer.config import RunConfig
from trainer.records import RunReport

MOST_INTERVALS = 60
"""Points of a predicted curve."""


def timeline(report: RunReport, longest: float) -> tuple[Bar, ...]:
    """The wall time of a run on a scale that all runs share."""
    share = report.wall_seconds / longest if longest else 0.0
    return tuple(Bar(bar.kind, bar.left * share, bar.width * share, bar.title) for bar in figures.timeline(report))


def goodput(arm: Arm) -> tuple[Bar, ...]:
    """Effective goodput as a bar, and a mark where it was predicted."""
    assert arm.figures is not None
    value = arm.figures.effective_goodput or 0.0
    bars = [Bar("productive", 0.0, 100 * min(1.0, value), f"measured: {percent(value)}")]
    if arm.predicted is not None:
        at = arm.predicted.effective_goodput
        bars.append(Bar("replay", max(0.0, 100 * min(1.0, at) - 0.4), 0.8, f"predicted: {percent(at)}"))
    return tuple(bars)


def efficiency_plot(comparison: Comparison, costs: Costs | None) -> Plot | None:
    """Effective goodput over the interval of checkpoints without faults: measured as dots, predicted as lines."""
    arms = [arm for arm in comparison.arms if arm.table == "checkpoints" and arm.figures and arm.figures.effective_goodput
            and arm.config and arm.config.checkpoint_mode != "off"]  # fmt: skip
    if not arms:
        return None
    longest = max(arm.config.checkpoint_interval_steps for arm in arms if arm.config) * 1.25
    dots = []
    for arm in arms:
        assert arm.config is not None and arm.figures is not None and arm.figures.effective_goodput is not None
        x, y = arm.config.checkpoint_interval_steps / longest, arm.figures.effective_goodput
        dots.append(Dot(arm.config.checkpoint_mode, BOX * x, BOX * (1 - y), f"{arm.run}: {arm.label}: {percent(y)}"))
    x_ticks = tuple(Mark(100 * value / longest, f"{value:g}") for value in round_values(0, longest, 6))
    y_ticks = tuple(Mark(100 * value, percent(value)) for value in round_values(0, 1, 5))
    return Plot(_curves(arms, costs, longest), tuple(dots), (), x_ticks, y_ticks)


def _curves(arms: Sequence[Arm], costs: Costs | None, longest: float) -> tuple[Curve, ...]:
    """For each mode and length of training, what is predicted at other intervals."""
    if costs is None:
        return ()
    shapes: dict[tuple[str, int], RunConfig] = {}
    for arm in arms:
        if arm.config is not None and arm.figures is not None:
            shapes.setdefault((arm.config.checkpoint_mode, arm.config.max_steps), arm.config)
    return tuple(
        Curve(mode, path(_points(config, costs, longest)), f"{mode}, {steps} steps, predicted")
        for (mode, steps), config in shapes.items()
    )


def _points(config: RunConfig, costs: Costs, longest: float) -> list[tuple[float, float]]:
    most = min(config.max_steps, int(longest))
    stride = max(1, most // MOST_INTERVALS)
    points = []
    for interval in range(1, most + 1, stride):
        run = walk(config.model_copy(update={"checkpoint_interval_steps": interval}), costs)
        points.append((interval / longest, config.max_steps * costs.step / run.now))
    return points


def costs_of(comparison: Comparison) -> Costs | None:
    """The costs as they are in the record, with the step of the comparison's first bare run."""
    if comparison.costs is None:
        return None
    costs = Costs(**comparison.costs)
    steps = [arm.figures.step_seconds for arm in comparison.arms if arm.table == "bare" and arm.figures and arm.whole]
    return replace(costs, step=steps[0]) if steps else costs
