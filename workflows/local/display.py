"""What a person sees of a running workflow: a live tree, plain lines, JSON lines, or only the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from workflows.local.language.values import timestamp
from workflows.local.nodes import Node
from workflows.local.state import WorkflowState
from workflows.local.store import tail

TrainingStatus = Callable[[str], "dict[str, Any] | None"]
LOG_TAIL = 20
_SHOWN = 60
"""Steps in the live tree at most; the others are counted."""
_MARKS = {
    "Succeeded": ("✔", "green"),
    "Failed": ("✖", "red"),
    "Error": ("⚠", "red"),
    "Running": ("●", "cyan"),
    "Pending": ("◷", "yellow"),
}
_HIDDEN = frozenset({"StepGroup"})
_GROUPS = frozenset({"DAG", "Steps"})


class Display(Protocol):
    """One way to show a workflow."""

    def changed(self, node: Node) -> None:
        """A node's phase, message or progress is new."""

    def refresh(self, state: WorkflowState) -> None:
        """Called often: show what is due."""

    def note(self, text: str) -> None:
        """Something to know that is no node's."""

    def finish(self, state: WorkflowState, directory: Path) -> None:
        """The workflow has ended."""


def choose(kind: str, training: TrainingStatus) -> Display:
    """``auto`` is a live tree on a terminal and plain lines elsewhere."""
    if kind == "json":
        return JsonLines()
    if kind == "quiet":
        return Quiet()
    if kind == "auto" and sys.stdout.isatty():
        return LiveTree(training)
    return PlainLines(training)


def describe_training(status: dict[str, Any] | None) -> str:
    """``step 12/60  loss 3.41  5,200 tokens/s  1 restart`` from what a training step reports."""
    if not status or "step" not in status:
        return ""
    parts = [f"step {status['step']}/{status.get('max_steps', '?')}"]
    if isinstance(status.get("loss"), (int, float)):
        parts.append(f"loss {status['loss']:.3f}")
    if isinstance(status.get("tokens_per_second"), (int, float)):
        parts.append(f"{status['tokens_per_second']:,.0f} tokens/s")
    if status.get("restarts"):
        parts.append(f"{status['restarts']} restart{'s' if status['restarts'] != 1 else ''}")
    return "  ".join(parts)


def failed_pods(state: WorkflowState) -> list[Node]:
    """The pods that a failed workflow failed of: no attempts that a later one made good."""
    made_good = {
        child for node in state.nodes if node.type == "Retry" and node.phase == "Succeeded" for child in node.children
    }
    pods = [
        node
        for node in state.nodes
        if node.unsuccessful and node.type in ("Pod", "Skipped", "Suspend") and node.id not in made_good
    ]
    return sorted(pods, key=lambda node: node.finished)


def closing_lines(state: WorkflowState, directory: Path) -> list[str]:
    """How it ended; for a failure the end of the failed step's log."""
    if state.phase == "Succeeded":
        return [f"{state.name}: Succeeded"]
    lines = [f"{state.name}: {state.phase}" + (f": {state.message}" if state.message else "")]
    failed = failed_pods(state)
    if failed:
        node = failed[-1]
        log = directory / node.id / "main.log"
        lines.append(f"{node.name.removeprefix(state.name).lstrip('.') or node.template_name}: {node.message}")
        lines += [f"  | {line}" for line in tail(log, LOG_TAIL)]
        if log.exists():
            lines.append(f"the whole log: {log}")
    return lines


class Quiet:
    """Only the end, and it only if it is bad."""

    def changed(self, node: Node) -> None:
        pass

    def refresh(self, state: WorkflowState) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self, state: WorkflowState, directory: Path) -> None:
        if state.phase != "Succeeded":
            print("\n".join(closing_lines(state, directory)), file=sys.stderr)


