"""The geometry of the report's figures (pure): a ``RunReport`` -> positions in percent, and paths in a 1000 x 1000 box.

The boxes are stretched to whatever width the page has, so nothing in them may be round or be text: dots are drawn as
strokes of no length with round ends, and labels are HTML, placed in percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10

from trainer.records import FaultReport, LossPoint, RunReport

BOX = 1000.0
SMALLEST_BAR = 0.03
"""Percent of the width below which a piece of the timeline cannot be seen and is drawn as part of its neighbour."""
MOST_POINTS = 1500

CATEGORIES = {
    "startup": "startup",
    "productive": "productive",
    "checkpoint_stall": "checkpoint stall",
    "replay": "replay",
    "detection": "detection",
    "recovery": "recovery",
    "other": "other",
}
PHASES = {
    "teardown": "teardown",
    "rendezvous": "rendezvous",
    "import": "imports",
    "process_group": "process group",
    "build": "build",
    "load": "load",
}


@dataclass(frozen=True)
class Bar:
    """A piece of a bar; position and width in percent."""

    kind: str
    left: float
    width: float
    title: str


@dataclass(frozen=True)
class Mark:
    """Something at a place of an axis, in percent."""

    at: float
    label: str
    title: str = ""


@dataclass(frozen=True)
class Curve:
    """A path in the 1000 x 1000 box; ``kind`` is its class."""

    kind: str
    path: str
    title: str = ""


@dataclass(frozen=True)
class Dot:
    kind: str
    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Plot:
    """A diagram: curves, dots with titles, vertical lines, and the labels of both axes (percent from left or bottom)."""

    curves: tuple[Curve, ...]
    dots: tuple[Dot, ...]
    lines: tuple[Mark, ...]
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]


def seconds(value: float) -> str:
    """A duration as people say it: ``41 ms``, ``3.25 s``, ``41.2 s``, ``2 min 5 s``, ``1 h 2 min``."""
    if value < 0.0005:
        return "0 s"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    if value < 3599.5:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def size(count: float) -> str:
    """Bytes in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def percent(value: float | None) -> str:
    """A share; one that is not quite all, or not quite nothing, never reads as if it were."""
    if value is None:
        return "–"
    if 0.9995 <= value < 1:
        return "> 99.9%"
    return f"{value:.1%}"


def number(value: float) -> str:
    """A count or a rate with thousands separated, to about four digits."""
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def timeline(report: RunReport) -> tuple[Bar, ...]:
    """The wall time from left to right; neighbours of one category are one bar."""
    wall = report.wall_seconds or 1.0
    groups: list[tuple[str, float, float, list[int]]] = []
    for piece in report.timeline:
        steps = [piece.step] if piece.step >= 0 else []
        joins = groups and (groups[-1][0] == piece.category or 100 * (piece.end - piece.start) / wall < SMALLEST_BAR)
        if joins:
            category, start, _, before = groups[-1]
            groups[-1] = (category, start, piece.end, [*before[:1], *steps[-1:]] if before else steps)
        else:
            groups.append((piece.category, piece.start, piece.end, steps))
    return tuple(
        Bar(category, 100 * start / wall, 100 * (end - start) / wall, _bar_title(category, start, end, steps))
        for category, start, end, steps in groups
    )


def _bar_title(category: str, start: float, end: float, steps: Sequence[int]) -> str:
    where = "" if not steps or category == "startup" else f", step {steps[0]}"
    if len(steps) > 1 and steps[-1] != steps[0]:
        where = f", steps {steps[0]} to {steps[-1]}"
    return f"{CATEGORIES[category]}{where}: {seconds(end - start)}, from {seconds(start)} to {seconds(end)}"


def breakdown(report: RunReport) -> tuple[Bar, ...]:
    """The shares of the wall time in one bar, the categories that took no time left out."""
    values = report.breakdown_seconds.model_dump()
    wall = report.wall_seconds or 1.0
    parts = [(kind, label, values[kind]) for kind, label in CATEGORIES.items()]
    return stacked([(kind, f"{label}: {seconds(value)}, {percent(value / wall)}", value) for kind, label, value in parts])


