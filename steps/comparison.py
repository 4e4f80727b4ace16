"""Several runs side by side (pure): how ``report.json`` of a comparison is made of what the runs left.

A run that is not complete is listed with its reason and gives no figures. One whose event files are not whole shows its
figures, but no best arm, spread, ratio, step or cost is taken from it. Two runs with one configuration are
repetitions of one arm: how far they differ is shown, and no smaller difference between arms is claimed. Every arm names
its run and its event files, from which all of its numbers follow.

The ``*_as_published`` figures use the formulas of the published results (``steps.published``) as far as those are known:
without the drain of the last save, and with replayed steps counted as training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import log
from statistics import fmean, median
from typing import Any, Literal

from steps.comparison_record import Arm, Comparison, Figures, Predicted, PublishedFigures, Ratio, Repeated, Source
from steps.evidence import Evidence
from steps.prediction import Costs, bare_of, breakdown, fit, is_bare, simulated_wall, usable, walk
from steps.published import PUBLISHED, Published
from steps.repeats import ratio_interval, repetition, spread
from trainer.config import RunConfig
from trainer.records import RunReport


def compare(
    name: str, runs: Sequence[Evidence], fitted: Sequence[str], published: Mapping[str, str], created: float
) -> Comparison:
    """The comparison of ``runs``, in their order. ``fitted`` are those that predictions take their costs from;
    ``published`` names the published arm that a run stands for."""
    reports = [run.report for run in runs if run.report is not None]
    whole = [run.report for run in runs if run.report is not None and run.whole]
    chosen = [run for run in runs if run.run_id in fitted]
    costs = fit(chosen)
    arms = [_arm(run, whole, costs, run.run_id in fitted and run.whole, published.get(run.run_id, "")) for run in runs]
    arms = _against_recipe(arms)
    recipe = next((arm for arm in arms if is_recipe(arm) and _value(arm)), None)
    faulted = [arm for arm in arms if arm.table == "faults" and _value(arm)]
    groups = _groups(arms)
    repeated = _repeated(groups)
    ratios, unpaired = _ratios(groups, recipe)
    steps = [arm.figures.step_seconds for arm in arms if arm.figures and arm.bare_runs and arm.whole]
    return Comparison(
        name=name,
        created=created,
        hardware=reports[0].hardware if reports else {},
        versions=reports[0].versions if reports else {},
        arms=tuple(arms),
        recipe=recipe.run if recipe else "",
        best=max(faulted, key=_value).run if faulted else "",
        noise=max((group.spread for group in repeated), default=None),
        repeated=repeated,
        ratios=ratios,
        costs=_as_dict(costs),
        worst_prediction=_worst(arms, lambda predicted: predicted.effective_goodput),
        worst_at_own_pace=_worst(arms, lambda predicted: predicted.at_own_pace),
        pace_spread=spread(steps) if steps else None,
        problems=(*_problems(runs, arms), *_free_snapshots(arms, chosen), *unpaired),
    )


def _arm(run: Evidence, reports: Sequence[RunReport], costs: Costs | None, fitted: bool, key: str) -> Arm:
    report = run.report
    published = _published(key)
    sources = tuple(Source(file=f.name, events=len(f.events), unreadable=f.unreadable) for f in run.files)
    if report is None:
        return Arm(run=run.run_id, label=run.run_id, table="unknown", complete=False, whole=False,
                   problems=run.problems, config=None, published=published, sources=sources)  # fmt: skip
    bare = bare_of(report.config, reports)
    return Arm(
        run=run.run_id,
        label=label_of(report.config),
        table=table_of(report.config),
        complete=report.complete,
        whole=run.whole,
        problems=run.problems,
        config=report.config,
        bare_runs=tuple(one.run_id for one in bare),
        figures=_figures(run, report, bare) if report.complete else None,
        predicted=_predicted(report, bare, costs, fitted) if report.complete else None,
        published=published,
        report=str(run.paths.report("html").relative_to(run.paths.root)),
        sources=sources,
    )


def _published(key: str) -> PublishedFigures | None:
    if not key:
        return None
    found: Published = PUBLISHED[key]
    return PublishedFigures(
        key=key, label=found.label, efficiency=found.efficiency, training_goodput=found.training_goodput,
        infrastructure_goodput=found.infrastructure_goodput, recovery_seconds=found.recovery_seconds,
    )  # fmt: skip


def bare_step(bare: Sequence[RunReport]) -> float:
    """The median step of the bare runs; of several the median."""
    return median(report.throughput.median_step_seconds for report in bare)


def _figures(run: Evidence, report: RunReport, bare: Sequence[RunReport]) -> Figures:
    parts, wall = report.breakdown_seconds, report.wall_seconds
    trained = parts.productive + parts.replay
    drain = run.waits.get("drain", 0.0)
    waited = max(0.0, parts.checkpoint_stall - drain)
    outages = [fault.detection_seconds + fault.recovery_seconds for fault in report.faults]
    return Figures(
        effective_goodput=report.steps_completed * bare_step(bare) / wall if bare else None,
        training_goodput=report.training_goodput,
        infrastructure_goodput=report.infrastructure_goodput,
        wall_seconds=wall,
        breakdown_seconds=parts,
        steps=report.steps_completed,
        step_seconds=report.throughput.median_step_seconds,
        commits=report.checkpoints.committed,
        skipped=report.checkpoints.skipped,
        faults=len(report.faults),
        outage_seconds=fmean(outages) if outages else 0.0,
        lost_steps=report.lost_steps,
        efficiency_as_published=trained / (trained + waited) if trained else 0.0,
        training_goodput_as_published=trained / (wall - drain) if wall > drain else 0.0,
    )


def _predicted(report: RunReport, bare: Sequence[RunReport], costs: Costs | None, fitted: bool) -> Predicted | None:
    if costs is None or not bare:
        return None
    step = fmean(one.breakdown_seconds.productive / max(1, one.steps_completed) for one in bare)
    costs = replace(costs, step=step, startup=median(one.breakdown_seconds.startup for one in bare))
    run = walk(report.config, costs)
    own = replace(costs, step=report.breakdown_seconds.productive / max(1, report.steps_completed))
    pace = report.config.max_steps * bare_step(bare)
    return Predicted(
        effective_goodput=pace / run.now,
        at_own_pace=pace / walk(report.config, own).now,
        simulated_goodput=pace / simulated_wall(report.config, own),
        wall_seconds=run.now,
        breakdown_seconds=breakdown(run),
        commits=run.commits,
        fitted=fitted,
    )


def table_of(config: RunConfig) -> Literal["bare", "checkpoints", "faults"]:
    """The table an arm belongs to."""
    if config.fault_count:
        return "faults"
    return "bare" if is_bare(config) else "checkpoints"


def label_of(config: RunConfig) -> str:
    """What distinguishes an arm, in words."""
    nodes = f"{config.nodes} node{'s' if config.nodes > 1 else ''}"
    if is_bare(config):
        return f"bare, {nodes}"
    saves = "no checkpoints"
    if config.checkpoint_mode != "off":
        saves = f"{config.checkpoint_mode} every {config.checkpoint_interval_steps} of {config.max_steps} steps"
    if config.snapshot_interval_steps:
        saves += f", snapshots every {config.snapshot_interval_steps}"
    return f"{config.recovery}, {saves}, {nodes}" if config.fault_count else f"{saves}, {nodes}"


def is_recipe(arm: Arm) -> bool:
    """Whether it is the published recipe: five faults, synchronous saves, in-process restart."""
    config = arm.config
    return config is not None and arm.table == "faults" and (
        (config.checkpoint_mode, config.recovery, config.snapshot_interval_steps) == ("sync", "in-process", 0)
    )  # fmt: skip


def _value(arm: Arm) -> float:
    """What an arm counts with; zero is no value."""
    return (arm.effective_goodput or 0.0) if arm.whole else 0.0


def _against_recipe(arms: Sequence[Arm]) -> list[Arm]:
    recipe = [_value(arm) for arm in arms if is_recipe(arm) and _value(arm)]
    if not recipe:
        return list(arms)
    return [
        arm.model_copy(update={"times_recipe": _value(arm) / recipe[0]}) if arm.table == "faults" and _value(arm) else arm
        for arm in arms
    ]


def _groups(arms: Sequence[Arm]) -> tuple[tuple[Arm, ...], ...]:
    """Arms of one configuration that were run more than once, whatever became of some of these runs."""
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        if arm.config is not None:
            groups.setdefault(arm.config.model_dump_json(exclude={"run_id", "root"}), []).append(arm)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _repeated(groups: Sequence[Sequence[Arm]]) -> tuple[Repeated, ...]:
    """How far arms differ from themselves, where at least two of their runs have a value."""
    counted = [[arm for arm in group if _value(arm)] for group in groups]
    return tuple(
        Repeated(
            label=group[0].label,
            runs=tuple(arm.run for arm in group),
            effective_goodput=tuple(map(_value, group)),
            spread=spread(list(map(_value, group))),
        )
        for group in counted
        if len(group) > 1
    )


def _ratios(groups: Sequence[Sequence[Arm]], recipe: Arm | None) -> tuple[tuple[Ratio, ...], list[str]]:
    """Each repeated arm against the recipe, if that was repeated; and what is wrong with runs that make no pair."""
    base = next((group for group in groups if recipe in group), None)
    others = [group for group in groups if group is not base]
    if base is None or not others:
        return (), []
    theirs, ratios, problems = _numbered(base), [], []
    for group in others:
        mine = _numbered(group)
        pairs = sorted(mine.keys() & theirs.keys())
        problems += [*_alone(mine, theirs, base[0].label), *_alone(theirs, mine, group[0].label)]
        if pairs:
            ratio, interval = ratio_interval([_value(mine[number]) for number in pairs], [_value(theirs[number]) for number in pairs])
            low, high = interval or (None, None)
            ratios.append(Ratio(first=group[0].label, second=base[0].label, pairs=len(pairs), ratio=ratio, low=low, high=high))
    for group in groups:
        paired = _numbered(group).values()
        problems += [f"{arm.run}: an earlier run is the same repetition, so it is in no pair" for arm in group
                     if _value(arm) and arm not in paired]  # fmt: skip
    return tuple(ratios), problems


def _numbered(group: Sequence[Arm]) -> dict[int, Arm]:
    """Number of the repetition -> its run, of those that have a value."""
    found: dict[int, Arm] = {}
    for arm in group:
        if _value(arm):
            found.setdefault(repetition(arm.run), arm)
    return found


def _alone(these: Mapping[int, Arm], those: Mapping[int, Arm], label: str) -> list[str]:
    """What to say of runs whose partner has no value."""
    return [f"{these[number].run}: repetition {number} of \"{label}\" has no value, so these two make no pair"
            for number in sorted(these.keys() - those.keys())]  # fmt: skip


def differs(first: float, second: float, noise: float | None) -> bool:
    """Whether two values differ by more than an arm does from itself; unknown is no."""
    return noise is not None and abs(log(first / second)) > log(1 + noise)


def _worst(arms: Sequence[Arm], predicted: Callable[[Predicted], float]) -> float | None:
    """By how much the predictions were wrong at most, of the arms that they were not fitted to."""
    errors = [
        abs(predicted(arm.predicted) - _value(arm))
        for arm in arms
        if arm.predicted is not None and not arm.predicted.fitted and _value(arm)
    ]
    return max(errors, default=None)


def _as_dict(costs: Costs | None) -> dict[str, Any] | None:
    if costs is None:
        return None
    return {name: dict(value) if isinstance(value := getattr(costs, name), Mapping) else value for name in costs.__slots__}


def _problems(runs: Sequence[Evidence], arms: Sequence[Arm]) -> tuple[str, ...]:
    """What is wrong with any run, and what keeps them from being compared as if all were alike."""
    found = [f"{run.run_id}: {problem}" for run in runs for problem in run.problems]
    for what in ("versions", "hardware"):
        groups: dict[str, list[str]] = {}
        for run in runs:
            if run.report is not None:
                told = ", ".join(f"{name} {value}" for name, value in sorted(getattr(run.report, what).items()))
                groups.setdefault(told, []).append(run.run_id)
        if len(groups) > 1:
            found.append(f"the runs differ in {what}: " + "; ".join(f"{', '.join(ids)} with {told}" for told, ids in groups.items()))
    found += [f"{arm.run}: its figures are shown, but no best arm, spread, ratio, step or cost is taken from them: its event files are not whole"
              for arm in arms if arm.figures is not None and not arm.whole]  # fmt: skip
    found += [f"{arm.run}: there is no bare run of its shape with whole event files, so it has no effective goodput" for arm in arms
              if arm.figures is not None and arm.figures.effective_goodput is None]  # fmt: skip
    return tuple(found)


def _free_snapshots(arms: Sequence[Arm], fitted: Sequence[Evidence]) -> list[str]:
    """Arms that take snapshots, where predictions know no cost of one."""
    if any(report.snapshots.committed for _, report in usable(fitted)):
        return []
    taking = [arm.run for arm in arms if arm.predicted is not None and arm.config is not None and arm.config.snapshot_interval_steps]
    return [f"{', '.join(taking)}: no run that costs were taken from took snapshots, so predictions have them for nothing"] if taking else []
