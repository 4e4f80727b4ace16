"""The runs under a root: which there are, how far one is and what it survived, and what its processes printed.

Each function returns plain data (``as_plain`` makes JSON of it); ``steps.run_tables`` shows it. Nothing here writes to a
run, takes a lock or needs torch, so that looking at a run never disturbs it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import ValidationError

from steps.figures import seconds
from steps.goodput import Expectation, analyse
from trainer import events
from trainer.config import RunConfig
from trainer.errors import ConfigurationError, DataError
from trainer.events import Event
from trainer.paths import CHECKPOINT_NAME, RunPaths, runs
from trainer.progress import read_entries, read_now
from trainer.records import FaultReport, Outcome, Restarts, RunRecord, RunReport, TierReport

State = Literal["complete", "running", "silent", "stopped", "failed", "new"]

SILENT_SECONDS = 120.0
"""A run that has not ended and whose processes have said nothing for so long may have been cut off."""

STOPPED_CODES = (75, 130, 143)


@dataclass(frozen=True)
class RunSummary:
    """A run in a list."""

    run_id: str
    state: State
    step: int
    """The newest completed step, 0 if there is none."""
    max_steps: int
    loss: float | None
    tokens_per_second: float
    restarts: int
    """Entries into training after the first, of whatever layer."""
    goodput: float | None
    """Of the last report."""
    model: str
    ranks: int
    created: float
    silent_seconds: float
    """Since the last sign of life."""
    message: str
    """Why it stopped or failed."""


@dataclass(frozen=True)
class RunStatus:
    """How far a run is and what it survived."""

    summary: RunSummary
    directory: str
    attempts: int
    wall_seconds: float
    training_goodput: float
    infrastructure_goodput: float
    breakdown_seconds: dict[str, float]
    seconds_left: float | None
    """Until the last step at the pace of the run so far, restarts included; none unless it is running."""
    faults: tuple[FaultReport, ...]
    lost_steps: int
    committed_steps_lost: int
    restarts: Restarts
    checkpoints: TierReport
    snapshots: TierReport
    checkpoints_on_disk: tuple[int, ...]
    reports: tuple[str, ...]
    """The files of its report, if it has been made."""


@dataclass(frozen=True)
class LogFile:
    """What one process of a step printed."""

    path: str
    step: str
    attempt: int
    rank: int
    bytes: int
    modified: float


def as_plain(value: Any) -> Any:
    """Data of this module as what ``json.dumps`` takes."""
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "__dataclass_fields__"):
        return {key: as_plain(getattr(value, key)) for key in value.__dataclass_fields__}
    return value


def read_run(paths: RunPaths) -> RunRecord:
    """run.json; ``ConfigurationError`` (64) when there is no such run."""
    try:
        return RunRecord.read(paths.record)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"--run-id: there is no run '{paths.run_id}' under {paths.root} ({paths.record} does not exist); check --root, or train first"
        ) from None


def list_runs(root: Path, now: float | None = None) -> list[RunSummary]:
    """The runs under ``root``, the newest first; a run whose record cannot be read is listed as failed, with the reason."""
    if not root.is_dir():
        raise ConfigurationError(f"--root {root} does not exist")
    found: list[RunSummary] = []
    for directory in sorted(runs(root).iterdir()) if runs(root).is_dir() else []:
        paths = RunPaths(root, directory.name)
        try:
            found.append(summarise(paths, now))
        except ConfigurationError:
            continue  # a directory that a download has made, and nothing has been trained in
        except DataError as error:
            found.append(_unreadable(directory.name, str(error)))
    return sorted(found, key=lambda run: -run.created)


def _unreadable(run_id: str, reason: str) -> RunSummary:
    return RunSummary(run_id, "failed", 0, 0, None, 0.0, 0, None, "", 0, 0.0, 0.0, reason)


def summarise(paths: RunPaths, now: float | None = None) -> RunSummary:
    """What a few small files say of a run; ``ConfigurationError`` if there is none."""
    record = read_run(paths)
    config = record.config
    now = time.time() if now is None else now
    progress = read_now(paths)
    quiet = max(0.0, now - last_sign(paths, record.created))
    state, message = state_of(paths, quiet)
    report = read_report(paths)
    return RunSummary(
        run_id=config.run_id,
        state=state,
        step=max(0, progress.step),
        max_steps=config.max_steps,
        loss=progress.loss if progress.step > 0 else None,
        tokens_per_second=progress.tokens_per_second,
        restarts=max(0, read_entries(paths) - 1),
        goodput=report.training_goodput if report else None,
        model=config.model,
        ranks=config.world_size,
        created=record.created,
        silent_seconds=quiet,
        message=message,
    )


def state_of(paths: RunPaths, silent_seconds: float) -> tuple[State, str]:
    """A run's state, and why it is not going on."""
    if paths.finished.exists():
        return "complete", ""
    last = last_supervisor_event(paths)
    if last is None:
        return "new", "training has not begun"
    if last.event != "supervisor_end":
        if silent_seconds > SILENT_SECONDS:
            return "silent", f"no sign of life for {seconds(silent_seconds)}"
        return "running", ""
    code = last.data.get("exit_code")
    outcome = last_outcome(paths)
    said = str(last.data.get("message") or (outcome.message if outcome and outcome.exit_code else ""))
    if code in STOPPED_CODES:
        return "stopped", f"stopped ({said or f'exit code {code}'}); the next attempt resumes"
    return "failed", f"exit code {code}{f': {said}' if said else ''}"


