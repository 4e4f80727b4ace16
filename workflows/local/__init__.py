"""Runs a compiled Argo workflow on this machine, with Argo's semantics and no Kubernetes.

It reads YAML and nothing else: it never sees the objects the workflow was authored with.

    plan = load(path, {"message": "hello"})      # everything that can be refused is refused here
    result = run(plan, Options(root=Path("fsx"), volumes={"fsx": Path("fsx")}))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Display = Literal["auto", "plain", "json", "quiet"]


@dataclass(frozen=True)
class Options:
    """How to run a plan here."""

    root: Path
    """Where the state goes: ``<root>/workflows/<name>/``."""
    volumes: Mapping[str, Path] = field(default_factory=dict)
    """Claim name -> directory of this machine that stands in for it."""
    name: str | None = None
    """Of the workflow; None takes metadata.name, or metadata.generateName and a random suffix."""
    display: Display = "auto"
    """auto: a live tree on a terminal, else plain lines."""
    environment: Mapping[str, str] | None = None
    """Added to what the processes of the workflow see of this process's environment."""


@dataclass(frozen=True)
class Result:
    """How a workflow ended."""

    phase: str
    """Succeeded, Failed or Error."""
    exit_code: int
    """0, or the code of the step that failed, as the contract between layers maps it."""
    workflow_json: Path


@dataclass(frozen=True)
class Plan:
    """A workflow that was read and checked."""

    name: str | None
    document: Mapping[str, Any]


def load(path: Path, parameters: Mapping[str, str] | None = None) -> Plan:
    """Read and check a workflow file; ``ConfigurationError`` names the line and the field that is wrong."""
    raise NotImplementedError


def run(plan: Plan, options: Options) -> Result:
    """Run ``plan`` to its end. Raises ``ConfigurationError`` before anything starts when this machine cannot run it."""
    raise NotImplementedError


def resume(root: Path, name: str, options: Options) -> Result:
    """Go on with the workflow ``name`` whose engine was killed: finished nodes are kept, running ones run again."""
    raise NotImplementedError
