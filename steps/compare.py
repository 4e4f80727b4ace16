"""Compare runs: read what each left, write ``comparisons/<name>/report.{json,md,html}`` and each run's own report.

    python -m steps.report --root DIR [--name NAME] [--fit RUN,RUN] RUN[=PUBLISHED] RUN[=PUBLISHED] ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from steps import comparison_figures, figures, report
from steps.comparison import compare, differs
from steps.comparison_record import Arm, Comparison
from steps.evidence import Evidence, examine
from steps.published import PUBLISHED
from trainer import paths
from trainer.errors import ConfigurationError
from trainer.paths import RunPaths
from trainer.records import write_whole


def compare_runs(root: Path, name: str, words: Sequence[str], fitted: Sequence[str]) -> Comparison:
    """Read the runs, write the reports, say how it came out. Raises ``ConfigurationError`` when there is none of the runs."""
    named = dict(split(word) for word in words)
    runs = [examine(RunPaths(root, run)) for run in named]
    if not any(run.files or run.report for run in runs):
        raise ConfigurationError(f"there is none of the runs {', '.join(named)} under {root}; check --root, or train first")
    unknown = [run for run in fitted if run not in named]
    if unknown:
        raise ConfigurationError(f"--fit {unknown[0]} is not among the runs to compare")
    found = compare(name, runs, fitted, named, time.time())
    for run in runs:
        if run.report is not None:
            own = run.report.model_copy(update={"effective_goodput": found.arm(run.run_id).effective_goodput})
            report.write(own, run.paths, report.validation_of(run.paths))
    found.write(paths.comparison(root, name, "json"))
    for kind in ("md", "html"):
        write_whole(paths.comparison(root, name, kind), render(kind, found, runs).encode())
    return found


def split(word: str) -> tuple[str, str]:
    """``RUN`` or ``RUN=PUBLISHED`` -> the run and the published arm it stands for."""
    run, _, key = word.partition("=")
    if key and key not in PUBLISHED:
        raise ConfigurationError(f"{word}: there is no published arm '{key}'; use one of {', '.join(PUBLISHED)}")
    return run, key


def render(kind: str, found: Comparison, runs: Sequence[Evidence]) -> str:
    """The page (``html``) or the text (``md``)."""
    reports = {run.run_id: run.report for run in runs if run.report is not None}
    costs = comparison_figures.costs_of(found)
    return report.environment_of().get_template(f"comparison.{kind}.j2").render(
        it=found,
        reports=reports,
        headline=headline(found),
        costs=costs,
        plots=comparison_figures,
        longest=max((one.wall_seconds for one in reports.values()), default=0.0),
        differs=differs,
        to_published=to_published,
        tables=[(table, [arm for arm in found.arms if arm.table == table]) for table in ("checkpoints", "faults")],
    )  # fmt: skip


def to_published(arm: Arm) -> str:
    """An arm with faults over its published one: training goodput, infrastructure goodput, recovery (below one is faster)."""
    assert arm.figures is not None
    if arm.published is None:
        return ""
    ours, theirs = arm.figures, arm.published
    pairs = (
        (ours.training_goodput_as_published, theirs.training_goodput),
        (ours.infrastructure_goodput, theirs.infrastructure_goodput),
        (ours.outage_seconds, theirs.recovery_seconds),
    )
    return ", ".join(f"{measured / published:.2f}" if published else "-" for measured, published in pairs)


def between(values: Sequence[float], say: Callable[[float], str]) -> str:
    """The range of what repetitions gave: never the best of them alone."""
    return say(values[0]) if len(values) == 1 else f"{say(values[0])} to {say(values[-1])}"


def headline(found: Comparison) -> str:
    """How it came out, in one or two sentences."""
    complete = sum(arm.complete for arm in found.arms)
    words = [f"{complete} of {len(found.arms)} runs are complete."]
    if found.recipe and found.best and found.best != found.recipe:
        best, recipe = found.arm(found.best), found.arm(found.recipe)
        assert best.figures and recipe.figures and best.times_recipe
        faults = f"{best.figures.faults} faults" if best.figures.faults > 1 else "fault"
        runs = next((group.runs for group in found.repeated if best.run in group.runs), (best.run,))
        values = sorted(found.arm(run).effective_goodput or 0.0 for run in runs)
        times = sorted(found.arm(run).times_recipe or 0.0 for run in runs)
        words.append(
            f"Through the same {faults}, {' and '.join(runs)} turned {between(values, figures.percent)} of their time into steps, "
            f"{between(times, '{:.2f}'.format)} times as much as the published recipe ({recipe.run}, "
            f"{figures.percent(recipe.figures.effective_goodput)})."
        )
        if found.noise is None:
            words.append("No arm was run twice, so this is a point and no more.")
        elif not differs(best.times_recipe, 1.0, found.noise):
            words.append(f"An arm differs from itself by up to {figures.percent(found.noise)}, so that is no difference.")
    if found.worst_prediction is not None:
        assert found.worst_at_own_pace is not None and found.pace_spread is not None
        words.append(
            f"On the runs they were not fitted to, predictions were at most {100 * found.worst_at_own_pace:.1f} points off at the run's "
            f"own pace, {100 * found.worst_prediction:.1f} at the bare run's: the machine's pace differed by up to "
            f"{figures.percent(found.pace_spread)} between the runs."
        )
    return " ".join(words)
