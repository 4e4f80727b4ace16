"""What a caller says about a run, and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Display = Literal["auto", "plain", "json", "quiet"]


@dataclass(frozen=True)
class Options:
    """How to run a plan here."""

    root: Path
    """Where the state goes: ``<root>/workflows/<name>/``."""
    volumes: Mapping[str, Path] = field(default_factory=dict)
    """Claim name -> directory of this machine that stands in for it; others get one under ``<root>/volumes/``."""
    name: str | None = None
    """Of the workflow; None takes metadata.name, or metadata.generateName and a random suffix."""
    display: Display = "auto"
    """auto: a live tree on a terminal, else plain lines."""
    environment: Mapping[str, str] | None = None
    """Added to what the processes of the workflow see of this process's environment, which is all but its locale."""


@dataclass(frozen=True)
class Result:
    """How a workflow ended."""

    phase: str
    """Succeeded, Failed or Error."""
    exit_code: int
    """0, or the code of the step that failed, as the contract between layers maps it."""
    workflow_json: Path