def last_supervisor_event(paths: RunPaths) -> Event | None:
    """The last start or end of a supervisor: its files are small and name their role."""
    last: Event | None = None
    for path in paths.events.glob("*-supervisor-*.jsonl"):
        for text in path.read_bytes().split(b"\n"):
            if text:
                try:
                    event = Event.model_validate_json(text)
                except ValidationError:
                    continue  # torn, as events.read tolerates it
                if event.event in ("supervisor_start", "supervisor_end") and (last is None or event.time >= last.time):
                    last = event
    return last


def last_sign(paths: RunPaths, created: float) -> float:
    """When a process of the run last wrote something."""
    return max([created, *(_modified(path) for path in (*paths.events.glob("*.jsonl"), paths.furthest))])


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def last_outcome(paths: RunPaths) -> Outcome | None:
    """The newest outcome file that says something went wrong, or else the newest one."""
    found: list[tuple[bool, float, Outcome]] = []
    for path in paths.outcome(0, 0, 0, 0).parent.glob("*.json"):
        try:
            outcome = Outcome.read(path)
            found.append((outcome.exit_code != 0, path.stat().st_mtime, outcome))
        except (OSError, DataError):
            continue
    return max(found, key=lambda item: item[:2])[2] if found else None


def read_report(paths: RunPaths) -> RunReport | None:
    """report.json, if there is one of this version."""
    try:
        return RunReport.read(paths.report("json"))
    except (OSError, DataError):
        return None


def status(paths: RunPaths, now: float | None = None) -> RunStatus:
    """The status of one run, from its events as they are now."""
    summary = summarise(paths, now)
    config = read_run(paths).config
    found = analyse(events.read(paths.events), expectation_of(config))
    left: float | None = None
    if summary.state == "running" and found.steps_completed and found.wall_seconds:
        left = (config.max_steps - found.steps_completed) * found.wall_seconds / found.steps_completed
    try:
        attempts = int(paths.fence.read_text())
    except (OSError, ValueError):
        attempts = 0
    made = [paths.report(kind) for kind in ("html", "md", "json")]
    return RunStatus(
        summary=summary,
        directory=str(paths.run),
        attempts=attempts,
        wall_seconds=found.wall_seconds,
        training_goodput=found.training_goodput,
        infrastructure_goodput=found.infrastructure_goodput,
        breakdown_seconds=found.breakdown.model_dump(),
        seconds_left=left,
        faults=found.faults,
        lost_steps=found.lost_steps,
        committed_steps_lost=found.committed_steps_lost,
        restarts=found.restarts,
        checkpoints=found.checkpoints,
        snapshots=found.snapshots,
        checkpoints_on_disk=checkpoints_on_disk(paths),
        reports=tuple(str(path) for path in made if path.exists()),
    )


