"""Runs pods: a queue, the tasks under way, their deadlines, and what became of them."""

from __future__ import annotations

import heapq
import itertools
import json
import selectors
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workflows.local.execution import PodRequest, TemplateError
from workflows.local.nodes import Node, Outputs
from workflows.local.plan import Raw
from workflows.local.pods import sandbox
from workflows.local.pods.launcher import Channel, Launcher, TaskRequest

if TYPE_CHECKING:
    from workflows.local.operator import Operator

CAPACITY = 110
"""Pods at a time, as on a Kubernetes node; more wait in Pending."""
GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL when a pod has to end, as in Kubernetes."""
ACTIVE_DEADLINE = "Pod was active on the node longer than the specified deadline"


class _Task:
    def __init__(self, request: PodRequest, channel: Channel, home: Path) -> None:
        self.request = request
        self.channel = channel
        self.home = home
        self.reason = ""
        """Why it was told to end; '' if it was not."""
        self.progress_stamp = 0.0


class Runner:
    """The pods of one workflow on this machine."""

    def __init__(
        self, launcher: Launcher, places: sandbox.Places, volumes: list[Raw], environment: Mapping[str, str]
    ) -> None:
        self.launcher = launcher
        self.places = places
        self.volumes = volumes
        self.environment = environment
        self.operator: Operator | None = None
        self.selector = selectors.DefaultSelector()
        self.queue: deque[PodRequest] = deque()
        self.running: dict[str, _Task] = {}
        self.stopping = False
        self._known: set[str] = set()
        self._deadlines: list[tuple[float, int, str, str]] = []
        self._counter = itertools.count()

    # --- what the operator asks ----------------------------------------------------------------------------------

    def submit(self, request: PodRequest) -> None:
        """Queue a pod, once."""
        if request.node.id not in self._known:
            self._known.add(request.node.id)
            self.queue.append(request)

    def terminate(self, node: Node) -> None:
        """End a pod whose node was failed."""
        task = self.running.get(node.id)
        if task is not None and not task.reason:
            task.reason = "failed"
            task.channel.terminate(GRACE)

    # --- what the engine's loop does -----------------------------------------------------------------------------

    def start_queued(self) -> None:
        """Start pods as long as there is room."""
        while self.queue and len(self.running) < CAPACITY and not self.stopping:
            request = self.queue.popleft()
            if not request.node.fulfilled:
                self._start(request)

    def _start(self, request: PodRequest) -> None:
        assert self.operator is not None
        node = request.node
        home = self.places.node(node.id)
        try:
            surroundings = sandbox.build(
                node,
                request.template,
                self.volumes,
                self.places,
                self.environment,
                namespaces=not self.launcher.namespaces_refused,
            )
        except (TemplateError, OSError) as error:
            self.operator.ended(node, "Error", str(error), Outputs())
            return
        channel = self.launcher.spawn(
            TaskRequest(
                command=surroundings.command,
                environment=surroundings.environment,
                directory=surroundings.directory,
                log=str(home / "main.log"),
                capture=request.capture,
                outputs=surroundings.outputs,
                view=surroundings.view,
            )
        )
        self.running[node.id] = _Task(request, channel, home)
        self.selector.register(channel, selectors.EVENT_READ, node.id)

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def enforce_deadlines(self) -> None:
        """Tell pods to end whose time is up."""
        now = time.time()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, node_id, reason = heapq.heappop(self._deadlines)
            task = self.running.get(node_id)
            if task is not None and not task.reason:
                task.reason = reason
                task.channel.terminate(GRACE)

    def handle(self, node_id: str) -> None:
        """Read what a task reports."""
        task = self.running[node_id]
        messages, gone = task.channel.messages()
        outcome: dict[str, Any] | None = None
        for message in messages:
            if "started" in message:
                self._started(task)
            else:
                outcome = message
        if outcome is not None or gone:
            self._ended(task, outcome)

    def _started(self, task: _Task) -> None:
        assert self.operator is not None
        request, now = task.request, time.time()
        if request.active_seconds is not None:
            heapq.heappush(
                self._deadlines, (now + request.active_seconds, next(self._counter), request.node.id, "active")
            )
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, next(self._counter), request.node.id, "deadline"))
        if not self.stopping:
            self.operator.started(request.node)

    def _ended(self, task: _Task, outcome: dict[str, Any] | None) -> None:
        assert self.operator is not None
        node = task.request.node
        self.selector.unregister(task.channel)
        task.channel.close()
        del self.running[node.id]
        if self.stopping:
            return
        self.read_progress(task)
        phase, message, outputs = judge(task.request, outcome)
        if task.reason == "active" and phase != "Succeeded":
            phase, message = "Failed", ACTIVE_DEADLINE
        if phase == "Succeeded":
            node.progress = "/".join([node.progress.partition("/")[2] or "1"] * 2)
        sandbox.clean(task.home)
        self.operator.ended(node, phase, message, outputs)

    def stop(self, grace: float) -> None:
        """End everything; what ends from now on is not reported, so that it can be run again."""
        self.stopping = True
        for task in self.running.values():
            task.channel.terminate(grace)

    # --- progress ------------------------------------------------------------------------------------------------

    def poll_progress(self) -> list[Node]:
        """Nodes whose self-reported progress changed (the last line of the progress file, ``n/m``)."""
        return [task.request.node for task in self.running.values() if self.read_progress(task)]

    def read_progress(self, task: _Task) -> bool:
        path = task.home / "progress"
        try:
            stamp = path.stat().st_mtime
            if stamp == task.progress_stamp:
                return False
            task.progress_stamp = stamp
            line = path.read_text(errors="replace").strip().rpartition("\n")[2].strip()
        except OSError:
            return False
        n, _, m = line.partition("/")
        if (
            not (n.isdigit() and m.isdigit() and 0 <= int(n) <= int(m) and int(m) > 0)
            or task.request.node.progress == line
        ):
            return False
        task.request.node.progress = line
        return True

    def training_status(self, node_id: str) -> dict[str, Any] | None:
        """What a training step wrote for the display, if anything."""
        try:
            status = json.loads((self.places.node(node_id) / "status.json").read_bytes())
        except (OSError, ValueError):
            return None
        return status if isinstance(status, dict) else None


def judge(request: PodRequest, outcome: dict[str, Any] | None) -> tuple[str, str, Outputs]:
    """Phase, message and outputs of a pod that has ended. A supervisor that vanished is a pod that was deleted."""
    if outcome is None:
        return "Error", "pod deleted", Outputs()
    if "failed" in outcome:
        return "Error", f"init: Error: {outcome['failed']}", Outputs()
    code = int(outcome["code"])
    outputs = Outputs(exit_code=str(code), result=outcome.get("result"))
    missing = ""
    for raw in (request.template.get("outputs") or {}).get("parameters") or ():
        parameter = dict(raw)
        path = (raw.get("valueFrom") or {}).get("path")
        if path and not missing:
            found = outcome["outputs"].get(path)
            if isinstance(found, str):
                parameter["value"] = found.removesuffix("\n")
            elif raw["valueFrom"].get("default") is not None:
                parameter["value"] = str(raw["valueFrom"]["default"]).removesuffix("\n")
            else:
                missing = f"open {path}: {(found or {}).get('error', 'no such file or directory')}"
        outputs.parameters.append(parameter)
    if code != 0:
        return "Failed", f"main: Error (exit code {code})", outputs
    if missing:
        return "Error", f"wait: Error (exit code 64): {missing}", outputs
    return "Succeeded", "", outputs