def fault_bar(fault: FaultReport, longest: float) -> tuple[Bar, ...]:
    """Detection and the phases of one fault's recovery, on a scale common to all faults (``longest`` seconds)."""
    parts = [("detection", f"detection: {seconds(fault.detection_seconds)}", fault.detection_seconds)]
    parts += [(f"phase-{name}", f"{PHASES.get(name, name)}: {seconds(value)}", value) for name, value in fault.phases.items()]
    return stacked(parts, longest)


def longest_outage(faults: Iterable[FaultReport]) -> float:
    return max((fault.detection_seconds + fault.recovery_seconds for fault in faults), default=0.0)


def stacked(parts: Sequence[tuple[str, str, float]], whole: float = 0.0) -> tuple[Bar, ...]:
    """Parts (kind, title, value) side by side, as percent of ``whole`` (default: of their sum)."""
    whole = whole or sum(value for _, _, value in parts) or 1.0
    bars: list[Bar] = []
    at = 0.0
    for kind, title, value in parts:
        if value > 0:
            bars.append(Bar(kind, 100 * at / whole, 100 * value / whole, title))
            at += value
    return tuple(bars)


def fault_marks(report: RunReport) -> tuple[Mark, ...]:
    """The faults along the timeline, numbered as in the table; those that are too near to tell apart share a label."""
    wall = report.wall_seconds or 1.0
    marks: list[Mark] = []
    for index, fault in enumerate(report.faults, start=1):
        at = min(100.0, 100 * fault.elapsed / wall)
        title = f"{index}: {fault.kind} at step {fault.step}, {seconds(fault.elapsed)}"
        if marks and at - marks[-1].at < 1.6:
            first = marks[-1].label.split("–")[0]
            marks[-1] = Mark(marks[-1].at, f"{first}–{index}", f"{marks[-1].title}\n{title}")
        else:
            marks.append(Mark(at, str(index), title))
    return tuple(marks)


def time_ticks(report: RunReport) -> tuple[Mark, ...]:
    wall = report.wall_seconds
    def label(value: float) -> str:
        return f"{value:g} s" if 1 <= value < 60 else seconds(value)

    return tuple(Mark(100 * value / wall, label(value)) for value in round_times(wall, 6))


