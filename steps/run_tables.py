"""What ``steps.runs`` found, as tables and lines for a terminal (rich)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from steps.figures import number, percent, seconds, size
from steps.runs import LogFile, RunStatus, RunSummary, State, clock
from trainer.records import FaultReport

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

STYLES: dict[State, str] = {
    "complete": "green", "running": "cyan", "silent": "yellow", "stopped": "yellow", "failed": "red", "new": "dim",
}  # fmt: skip


def render_list(found: Sequence[RunSummary]) -> RenderableType:
    """A table of runs."""
    from rich.table import Table
    from rich.text import Text

    if not found:
        return Text("no runs")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, right in (("run", False), ("state", False), ("step", True), ("loss", True), ("tokens/s", True),
                        ("restarts", True), ("goodput", True), ("model", False), ("ranks", True), ("began", False), ("", False)):  # fmt: skip
        table.add_column(name, justify="right" if right else "left", no_wrap=bool(name), overflow="fold")
    for run in found:
        table.add_row(
            Text(run.run_id, style="bold"),
            Text(run.state, style=STYLES[run.state]),
            f"{run.step:,}/{run.max_steps:,}",
            f"{run.loss:.4f}" if run.loss is not None else "",
            number(run.tokens_per_second) if run.tokens_per_second else "",
            str(run.restarts),
            percent(run.goodput) if run.goodput is not None else "",
            run.model,
            str(run.ranks),
            clock(run.created) if run.created else "",
            Text(run.message, style="dim"),
        )
    return table


def render_status(it: RunStatus) -> RenderableType:
    """A run's state in a few lines and tables."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    run = it.summary
    head = Text.assemble((run.run_id, "bold"), "  ", (run.state, STYLES[run.state]), (f"  {run.message}" if run.message else "", "dim"))
    bar = ProgressBar(total=max(1, run.max_steps), completed=run.step, width=40)
    parts: list[RenderableType] = [head, bar, Padding(_figures_table(it), (1, 0))]
    if it.faults:
        parts.append(_faults_table(it.faults))
    if it.reports:
        parts.append(Text(f"\nreport: {it.reports[0]}", style="dim"))
    return Group(*parts)


def _figures_table(it: RunStatus) -> Table:
    from rich.table import Table

    run, tiers, layers = it.summary, it.checkpoints, it.restarts
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    left = f", about {seconds(it.seconds_left)} left" if it.seconds_left is not None else ""
    table.add_row("step", f"{run.step:,} of {run.max_steps:,}{left}")
    if run.loss is not None:
        table.add_row("loss", f"{run.loss:.4f}, {number(run.tokens_per_second)} tokens/s on {run.ranks} ranks")
    table.add_row("wall", f"{seconds(it.wall_seconds)}, {it.attempts} attempt{'s' if it.attempts != 1 else ''}, last sign of life {seconds(run.silent_seconds)} ago")
    table.add_row("goodput", f"{percent(it.training_goodput)} training, {percent(it.infrastructure_goodput)} infrastructure")
    table.add_row("restarts", f"{layers.in_process} in-process, {layers.in_job} in-job, {layers.pod} pod, {layers.workflow} workflow")
    kept = ", ".join(map(str, it.checkpoints_on_disk)) or "none"
    table.add_row("checkpoints", f"{tiers.committed} committed ({size(tiers.bytes)} each), on disk: {kept}")
    if it.snapshots.committed:
        table.add_row("snapshots", f"{it.snapshots.committed} whole ({size(it.snapshots.bytes)} each)")
    table.add_row("lost", f"{it.lost_steps} steps run again, {it.committed_steps_lost} of them committed")
    return table


def _faults_table(faults: Sequence[FaultReport]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("fault", "step", "rank", "detection", "recovery", "lost steps"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    table.add_column("recovered by")
    for fault in faults:
        by = fault.recovered_by.replace("_", "-") if fault.recovered_by != "none" else "[red]nobody yet[/red]"
        rank = str(fault.rank) if fault.rank >= 0 else ""
        cost = seconds(fault.detection_seconds), seconds(fault.recovery_seconds)
        table.add_row(fault.kind, str(fault.step), rank, *cost, str(fault.lost_steps), by)
    return table


def render_log(log: LogFile, text: str, *, named: bool) -> RenderableType:
    """A line of a log, with the name of its process where several are shown."""
    from rich.text import Text

    return Text.assemble((f"{log.step} {log.rank} | ", "dim"), text) if named else Text(text)
