"""Report a run: ``report.json``, ``report.md`` and ``report.html`` from its events and records; or compare several.

    python -m steps.report --root DIR --run-id ID [--bare-run ID]
    python -m steps.report --root DIR RUN RUN ...                      see ``steps.compare``

A report of a run that failed, or that still goes on, is made as well: it says so, and why. What the numbers mean is said
in ``steps.goodput``. For Argo it leaves the output parameters ``goodput``, ``faults`` and ``lost-steps``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from steps import figures
from steps.goodput import Analysis, Expectation, analyse
from steps.runs import clock, last_outcome, read_run
from trainer import events
from trainer.config import OneLineParser, add_flags, from_namespace
from trainer.errors import ConfigurationError, DataError, PipelineError, exit_with
from trainer.events import Event
from trainer.paths import RunPaths
from trainer.records import RunRecord, RunReport, ValidationCounts, ValidationReport, write_whole

if TYPE_CHECKING:
    import jinja2

STEP = "report"


def main(argv: list[str] | None = None) -> int:
    """Entry of the step."""
    parser = OneLineParser(prog="python -m steps.report", description="report what a run was worth")
    add_flags(parser, ("root", "run_id"))
    parser.add_argument("--bare-run", default="", metavar="RUN", help="a run without faults and saves, for effective goodput")
    several = parser.add_argument_group("several runs")
    several.add_argument("runs", nargs="*", metavar="RUN[=PUBLISHED]", help="compare these; the published arm that one stands for")
    several.add_argument("--name", default="comparison", help="name of the comparison [comparison]")
    several.add_argument("--fit", default="", metavar="RUN,RUN", help="runs that predictions take their costs from")
    args: argparse.Namespace = parser.parse_args(argv)
    if len(args.runs) > 1:
        return _compare(args)
    if args.runs:
        args.run_id = args.runs[0].partition("=")[0]
    config = from_namespace(args)
    paths = RunPaths(config.root, config.run_id)
    report = assemble(paths, RunPaths(config.root, args.bare_run) if args.bare_run else None)
    write(report, paths, validation_of(paths))
    print(headline(report))
    print(f"report: {paths.report('html')}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from steps import compare
    from trainer.paths import comparison

    root = from_namespace(args).root.absolute()
    found = compare.compare_runs(root, args.name, args.runs, [run for run in args.fit.split(",") if run])
    for problem in found.problems:
        print(f"warning: {problem}", file=sys.stderr)
    print(compare.headline(found))
    print(f"report: {comparison(root, args.name, 'html')}")
    return 0


def assemble(paths: RunPaths, bare: RunPaths | None = None, happened: Sequence[Event] | None = None) -> RunReport:
    """The report of the run at ``paths``. ``bare`` is a run whose median step effective goodput is measured with;
    ``happened`` are the run's events, where they have been read already.

    Raises ``ConfigurationError`` if one of the runs does not exist.
    """
    record = read_run(paths)
    happened = list(events.read(paths.events)) if happened is None else happened
    expected = expectation(record, bare_step_seconds(bare) if bare is not None else None)
    found = analyse(happened, expected)
    verdicts = validation_of(paths)
    valid = [verdict.valid for verdict in verdicts.verdicts if verdict.kind != "stray"] if verdicts else []
    # (A rank that died between its last commit and the event of it leaves the supervisor's word.)
    saved = record.config.checkpoint_mode == "off" or found.last_commit >= record.config.max_steps or paths.finished.exists()
    complete = found.steps_completed >= record.config.max_steps and saved
    return RunReport(
        run_id=record.config.run_id,
        config=record.config,
        versions=record.versions,
        hardware=record.hardware,
        complete=complete,
        incomplete_reason="" if complete else incomplete_reason(paths, happened, found, record),
        started=found.started,
        steps_completed=found.steps_completed,
        replayed_steps=found.replayed_steps,
        wall_seconds=found.wall_seconds,
        breakdown_seconds=found.breakdown,
        training_goodput=found.training_goodput,
        infrastructure_goodput=found.infrastructure_goodput,
        effective_goodput=found.effective_goodput,
        faults=found.faults,
        lost_steps=found.lost_steps,
        committed_steps_lost=found.committed_steps_lost,
        restarts=found.restarts,
        checkpoints=found.checkpoints,
        snapshots=found.snapshots,
        validation=ValidationCounts(valid=valid.count(True), invalid=valid.count(False)),
        throughput=found.throughput,
        final_loss=found.final_loss,
        data_continuity=found.data_continuity,
        stragglers=found.stragglers,
        timeline=found.timeline,
        losses=found.losses,
        commits=found.commits,
    )


def expectation(record: RunRecord, bare_step: float | None = None) -> Expectation:
    """What the numbers of a run depend on, besides its events."""
    config = record.config
    peak = record.hardware.get("peak_flops")
    return Expectation(
        max_steps=config.max_steps,
        global_batch_size=config.global_batch_size,
        ranks_per_node=config.gpus_per_node,
        samples=_samples(record),
        flops_per_token=_flops_per_token(record) if peak else None,
        peak_flops=float(peak) if peak else None,
        bare_step_seconds=bare_step,
    )


def _samples(record: RunRecord) -> int | None:
    """Training samples in the run's dataset; None when the dataset has been deleted since."""
    from trainer.data import TokenDataset

    try:
        return TokenDataset(Path(record.dataset), record.config.sequence_length).samples
    except PipelineError:
        return None