def progress_plot(report: RunReport) -> Plot | None:
    """Step over time: a slope is the pace, a flat stretch a restart, a drop a rollback."""
    if not report.losses or not report.wall_seconds:
        return None
    wall, top = report.wall_seconds, max(point.step for point in report.losses)
    points = sorted(report.losses, key=lambda point: point.time)
    curves: list[Curve] = []
    for run in thinned(rising(points, interruptions(report))):
        kind = "lost" if run[0].replay else "line"
        curves.append(Curve(kind, path((point.time / wall, point.step / top) for point in run)))
    commits = [commit for commit in report.commits if commit.tier == "durable" and commit.step <= top]
    dots = tuple(
        Dot("commit", BOX * commit.time / wall, BOX * (1 - commit.step / top), f"checkpoint of step {commit.step}, {seconds(commit.time)}")
        for commit in commits[:: max(1, len(commits) // 300)]
    )
    lines = tuple(Mark(min(100.0, 100 * fault.elapsed / wall), "", _fault_title(fault)) for fault in report.faults)
    y_ticks = tuple(Mark(100 * value / top, number(value)) for value in round_values(0, top, 4))
    return Plot(tuple(curves), dots, lines, time_ticks(report), y_ticks)


def interruptions(report: RunReport) -> list[float]:
    """When training was interrupted, by a fault or a stop, in seconds of the run."""
    idle = [piece.start for piece in report.timeline if piece.category in ("startup", "detection", "recovery")]
    return sorted([*idle, *(fault.elapsed for fault in report.faults)])


def rising(points: Sequence[LossPoint], interrupted: Sequence[float]) -> list[list[LossPoint]]:
    """Executions in the order of time, cut where training was interrupted and where they were rolled back from on."""
    runs: list[list[LossPoint]] = []
    for point in points:
        last = runs[-1][-1] if runs else None
        broken = last is None or point.step <= last.step or any(last.time <= at < point.time for at in interrupted)
        if last is None or broken:
            runs.append([point])
        elif point.replay != last.replay:
            runs.append([last.model_copy(update={"replay": point.replay}), point])
        else:
            runs[-1].append(point)
    return runs


def thinned(runs: Sequence[list[LossPoint]]) -> list[list[LossPoint]]:
    """So few points that a page stays small; ends are kept."""
    stride = max(1, sum(map(len, runs)) // MOST_POINTS)
    return [run if stride == 1 else [*run[::stride], run[-1]] for run in runs]


def loss_plot(report: RunReport) -> Plot | None:
    """Loss over steps: the executions that stood as a line, those that were rolled back apart, restarts as lines."""
    if not report.losses:
        return None
    last = max(report.config.max_steps, *(point.step for point in report.losses))
    low, high = (bound(point.loss for point in report.losses) for bound in (min, max))
    low, high = (low - 0.05 * (high - low), high + 0.05 * (high - low)) if high > low else (low - 0.5, high + 0.5)

    def place(point: LossPoint) -> tuple[float, float]:
        return point.step / last, (point.loss - low) / (high - low)

    standing = [point for point in report.losses if not point.replay]
    replayed = [point for point in report.losses if point.replay]
    curves = [Curve("line", path(map(place, run))) for run in thinned([standing]) if run]
    dots = [
        Dot("replayed", BOX * x, BOX * (1 - y), f"step {point.step}, loss {point.loss:.4f}, rolled back")
        for point in replayed[:: max(1, len(replayed) // MOST_POINTS)]
        for x, y in (place(point),)
    ]
    stride = max(1, len(standing) // 200)
    dots += [
        Dot("hover", BOX * x, BOX * (1 - y), f"step {point.step}, loss {point.loss:.4f}")
        for point in standing[::stride]
        for x, y in (place(point),)
    ]
    lines = tuple(
        Mark(100 * fault.resumed_step / last, "", f"resumed from step {fault.resumed_step} after: {_fault_title(fault)}")
        for fault in report.faults
        if fault.resumed_step >= 0
    )
    x_ticks = tuple(Mark(100 * value / last, number(value)) for value in round_values(0, last, 6))
    y_ticks = tuple(Mark(100 * (value - low) / (high - low), f"{value:.4g}") for value in round_values(low, high, 4))
    return Plot(tuple(curves), tuple(dots), lines, x_ticks, y_ticks)


def _fault_title(fault: FaultReport) -> str:
    return f"{fault.kind} at step {fault.step}, rank {fault.rank}" if fault.rank >= 0 else f"{fault.kind} at step {fault.step}"


def path(points: Iterable[tuple[float, float]]) -> str:
    """A polyline through points of the unit square (y upwards); a single one becomes a dot."""
    words = [f"{BOX * x:.1f} {BOX * (1 - y):.1f}" for x, y in points]
    return f"M{words[0]}h0" if len(words) == 1 else "M" + "L".join(words)


def round_values(low: float, high: float, about: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, some ``about`` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    magnitude = 10 ** floor(log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw * 0.999)
    first = -floor(-low / step)
    return [round(step * index, 10) for index in range(first, floor(high / step + 1e-9) + 1)]


TIME_STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def round_times(wall: float, about: int) -> list[float]:
    """Round times from 0 to ``wall`` seconds as clocks are divided, some ``about`` of them."""
    raw = wall / about
    if raw < TIME_STEPS[0]:
        return round_values(0.0, wall, about)
    step = next((step for step in TIME_STEPS if step >= raw * 0.75), TIME_STEPS[-1] * max(1, round(raw / TIME_STEPS[-1])))
    return [float(step * index) for index in range(floor(wall / step) + 1)]
