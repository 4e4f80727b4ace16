"""What a check found, and the table of all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from trainer.errors import ExitCode

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the table. ``fix`` says what to do about a warning or a failure."""

    area: str
    name: str
    status: Status
    detail: str
    fix: str = ""
    exit_code: int = int(ExitCode.UNAVAILABLE)
    """What the command ends with if this is the first failure."""


def exit_code(findings: Iterable[Finding]) -> int:
    return next((finding.exit_code for finding in findings if finding.status == "fail"), int(ExitCode.DONE))


def as_json(findings: Iterable[Finding]) -> str:
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def table(findings: list[Finding]) -> str:
    """Aligned lines, a fix below what needs one, and a count."""
    width = max((len(f"{finding.area} {finding.name}") for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status.upper():<4}  {f'{finding.area} {finding.name}':<{width}}  {finding.detail}")
        if finding.fix and finding.status != "pass":
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.fix}")
    counts = {status: sum(f.status == status for f in findings) for status in ("pass", "warn", "fail")}
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items()))
    return "\n".join(lines)
