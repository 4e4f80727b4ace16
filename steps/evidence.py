"""What a run left behind, read for a comparison: its report, its event files, and all that is wrong with either.

Nothing that is missing, torn, unfinished or of another version raises here: it becomes a line that names the run, which
the comparison shows. A run that is not complete gives no figures; one whose event files are not whole gives some, to
which nothing is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steps.history import World, aligned, worlds
from steps.ledger import waits
from steps.report import assemble
from steps.runs import clock
from trainer.errors import ConfigurationError, DataError
from trainer.events import Event, EventFile, in_order, read_files
from trainer.paths import RunPaths
from trainer.records import RunReport

SUM_TOLERANCE = 0.01
"""Of the wall time: what the intervals may fail to explain."""


@dataclass(frozen=True)
class Evidence:
    """One run. ``report`` is None where not even that could be made."""

    paths: RunPaths
    report: RunReport | None
    files: tuple[EventFile, ...]
    waits: Mapping[str, float]
    """Seconds that the loop waited for checkpoints, by reason (save, drain, snapshot), of the rank that waited longest."""
    problems: tuple[str, ...]
    whole: bool
    """Each of its processes left an event file, of which every line can be read."""

    @property
    def run_id(self) -> str:
        return self.paths.run_id


def examine(paths: RunPaths) -> Evidence:
    """Read a run; what is wrong with it is in ``problems``."""
    files = tuple(read_files(paths.events)) if paths.events.is_dir() else ()
    events = in_order(files)
    try:
        report = assemble(paths, happened=events)
    except ConfigurationError:
        return Evidence(paths, None, files, {}, ("it never began: there is no record of it",), whole=False)
    except DataError as error:
        return Evidence(paths, None, files, {}, (f"its record cannot be read, or is of another version: {error}",), whole=False)
    happened = worlds(aligned(events))
    damage = _about_files(files, events, happened)
    waited = waits(happened, lambda stall: stall.reason)
    return Evidence(paths, report, files, waited, (*damage, *_about_report(report)), whole=not damage)


def _about_files(files: Sequence[EventFile], events: Sequence[Event], happened: Sequence[World]) -> list[str]:
    """Lines that are no events, and processes that left none."""
    found = [
        f"{file.name}: {file.unreadable} line{'s' if file.unreadable > 1 else ''} torn, or of another version, left out"
        for file in files
        if file.unreadable
    ]
    if not files:
        return ["it has no event files"]
    roles = {event.role for event in events}
    found += [f"no event file of a {role} is there" for role in ("supervisor", "node") if role not in roles]
    for world in happened:
        absent = world.size - len(world.highest_ends)
        if world.executed and absent > 0:
            found.append(f"{absent} of {world.size} ranks that trained from {clock(world.began)} on left no event file")
    return found


def _about_report(report: RunReport) -> list[str]:
    found = [] if report.complete else [f"it is not complete: {report.incomplete_reason}"]
    total = sum(report.breakdown_seconds.model_dump().values())
    if abs(total - report.wall_seconds) > SUM_TOLERANCE * report.wall_seconds:
        found.append(f"its intervals sum to {total:.2f} s, its wall time is {report.wall_seconds:.2f} s")
    if report.validation.invalid:
        found.append(f"{report.validation.invalid} of its checkpoints are not valid")
    if report.committed_steps_lost:
        found.append(f"{report.committed_steps_lost} committed steps had to be run again")
    unplanned = sum(not fault.injected for fault in report.faults)
    if unplanned:
        found.append(f"{unplanned} interruption{'s' if unplanned > 1 else ''} that nobody injected")
    return found
