"""Runs side by side: what they are worth against each other, and what is wrong with some of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_run import SimulatedRun, write_run
from test_report import Page

from steps import report
from steps.compare import compare_runs
from steps.comparison import differs
from steps.comparison_record import Comparison
from steps.figures import percent
from trainer import paths
from trainer.config import RunConfig
from trainer.errors import ConfigurationError
from trainer.paths import RunPaths
from trainer.records import RunRecord, RunReport

STEPS = 20


def trained(*, stall: float = 0.0, fault: str = "", layer: str = "in_process", resume: int = 5, pace: float = 1.0) -> SimulatedRun:
    """Twenty steps, saved every five (each holds the loop for ``stall``), perhaps through a fault in step eight."""
    run = SimulatedRun()
    run.launch()
    run.begin(0, "startup", tier="none")
    while run.done < STEPS:
        if fault and run.index == 0 and run.done == 7:
            run.fault(fault)
            run.restart(layer, resume, tier="durable" if resume == 5 else "snapshot")
            continue
        saving = run.done % 5 == 4 and stall > 0
        run.step(pace + stall if saving else pace, stall=stall if saving else 0.0)
        if saving:
            run.commit()
    run.emit("supervisor_end", role="supervisor", exit_code=0, message="")
    return run


def leave(root: Path, run_id: str, run: SimulatedRun, record: dict[str, object] | None = None, **settings: object) -> RunPaths:
    shared: dict[str, object] = {"max_steps": STEPS, "warmup_steps": 1, "checkpoint_interval_steps": 5, "snapshot_interval_steps": 0}
    config = RunConfig.model_validate(shared | {"run_id": run_id, "root": root} | settings)
    for number, event in enumerate(run.events):
        run.events[number] = event.model_copy(update={"run_id": run_id})
    return write_run(run, root, config, **(record or {}))


FAULT = {"fault_count": 1, "fault_steps": "8", "fault_kinds": "exception"}
BARE = {"checkpoint_mode": "off", "recovery": "none"}
RECIPE = {"checkpoint_mode": "sync", "recovery": "in-process", **FAULT}
BEST = {"checkpoint_mode": "async", "recovery": "combined", "snapshot_interval_steps": 1, **FAULT}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    leave(tmp_path, "bare", trained(), **BARE)
    leave(tmp_path, "sync", trained(stall=2.0), checkpoint_mode="sync", recovery="none")
    leave(tmp_path, "recipe", trained(stall=2.0, fault="exception"), **RECIPE)
    leave(tmp_path, "best", trained(stall=0.1, fault="exception", resume=7), **BEST)
    return tmp_path


def make(root: Path, *words: str) -> Comparison:
    assert report.main(["--root", str(root), *words]) == 0
    return Comparison.read(paths.comparison(root, "comparison", "json"))


ALL = ("bare", "sync=sync-1000-2-nodes", "recipe=in-process", "best")


def test_arms_are_compared_with_the_bare_run_and_the_recipe(root: Path) -> None:
    found = make(root, *ALL, "--fit", "bare,recipe")
    assert (found.recipe, found.best) == ("recipe", "best")
    by_run = {arm.run: arm for arm in found.arms}
    for run_id, arm in by_run.items():
        own = RunReport.read(RunPaths(root, run_id).report("json"))
        assert arm.figures is not None and arm.figures.effective_goodput is not None
        assert arm.figures.effective_goodput == pytest.approx(STEPS * 1.0 / own.wall_seconds, rel=1e-3)
        assert own.effective_goodput == arm.figures.effective_goodput
        assert arm.bare_runs == ("bare",)
    best, recipe = by_run["best"].figures, by_run["recipe"].figures
    assert best is not None and recipe is not None and best.effective_goodput and recipe.effective_goodput
    assert by_run["best"].times_recipe == pytest.approx(best.effective_goodput / recipe.effective_goodput)
    assert [arm.table for arm in found.arms] == ["bare", "checkpoints", "faults", "faults"]


def test_the_published_formulas_stand_beside_ours(root: Path) -> None:
    found = make(root, *ALL)
    sync, recipe = found.arm("sync"), found.arm("recipe")
    assert sync.figures is not None and sync.published is not None and recipe.figures is not None
    assert sync.figures.efficiency_as_published == pytest.approx(20 / (20 + 4 * 2.0), rel=1e-3)
    assert sync.published.efficiency == 0.57
    assert recipe.published is not None and recipe.published.recovery_seconds == 10.0
    ours = recipe.figures
    ratios = (ours.training_goodput_as_published / 0.31, ours.infrastructure_goodput / 0.87, ours.outage_seconds / 10.0)
    for kind in ("md", "html"):
        assert ", ".join(f"{ratio:.2f}" for ratio in ratios) in paths.comparison(root, "comparison", kind).read_text()
    # Replayed steps count as training there, and not here.
    assert recipe.figures.training_goodput_as_published > recipe.figures.training_goodput


def test_predictions_stand_beside_measurements(root: Path) -> None:
    found = make(root, *ALL, "--fit", "bare,recipe")
    assert [arm.predicted.fitted if arm.predicted else None for arm in found.arms] == [True, False, True, False]
    for arm in found.arms[:3]:
        assert arm.predicted is not None and arm.figures is not None and arm.figures.effective_goodput is not None
        assert arm.predicted.effective_goodput == pytest.approx(arm.figures.effective_goodput, abs=0.03)
    best = found.arm("best")  # whose last save takes no time in the run that never was
    assert best.predicted is not None and best.figures is not None and best.figures.effective_goodput is not None
    assert found.worst_prediction == pytest.approx(abs(best.predicted.effective_goodput - best.figures.effective_goodput))
    assert make(root, *ALL).worst_prediction is None


def test_snapshots_that_predictions_have_for_nothing_are_named(root: Path) -> None:
    run = trained()
    run.commit("snapshot")
    leave(root, "snapshots", run, **BARE | {"snapshot_interval_steps": 1})

    def named(*fit: str) -> list[str]:
        found = make(root, *ALL, "snapshots", "--fit", ",".join(fit))
        return [problem.split(":")[0] for problem in found.problems if "have them for nothing" in problem]

    assert named("bare", "recipe") == ["best, snapshots"]
    assert named("bare", "recipe", "snapshots") == []
    assert named("recipe") == []  # which gives no costs, so that nothing is predicted


def test_every_number_names_its_event_files(root: Path) -> None:
    for arm in make(root, *ALL).arms:
        there = {path.name for path in RunPaths(root, arm.run).events.glob("*.jsonl")}
        assert {source.file for source in arm.sources} == there
        assert all(source.events for source in arm.sources)


def test_the_page_and_the_text_say_what_the_record_says(root: Path) -> None:
    found = make(root, *ALL, "--fit", "bare,recipe")
    html = paths.comparison(root, "comparison", "html").read_text()
    page, text = Page(html), paths.comparison(root, "comparison", "md").read_text()
    for told in (page.text, text):
        for arm in found.arms:
            assert arm.figures is not None
            assert arm.run in told and arm.label in told and percent(arm.figures.effective_goodput) in told
    tags = [tag for tag, _ in page.elements]
    assert not {"script", "link", "iframe", "img", "object", "embed", "base"} & set(tags)
    assert html.count("<table") == html.count('<div class="scroll" tabindex="0"><table'), "a table that is too wide scrolls, by keys too"
    assert "http:" not in html and "https:" not in html
    assert "57.0%" in page.text and "57.0%" in text


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("torn", "1 line torn"),
        ("version", "1 line torn, or of another version"),
        ("rank", "1 of 2 ranks"),
        ("supervisor", "no event file of a supervisor"),
        ("events", "it has no event files"),
        ("record", "cannot be read, or is of another version"),
        ("absent", "it never began"),
        ("unfinished", "it is not complete"),
    ],
)
def test_what_is_missing_or_torn_is_named(root: Path, damage: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunPaths(root, "best")
    trainer = sorted(run.events.glob("*trainer*"))[-1]
    match damage:
        case "torn":
            tear(root, "best")
        case "version":
            trainer.write_text('{"schema_version": 2, "event": "step_end"}\n' + trainer.read_text())
        case "rank":
            trainer.unlink()
        case "supervisor":
            next(run.events.glob("*supervisor*")).unlink()
        case "events":
            for path in run.events.glob("*"):
                path.unlink()
        case "record":
            run.record.write_text(run.record.read_text().replace('"schema_version": 1', '"schema_version": 9'))
        case "absent":
            run.run.rename(root / "elsewhere")
        case "unfinished":
            leave_unfinished(root)
    named = "unfinished" if damage == "unfinished" else "best"
    found = make(root, "bare", "recipe", named)
    assert any(problem.startswith(f"{named}: ") and reason in problem for problem in found.problems), found.problems
    assert reason in capsys.readouterr().err
    assert reason in paths.comparison(root, "comparison", "md").read_text()
    shown = damage in ("torn", "version", "supervisor")
    assert (found.arm(named).figures is not None) == shown
    assert found.best == "recipe", "it must not be compared as if it were whole"
    assert found.arm(named).times_recipe is None


def tear(root: Path, run_id: str) -> None:
    """As a process leaves its file that is killed while it writes a line."""
    with sorted(RunPaths(root, run_id).events.glob("*trainer*"))[-1].open("a") as file:
        file.write('{"schema_version": 1, "event": "st')


def test_nothing_is_taken_from_a_run_with_torn_files(root: Path) -> None:
    """Neither the recipe, a spread and a pair, the costs of predictions and their test, nor the step of a bare run."""
    words = [*ALL, "recipe-2", "best-2", "bare-2", "--fit", "bare,bare-2,recipe"]
    leave(root, "recipe-2", trained(stall=2.0, fault="exception", pace=1.01), **RECIPE)
    leave(root, "best-2", trained(stall=0.1, fault="exception", resume=7, pace=5.0), **BEST)
    leave(root, "bare-2", trained(pace=3.0), **BARE)
    for run_id in ("recipe", "best-2", "bare-2"):
        tear(root, run_id)
    found = make(root, *words)
    assert found.recipe == "recipe-2" and found.arm("recipe").times_recipe is None
    assert found.noise is None and found.repeated == () and found.ratios == ()
    assert found.costs is not None and found.costs["step"] == pytest.approx(1.0, rel=0.01) and not found.costs["restart"]
    assert found.pace_spread == pytest.approx(0.01, abs=0.005)
    assert {arm.bare_runs for arm in found.arms} == {("bare",)}
    for run_id in ("recipe", "best-2", "bare-2"):
        assert found.arm(run_id).figures is not None and not found.arm(run_id).whole
        assert any(problem.startswith(f"{run_id}: its figures are shown, but no") for problem in found.problems)
    for kind in ("md", "html"):
        assert paths.comparison(root, "comparison", kind).read_text().count("not compared") == 3


def leave_unfinished(root: Path) -> None:
    run = SimulatedRun()
    run.launch()
    run.begin(0, "startup", tier="none")
    run.step()
    leave(root, "unfinished", run, **BEST)


def test_runs_of_different_versions_are_named(root: Path) -> None:
    record = RunPaths(root, "best").record
    RunRecord.read(record).model_copy(update={"versions": {"torch": "9.9"}}).write(record)
    found = make(root, *ALL)
    assert any("differ in versions" in problem and "best with torch 9.9" in problem for problem in found.problems)


def test_an_arm_run_twice_shows_how_far_it_is_from_itself(root: Path) -> None:
    leave(root, "best-2", trained(stall=0.1, fault="exception", resume=7, pace=1.02), **BEST)
    found = make(root, *ALL, "best-2")
    assert [group.runs for group in found.repeated] == [("best", "best-2")]
    assert found.noise == pytest.approx(found.repeated[0].spread) and 0.005 < found.noise < 0.05
    assert differs(1.2, 1.0, found.noise) and not differs(1.001, 1.0, found.noise) and not differs(2.0, 1.0, None)
    assert found.ratios == ()  # the recipe was run once: nothing is paired


def test_five_pairs_give_an_interval(root: Path) -> None:
    for number in range(2, 6):
        leave(root, f"recipe-{number}", trained(stall=2.0, fault="exception", pace=1 + number / 200), **RECIPE)
        leave(root, f"best-{number}", trained(stall=0.1, fault="exception", resume=7, pace=1 + number / 250), **BEST)
    more = [f"{name}-{number}" for number in range(2, 6) for name in ("recipe", "best")]
    (ratio,) = make(root, *ALL, *more).ratios
    assert ratio.pairs == 5 and ratio.low is not None and ratio.high is not None
    assert 1.1 < ratio.low < ratio.ratio < ratio.high < 1.6


def test_repetitions_are_paired_by_their_number(root: Path) -> None:
    """Each repetition has a pace of its own, which falls out of every pair but not of a wrong one."""
    for number in range(2, 7):
        leave(root, f"recipe-{number}", trained(stall=2.0 * number, fault="exception", pace=number), **RECIPE)
        leave(root, f"best-{number}", trained(stall=0.1 * number, fault="exception", resume=7, pace=number), **BEST)
    RunPaths(root, "recipe-2").run.rename(root / "recipe-2")
    RunPaths(root, "best-4").run.rename(root / "best-4")
    found = make(root, *ALL, *(f"{name}-{number}" for number in range(2, 7) for name in ("recipe", "best")))
    (ratio,) = found.ratios
    assert ratio.pairs == 4 and ratio.low is None and ratio.high is None
    assert 1.1 < ratio.ratio < 1.6
    assert any(problem.startswith("best-2: repetition 2 of") and "no pair" in problem for problem in found.problems)
    assert any(problem.startswith("recipe-4: repetition 4 of") and "no pair" in problem for problem in found.problems)


def test_a_run_that_is_missing_costs_its_pair_and_no_more(root: Path) -> None:
    for number in range(2, 7):
        leave(root, f"recipe-{number}", trained(stall=2.0, fault="exception", pace=1 + number / 200), **RECIPE)
        leave(root, f"best-{number}", trained(stall=0.1, fault="exception", resume=7, pace=1 + number / 250), **BEST)
    RunPaths(root, "best-4").run.rename(root / "best-4")
    found = make(root, *ALL, *(f"{name}-{number}" for number in range(2, 7) for name in ("recipe", "best")))
    (ratio,) = found.ratios
    assert ratio.pairs == 5 and ratio.low is not None
    assert [problem.split(":")[0] for problem in found.problems if "no pair" in problem] == ["recipe-4"]


def test_without_a_bare_run_there_is_no_effective_goodput(root: Path) -> None:
    found = make(root, "recipe", "best")
    assert all(arm.figures is not None and arm.figures.effective_goodput is None for arm in found.arms)
    assert found.recipe == "" and any("no bare run" in problem for problem in found.problems)


def test_wrong_words_are_refused(root: Path) -> None:
    for words, fit, reason in (
        (["no", "such"], [], "none of the runs"),
        (["bare", "best=nothing"], [], "no published arm 'nothing'"),
        (["bare", "best"], ["other"], "--fit other"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            compare_runs(root, "x", words, fit)
