"""A run's report in a few lines, for the end of ``run.py local``. Pure."""

from __future__ import annotations

import json
from collections import Counter

from trainer.paths import RunPaths
from trainer.records import RunReport


def summary_table(report: RunReport, run: RunPaths, *, short: bool = False) -> str:
    """Aligned lines: how far, what it was worth, what happened, what was lost, where the report lies."""
    state = "complete" if report.complete else f"not complete ({report.incomplete_reason})"
    html = str(run.report("html"))
    if short:
        return f"run '{report.run_id}' {state}: {html}"
    rows = [
        ("run", f"{report.run_id}, {state}: {report.steps_completed} of {report.config.max_steps} steps"),
        ("goodput", f"{report.training_goodput:.1%} training, {report.infrastructure_goodput:.1%} infrastructure"),
        ("faults", _faults(report)),
        ("lost steps", f"{report.lost_steps} trained again, {report.committed_steps_lost} of them committed before"),
        ("checkpoints", f"{report.checkpoints.committed} committed; {_validation(report)}"),
        ("wall time", f"{report.wall_seconds:.1f} s"),
        ("report", html),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def summary_line(report: RunReport | None, run: RunPaths, message: str = "") -> str:
    """The same as one JSON object."""
    fields = {"summary": run.run_id, "message": message, "report": str(run.report("html"))}
    if report is not None:
        fields |= report.model_dump(
            mode="json",
            include={
                "complete", "steps_completed", "wall_seconds", "training_goodput", "infrastructure_goodput",
                "lost_steps", "committed_steps_lost", "restarts", "final_loss",
            },
        ) | {"faults": len(report.faults)}  # fmt: skip
    return json.dumps(fields)


def _faults(report: RunReport) -> str:
    if not report.faults:
        return "none"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(f.kind for f in report.faults).items()))
    lost = sum(fault.recovered_by == "none" for fault in report.faults)
    return f"{len(report.faults)} ({kinds}), {'all recovered' if not lost else f'{lost} not recovered'}"


def _validation(report: RunReport) -> str:
    counts = report.validation
    return f"{counts.valid} kept and valid" + (f", {counts.invalid} invalid" if counts.invalid else "")