class JsonLines:
    """One JSON object per change of a node, and one for the workflow at the end."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, str, str]] = {}

    def changed(self, node: Node) -> None:
        now = (node.phase, node.message, node.progress)
        if self._seen.get(node.id) == now:
            return
        self._seen[node.id] = now
        event: dict[str, Any] = {
            "time": timestamp(time.time()),
            "node": node.name,
            "id": node.id,
            "type": node.type,
            "template": node.template_name,
            "phase": node.phase,
        }
        optional = {
            "message": node.message,
            "progress": node.progress,
            "exitCode": node.outputs.exit_code if node.outputs is not None else None,
        }
        self._print(event | {key: value for key, value in optional.items() if value})

    def refresh(self, state: WorkflowState) -> None:
        sys.stdout.flush()

    def note(self, text: str) -> None:
        self._print({"time": timestamp(time.time()), "note": text})

    def finish(self, state: WorkflowState, directory: Path) -> None:
        self._print(
            {
                "time": timestamp(time.time()),
                "workflow": state.name,
                "phase": state.phase,
                "message": state.message,
                "directory": str(directory),
            }
        )
        sys.stdout.flush()

    def _print(self, event: dict[str, Any]) -> None:
        print(json.dumps(event, ensure_ascii=False))


class PlainLines:
    """A line per change of a step's phase; for training a line now and then."""

    def __init__(self, training: TrainingStatus) -> None:
        self._training = training
        self._phases: dict[str, str] = {}
        self._running: dict[str, Node] = {}
        self._said: dict[str, str] = {}
        self._next = 0.0
        self._workflow = ""

    def changed(self, node: Node) -> None:
        if node.type in _HIDDEN or self._phases.get(node.id) == node.phase:
            return
        self._phases[node.id] = node.phase
        if node.type == "Pod":
            if node.phase == "Running":
                self._running[node.id] = node
            else:
                self._running.pop(node.id, None)
        if node.phase == "Pending":
            return
        seconds = f" ({node.finished - node.started:.1f} s)" if node.finished and node.type == "Pod" else ""
        message = f": {node.message}" if node.message else ""
        self._say(f"{node.phase:<9} {node.name}{seconds}{message}")

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)

    def refresh(self, state: WorkflowState) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 5.0
        for node in self._running.values():
            text = describe_training(self._training(node.id)) or (
                node.progress if node.progress not in ("", "0/1") else ""
            )
            if text and self._said.get(node.id) != text:
                self._said[node.id] = text
                self._say(f"{'':<9} {node.name}: {text}")

    def note(self, text: str) -> None:
        print(text, flush=True)

    def finish(self, state: WorkflowState, directory: Path) -> None:
        print("\n".join(closing_lines(state, directory)), flush=True)


class LiveTree:
    """A tree of steps that is drawn anew a few times a second."""

    def __init__(self, training: TrainingStatus) -> None:
        from rich.console import Console
        from rich.live import Live

        self._training = training
        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=4, auto_refresh=False, transient=False)
        self._next = 0.0
        self._started = False

    def changed(self, node: Node) -> None:
        pass

    def refresh(self, state: WorkflowState) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 0.25
        if not self._started:
            self._started = True
            self._live.start()
        self._live.update(self._tree(state), refresh=True)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def finish(self, state: WorkflowState, directory: Path) -> None:
        if self._started:
            self._live.update(self._tree(state), refresh=True)
            self._live.stop()
        for line in closing_lines(state, directory)[1 if state.phase == "Succeeded" else 0 :]:
            self._console.print(line, highlight=False, markup=False)

    def _tree(self, state: WorkflowState) -> Any:
        from rich.text import Text
        from rich.tree import Tree

        elapsed = (state.finished or time.time()) - state.started if state.started else 0.0
        root = Tree(
            Text.assemble((state.name, "bold"), f"  {state.phase or 'Pending'}  {elapsed:.0f} s  {state.progress()}")
        )
        branches = {"": root, state.name: root}
        nodes = [
            node
            for node in state.nodes
            if node.type not in _HIDDEN and (node.name != state.name or node.type not in _GROUPS)
        ]
        retries = {
            child: node for node in nodes if node.type == "Retry" for child in node.children if len(node.children) > 1
        }
        nodes = [node for node in nodes if not node.retried or node.id in retries]
        shown = (
            nodes if len(nodes) <= _SHOWN else [n for n in nodes if n.phase in ("Running", "Failed", "Error")][:_SHOWN]
        )
        for node in shown:
            retry = retries.get(node.id)
            above = branches.get(retry.id if retry is not None else node.boundary_id, root)
            branches[node.id] = above.add(self._line(node, state))
        if len(shown) < len(nodes):
            root.add(Text(f"... and {len(nodes) - len(shown)} more", style="dim"))
        return root

    def _line(self, node: Node, state: WorkflowState) -> Any:
        from rich.text import Text

        mark, colour = _MARKS.get(node.phase, ("○", "dim"))
        end = node.finished or time.time()
        text = Text.assemble(
            (mark, colour), f" {node.display_name}", (f"  {node.phase}", colour), f"  {end - node.started:.1f} s"
        )
        attempts = (
            [state.nodes.by_id[c] for c in node.children if c in state.nodes.by_id] if node.type == "Retry" else []
        )
        attempts = [attempt for attempt in attempts if attempt.retried]
        if len(attempts) > 1:
            text.append(f"  attempt {len(attempts)}", "yellow")
        pod = attempts[-1] if attempts else node
        if pod.phase == "Running" and pod.type == "Pod":
            own = pod.progress if pod.progress != "0/1" else ""
            text.append("  " + (describe_training(self._training(pod.id)) or own), "bold")
        if node.message:
            text.append(f"  {node.message}", "dim")
        return text