def _flops_per_token(record: RunRecord) -> float | None:
    """Of forward and backward, for MFU; None when the vocabulary cannot be known any more."""
    from trainer.model import flops_per_token, model_config
    from trainer.paths import MANIFEST
    from trainer.records import DatasetManifest

    try:
        vocabulary = DatasetManifest.read(Path(record.dataset) / MANIFEST).vocabulary_size
        return flops_per_token(model_config(record.config.model, vocabulary), record.config.sequence_length)
    except (OSError, PipelineError):
        return None


def bare_step_seconds(bare: RunPaths) -> float:
    """The median step of the run at ``bare``; ``ConfigurationError`` if it has none."""
    record = read_run(bare)
    median = analyse(events.read(bare.events), expectation(record)).throughput.median_step_seconds
    if not median:
        raise ConfigurationError(f"--bare-run: run '{bare.run_id}' has no completed step to measure with")
    return median


def validation_of(paths: RunPaths) -> ValidationReport | None:
    """validation.json; None where the run was not validated. One that cannot be read does not keep a report from being made."""
    try:
        return ValidationReport.read(paths.validation)
    except FileNotFoundError:
        return None
    except DataError as error:
        print(f"warning: {error}", file=sys.stderr)
        return None


def incomplete_reason(paths: RunPaths, happened: Sequence[Event], found: Analysis, record: RunRecord) -> str:
    """Why a run is not complete: the supervisor's last words, or a worker's, or that there are none."""
    supervisor = [event for event in happened if event.role == "supervisor" and event.event.startswith("supervisor_")]
    outcome = last_outcome(paths)
    if supervisor and supervisor[-1].event == "supervisor_end":
        code, message = supervisor[-1].data.get("exit_code"), supervisor[-1].data.get("message")
        if code != 0 or message:
            worker = f"; rank {outcome.rank} said: {outcome.message}" if outcome and outcome.exit_code and not message else ""
            return f"the last attempt ended with exit code {code}{f': {message}' if message else worker}"
    if outcome is not None and outcome.exit_code:
        return f"rank {outcome.rank} ended with exit code {outcome.exit_code}: {outcome.message}"
    if not happened:
        return "training has not begun: there are no events"
    if found.steps_completed >= record.config.max_steps:
        return f"all {record.config.max_steps} steps are done, but the last of them is not committed"
    return f"it is still going on, or was cut off: the last sign of life is of {clock(happened[-1].time)}"


def write(report: RunReport, paths: RunPaths, validation: ValidationReport | None) -> None:
    """The three files, each whole or not at all, and the output parameters."""
    report.write(paths.report("json"))
    write_whole(paths.report("md"), render("report.md.j2", report, validation).encode())
    write_whole(paths.report("html"), render("report.html.j2", report, validation).encode())
    goodput = report.effective_goodput if report.effective_goodput is not None else report.training_goodput
    outputs = {"goodput": f"{goodput:.4f}", "faults": str(len(report.faults)), "lost-steps": str(report.lost_steps)}
    for name, value in outputs.items():
        write_whole(paths.output(STEP, name), value.encode())


