"""Suspended steps, and suspended workflows: resumed from the terminal, or by a file.

A step waits until someone presses Enter in the terminal, or makes the file ``resume`` in the node's directory. Values for
its outputs are asked for on the terminal; in the file they are lines ``name=value``.
"""

from __future__ import annotations

import selectors
import sys
from pathlib import Path

from workflows.local.display import Display
from workflows.local.nodes import Node
from workflows.local.operator import Operator
from workflows.local.pods.sandbox import Places
from workflows.local.state import WorkflowState


class Suspensions:
    """What waits for a person."""

    def __init__(self, state: WorkflowState, operator: Operator, places: Places, display: Display) -> None:
        self.state = state
        self.operator = operator
        self.places = places
        self.display = display
        self.waiting: dict[str, Node] = {}
        self.whole_workflow = bool(state.plan.spec.get("suspend"))
        self._said: set[str] = set()
        self._answers: dict[str, str] = {}
        self._selector: selectors.BaseSelector | None = None

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Take lines from the terminal, if there is one."""
        if sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty():
            selector.register(sys.stdin, selectors.EVENT_READ, "terminal")
            self._selector = selector

    def close(self) -> None:
        if self._selector is not None:
            self._selector.unregister(sys.stdin)
            self._selector = None

    def changed(self, node: Node) -> None:
        """A suspend node is new or has another phase."""
        if node.phase == "Running":
            self.waiting[node.id] = node
        else:
            self.waiting.pop(node.id, None)

    def hold_back(self) -> None:
        """Say what is waited for, once."""
        if self.whole_workflow and "" not in self._said:
            self._said.add("")
            self._say("the workflow is suspended", self.places.state / "resume")
        for node in self.waiting.values():
            if node.id not in self._said and not self._has_duration(node):
                self._said.add(node.id)
                home = self.places.node(node.id)
                home.mkdir(parents=True, exist_ok=True)
                wanted = ", ".join(self._wanted(node))
                self._say(
                    f"{node.display_name} is suspended" + (f" and wants {wanted}" if wanted else ""), home / "resume"
                )

    def _has_duration(self, node: Node) -> bool:
        execution = self.operator.executions.get(node.name)
        raw = (
            execution.template.raw.get("suspend") if execution is not None and execution.template is not None else None
        )
        return bool((raw or {}).get("duration"))

    def _wanted(self, node: Node) -> list[str]:
        listed = node.outputs.parameters if node.outputs is not None else []
        return [raw["name"] for raw in listed if (raw.get("valueFrom") or {}).get("default") is None]

    def _say(self, what: str, file: Path) -> None:
        how = "press Enter (or type name=value first)" if self._selector is not None else f"to go on: touch {file}"
        self.display.note(f"{what}; {how}")

    def read_terminal(self) -> None:
        """A line: ``name=value`` is kept for the step that waits, an empty one resumes it."""
        line = sys.stdin.readline()
        if line == "":
            self.close()
            return
        name, separator, value = line.strip().partition("=")
        if separator:
            self._answers[name.strip()] = value.strip()
            return
        self._resume(self._answers)
        self._answers = {}

    def _resume(self, answers: dict[str, str]) -> None:
        if self.whole_workflow:
            self.whole_workflow = False
            return
        for node in list(self.waiting.values())[:1]:
            missing = [name for name in self._wanted(node) if name not in answers]
            if missing:
                self.display.note(
                    f"{node.display_name} still wants {', '.join(missing)}: type {missing[0]}=VALUE, then Enter"
                )
                return
            self.operator.resume_suspended(node, answers)

    def look(self) -> None:
        """Look for files that resume."""
        if self.whole_workflow and (self.places.state / "resume").exists():
            (self.places.state / "resume").unlink()
            self.whole_workflow = False
        for node in list(self.waiting.values()):
            file = self.places.node(node.id) / "resume"
            if file.exists():
                pairs = [line.partition("=") for line in file.read_text(errors="replace").splitlines() if "=" in line]
                file.unlink()
                self.operator.resume_suspended(node, {name.strip(): value.strip() for name, _, value in pairs})
