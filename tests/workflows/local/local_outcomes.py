"""What became of a workflow, in the form in which the real controller's outcomes are kept: comparable between the two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workflows import local

Outcome = dict[str, Any]


def masked(value: Any, name: str) -> Any:
    """``value`` with the workflow's generated name replaced by WF."""
    if isinstance(value, str):
        return value.replace(name, "WF")
    if isinstance(value, dict):
        return {key: masked(inside, name) for key, inside in value.items()}
    if isinstance(value, list):
        return [masked(inside, name) for inside in value]
    return value


def of_workflow(workflow: dict[str, Any]) -> Outcome:
    """The outcome of a Workflow with its status, Argo's or ours: phase and nodes, without times and generated names."""
    name, status = workflow["metadata"]["name"], workflow.get("status") or {}
    nodes = []
    for node in (status.get("nodes") or {}).values():
        outputs = node.get("outputs") or {}
        entry = {
            "path": node["name"],
            "type": node["type"],
            "phase": node["phase"],
            "template": node.get("templateName", ""),
            "inputs": {p["name"]: p.get("value") for p in (node.get("inputs") or {}).get("parameters") or ()},
            "exit_code": outputs.get("exitCode"),
            "result": outputs.get("result"),
            "parameters": {p["name"]: p.get("value") for p in outputs.get("parameters") or ()},
            "message": node.get("message", ""),
        }
        nodes.append(
            {
                key: masked(value, name)
                for key, value in entry.items()
                if value not in (None, {}, "") or key == "template"
            }
        )
    return {
        "phase": status.get("phase"),
        "message": masked(status.get("message", ""), name),
        "outputs": masked(
            {p["name"]: p.get("value") for p in (status.get("outputs") or {}).get("parameters") or ()}, name
        ),
        "nodes": sorted(nodes, key=lambda entry: str(entry["path"])),
    }


_COMPARED = ("path", "type", "phase", "template", "inputs", "exit_code", "result", "parameters")


def timed_out(node: dict[str, Any]) -> bool:
    message = str(node.get("message", ""))
    return "deadline" in message or message == "timeout"


def comparable(outcome: Outcome, timeouts: frozenset[str] = frozenset()) -> set[str]:
    """The set that two outcomes must share; of nodes in ``timeouts`` only path and phase count."""
    found = set()
    for node in outcome["nodes"]:
        names = ("path", "phase") if node["path"] in timeouts else _COMPARED
        found.add(json.dumps({name: node.get(name) for name in names}, sort_keys=True))
    return found


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """What the two disagree about; empty if they agree."""
    timeouts = frozenset(n["path"] for outcome in (expected, found) for n in outcome["nodes"] if timed_out(n))
    lines = (
        [] if expected["phase"] == found["phase"] else [f"phase: {expected['phase']} expected, {found['phase']} found"]
    )
    if expected.get("outputs", {}) != found.get("outputs", {}):
        lines.append(f"outputs: {expected.get('outputs')} expected, {found.get('outputs')} found")
    wanted, given = comparable(expected, timeouts), comparable(found, timeouts)
    return (
        lines
        + [f"missing: {line}" for line in sorted(wanted - given)]
        + [f"extra: {line}" for line in sorted(given - wanted)]
    )


def run_side_by_side(files: Mapping[str, Path], root: Path, at_a_time: int = 10) -> dict[str, Outcome]:
    """Run files on the engine, several at a time since many only wait; name -> outcome."""

    def outcome(path: Path) -> Outcome:
        result = local.run(local.load(path), local.Options(root=root, display="quiet"))
        return of_workflow(json.loads(result.workflow_json.read_text()))

    with ThreadPoolExecutor(at_a_time) as pool:
        return dict(zip(files, pool.map(outcome, files.values()), strict=True))