def render(template: str, report: RunReport, validation: ValidationReport | None) -> str:
    """``template`` (a file beside this one) filled with the report."""
    return environment_of().get_template(template).render(report=report, validation=validation, headline=headline(report))


def environment_of() -> jinja2.Environment:
    """Templates are the files beside this one; HTML is escaped, and a name that is not given is an error."""
    import jinja2

    def source(name: str) -> str | None:
        path = files(__package__).joinpath(name)
        return path.read_text(encoding="utf-8") if path.is_file() else None

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(source),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "seconds": figures.seconds, "percent": figures.percent, "size": figures.size, "number": figures.number,
        "clock": clock, "cell": cell,
    }  # fmt: skip
    environment.globals |= {"figures": figures, "facts": facts}
    return environment


def headline(report: RunReport) -> str:
    """The verdict in one sentence."""
    wall = figures.seconds(report.wall_seconds)
    stops = sum(fault.kind == "stop" for fault in report.faults)
    count = len(report.faults) - stops
    faults = "no fault" if not count else f"{count} fault{'s' if count > 1 else ''}"
    faults += f" and {stops} stop{'s' if stops > 1 else ''} by the infrastructure" if stops else ""
    if not report.complete:
        done = f"{report.steps_completed} of {report.config.max_steps} steps are done after {faults} and {wall}"
        return f"Run {report.run_id} is not complete: {done}. {report.incomplete_reason[:1].upper()}{report.incomplete_reason[1:]}."
    goodput = report.effective_goodput if report.effective_goodput is not None else report.training_goodput
    kept = (
        "nothing that was committed was lost"
        if not report.committed_steps_lost
        else f"{report.committed_steps_lost} committed steps had to be run again"
    )
    through = f"survived {faults}" if count or stops else "met no fault"
    return (
        f"Run {report.run_id} {through} and finished {report.steps_completed} steps in {wall}: "
        f"{figures.percent(goodput)} of the time was productive, and {kept}."
    )


def facts(report: RunReport) -> list[tuple[str, str, str]]:
    """The key figures: name, value, what it means."""
    rate, tiers = report.throughput, report.checkpoints
    cost = report.breakdown_seconds.detection + report.breakdown_seconds.recovery + report.breakdown_seconds.replay
    stops = sum(fault.kind == "stop" for fault in report.faults)
    stopped = f"{stops} of them stops by the infrastructure; " if stops else ""
    rows = [
        ("effective goodput", figures.percent(report.effective_goodput), "steps at a bare run's pace, over the wall time"),
        ("training goodput", figures.percent(report.training_goodput), "of the wall time in steps that stood"),
        ("infrastructure goodput", figures.percent(report.infrastructure_goodput), "of the wall time not spent on restarts"),
        ("steps", f"{report.steps_completed:,} / {report.config.max_steps:,}", "completed by all ranks"),
        ("wall time", figures.seconds(report.wall_seconds), "first launch to the last step or commit"),
        ("faults", str(len(report.faults)), f"{stopped}cost {figures.seconds(cost)} with what was replayed"),
        ("lost steps", f"{report.lost_steps:,}", f"completed and rolled back; {report.committed_steps_lost:,} of them committed"),
        ("checkpoints", f"{tiers.committed:,}", f"the loop waited {figures.seconds(tiers.mean_stall_seconds)} for each"),
        ("tokens/s", figures.number(rate.tokens_per_second), f"while productive; {figures.number(rate.tokens_per_second_per_gpu)} per rank"),
        ("MFU", figures.percent(rate.mfu), "of the hardware's peak"),
        ("median step", figures.seconds(rate.median_step_seconds), "without stalls"),
        ("final loss", "–" if report.final_loss is None else f"{report.final_loss:.4f}", "nats per token"),
    ]
    absent = {"effective goodput": report.effective_goodput is None, "MFU": rate.mfu is None}
    return [row for row in rows if not absent.get(row[0], False)]


def cell(text: object) -> str:
    """Text that cannot break out of a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


if __name__ == "__main__":
    exit_with(main)
