"""What a workflow leaves on disk, so that an engine that was killed can be followed by another.

``plan.json`` is written once. ``workflow.json`` is the Workflow in Argo's shape; writing it at every change would take too
long with thousands of nodes, so changes go to ``journal.jsonl`` as they happen, and the whole now and then and at the end.
The lock is held by the engine *and* by everything it started: who gets it knows that nothing of the last engine runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO, Any

from trainer.errors import ConfigurationError, DataError
from trainer.records import write_whole
from workflows.local.language.values import parse_timestamp
from workflows.local.nodes import Node
from workflows.local.plan import Plan, Raw
from workflows.local.state import WorkflowState

LOCK_PATIENCE = 8.0
"""Seconds to wait for the tasks of a killed engine to be gone."""


class Store:
    """The directory of one workflow, locked."""

    def __init__(self, directory: Path, *, patience: float = 0.0) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = (directory / "lock").open("a")
        self._take_lock(patience)
        self._journal: IO[str] | None = None
        self._changed: dict[str, Node] = {}
        self._written = 0.0
        self._cost = 0.0
        self._status: Raw = {}

    @property
    def workflow_json(self) -> Path:
        return self.directory / "workflow.json"

    @property
    def lock_handle(self) -> int:
        return self._lock.fileno()

    def _take_lock(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() >= deadline:
                    self._lock.close()
                    raise ConfigurationError(
                        f"workflow '{self.directory.name}' is being run by another process; wait for it, or give another name"
                    ) from None
                time.sleep(0.1)

    # --- writing -------------------------------------------------------------------------------------------------

    def begin(self, plan: Plan, state: WorkflowState) -> None:
        """Start a workflow that was never run."""
        saved = {
            name: getattr(plan, name)
            for name in ("file", "metadata", "spec", "original_spec", "library", "ignored", "reached")
        }
        write_whole(self.directory / "plan.json", json.dumps(saved).encode())
        self.write(state)

    def record(self, node: Node) -> None:
        """Note that a node changed."""
        self._changed[node.name] = node

    def flush(self, state: WorkflowState) -> None:
        """Put the changes where they survive this process."""
        status = {
            "phase": state.phase,
            "message": state.message,
            "started": state.started,
            "finished": state.finished,
            "outputs": state.outputs,
        }
        if not self._changed and status == self._status:
            return
        if self._journal is None:
            self._journal = (self.directory / "journal.jsonl").open("a", encoding="utf-8")
        lines = [json.dumps(node.write(), separators=(",", ":")) for node in self._changed.values()]
        self._journal.write(
            "".join(line + "\n" for line in lines) + json.dumps({"workflow": status}, separators=(",", ":")) + "\n"
        )
        self._journal.flush()
        self._changed.clear()
        self._status = json.loads(json.dumps(status))
        if time.monotonic() - self._written > max(1.0, 20 * self._cost):
            self.write(state)

    def write(self, state: WorkflowState) -> None:
        """Write ``workflow.json`` whole and start the journal anew."""
        started = time.monotonic()
        write_whole(self.workflow_json, json.dumps(state.write(), indent=2).encode() + b"\n")
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        (self.directory / "journal.jsonl").unlink(missing_ok=True)
        self._written = time.monotonic()
        self._cost = self._written - started

    def close(self) -> None:
        """Let go; of a workflow that was refused nothing stays."""
        if self._journal is not None:
            self._journal.close()
        if not self.workflow_json.exists():
            with contextlib.suppress(OSError):
                (self.directory / "lock").unlink()
                self.directory.rmdir()
        self._lock.close()

    # --- reading -------------------------------------------------------------------------------------------------

    def read_plan(self) -> Plan:
        """The plan of a workflow that was begun. ``DataError`` if it is damaged."""
        raw = self._read("plan.json")
        try:
            reached = tuple((template, tuple(where)) for template, where in raw["reached"])
            return Plan(**{**raw, "ignored": tuple(raw["ignored"]), "reached": reached})
        except (TypeError, KeyError) as error:
            raise DataError(f"{self.directory / 'plan.json'} is damaged ({error}); run the workflow anew") from None

    def _read(self, name: str) -> Any:
        path = self.directory / name
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ConfigurationError(
                f"there is no workflow '{self.directory.name}' under {self.directory.parent} to go on with"
            ) from None
        except ValueError as error:
            raise DataError(f"{path} is damaged ({error}); run the workflow anew") from None

    def read_metadata(self) -> Raw:
        metadata: Raw = self._read("workflow.json")["metadata"]
        return metadata

    def restore(self, state: WorkflowState) -> None:
        """Fill ``state`` with what was reached; pods that were under way are pending again, with all their time before them."""
        status = self._read("workflow.json")["status"]
        nodes: dict[str, Raw] = dict(status.get("nodes") or {})
        state.phase, state.message = status.get("phase", ""), status.get("message", "")
        state.outputs = list((status.get("outputs") or {}).get("parameters") or ())
        state.started = parse_timestamp(status["startedAt"]) if status.get("startedAt") else 0.0
        state.finished = parse_timestamp(status["finishedAt"]) if status.get("finishedAt") else 0.0
        for line in self._journal_lines():
            if "workflow" in line:
                own = line["workflow"]
                state.phase, state.message, state.outputs = own["phase"], own["message"], own["outputs"]
                state.started, state.finished = own["started"], own["finished"]
            else:
                nodes[line["id"]] = line
        for raw in nodes.values():
            node = Node.read(raw)
            if node.type == "Pod" and not node.fulfilled:
                node.phase, node.message, node.outputs, node.started = "Pending", "", None, time.time()
                state.nodes.lost.add(node.id)
            state.nodes.add(node)

    def _journal_lines(self) -> list[Raw]:
        """The journal up to a last line that a killed engine may have left torn."""
        try:
            text = (self.directory / "journal.jsonl").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        lines = []
        for line in text.splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        return lines


def tail(path: Path, count: int) -> list[str]:
    """The last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]