def expectation_of(config: RunConfig) -> Expectation:
    """What can be expected of a run without opening its dataset or its model."""
    return Expectation(config.max_steps, config.global_batch_size, ranks_per_node=config.gpus_per_node)


def checkpoints_on_disk(paths: RunPaths) -> tuple[int, ...]:
    """Steps of the committed checkpoints that retention has kept, in order."""
    if not paths.checkpoints.is_dir():
        return ()
    return tuple(sorted(int(match[1]) for path in paths.checkpoints.iterdir() if (match := CHECKPOINT_NAME.match(path.name))))


def log_files(paths: RunPaths, step: str | None = None, attempt: int | None = None, rank: int | None = None) -> list[LogFile]:
    """The logs of a run, by step, attempt and rank; of the newest attempt unless one is named.

    ``ConfigurationError`` if there are none that match, naming those that there are.
    """
    read_run(paths)
    everything = _all_logs(paths)
    found = [log for log in everything if step in (None, log.step) and rank in (None, log.rank)]
    if attempt is None and found:
        newest = {name: max(log.attempt for log in found if log.step == name) for name in {log.step for log in found}}
        found = [log for log in found if log.attempt == newest[log.step]]
    elif attempt is not None:
        found = [log for log in found if log.attempt == attempt]
    if not found:
        there = ", ".join(sorted({f"{log.step}/{log.attempt}/rank-{log.rank}" for log in everything})[:8]) or "none"
        raise ConfigurationError(f"run '{paths.run_id}' has no such log; there are: {there}")
    return found


def _all_logs(paths: RunPaths) -> list[LogFile]:
    top = paths.logs("x", 0).parent.parent
    found: list[LogFile] = []
    for path in sorted(top.glob("*/*/rank-*.log")):
        attempt, rank = path.parent.name, path.stem.removeprefix("rank-")
        if attempt.isdigit() and rank.isdigit():
            stat = path.stat()
            found.append(LogFile(str(path), path.parent.parent.name, int(attempt), int(rank), stat.st_size, stat.st_mtime))
    return sorted(found, key=lambda log: (log.step, log.attempt, log.rank))


def tail(log: LogFile, lines: int | None = None) -> list[str]:
    """The last ``lines`` lines of a log (all of them if none is given), whatever bytes are in it."""
    with Path(log.path).open(encoding="utf-8", errors="replace", newline="\n") as file:
        return [line.rstrip("\n") for line in (file if lines is None else deque(file, maxlen=lines))]


def follow(
    paths: RunPaths, step: str | None = None, rank: int | None = None, poll_seconds: float = 0.2
) -> Iterator[tuple[LogFile, str]]:
    """Whole lines as they are printed from now on, for ever; the logs of a later attempt too, from their beginning."""
    offsets = {log.path: log.bytes for log in log_files(paths, step, None, rank)}
    rest: dict[str, bytes] = {}
    with ExitStack() as stack:
        streams: dict[str, BinaryIO] = {}
        while True:
            idle = True
            for log in log_files(paths, step, None, rank):
                if log.path not in streams:
                    streams[log.path] = stack.enter_context(Path(log.path).open("rb"))
                    streams[log.path].seek(offsets.get(log.path, 0))
                *whole, rest[log.path] = (rest.get(log.path, b"") + streams[log.path].read()).split(b"\n")
                for text in whole:
                    idle = False
                    yield log, text.decode(errors="replace")
            if idle:
                time.sleep(poll_seconds)


def clock(at: float) -> str:
    """A wall clock time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
