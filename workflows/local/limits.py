"""What holds an execution back: timeouts, parallelism, fail-fast, mutexes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workflows.local.execution import Blocked, Execution, TimedOut
from workflows.local.language.values import go_duration
from workflows.local.locks import Locks
from workflows.local.nodes import Node
from workflows.local.plan import Template

if TYPE_CHECKING:
    from workflows.local.operator import Operator

NODE_TYPES = {"container": "Pod", "script": "Pod", "steps": "Steps", "dag": "DAG", "suspend": "Suspend"}
_FAIL_FAST = "template has failed or errored children and failFast enabled"


class Limits:
    """The limits of one workflow."""

    def __init__(self, operator: Operator) -> None:
        self.op = operator
        self.locks = Locks()
        self.waiting: dict[str, Execution] = {}
        """Node id -> the execution that waits for a mutex."""

    def check_timeout(self, execution: Execution, node: Node | None) -> None:
        """Fail a node that has been pending for longer than its template's timeout."""
        assert execution.template is not None
        raw = execution.template.raw.get("timeout")
        if not raw or node is None or node.phase != "Pending":
            return
        timeout = execution.substitute(raw, self.op.state.globals)
        try:
            deadline = node.started + go_duration(timeout)
        except ValueError as error:
            raise self.op.error(execution, TimedOut(f"invalid timeout format. {error}")) from None
        if time.time() > deadline:
            self.op.mark(node, "Failed", "timeout")
            raise TimedOut("timeout")

    def check_parallelism(self, execution: Execution, node: Node | None) -> None:
        """``Blocked`` where the workflow, this template or the one around it has its share of running pods."""
        nodes, limit = self.op.nodes, self.op.state.spec.get("parallelism")
        if limit is not None and nodes.active_pods[""] >= limit:
            raise Blocked
        template = execution.template
        assert template is not None
        if node is not None and template.type in ("steps", "dag"):
            self._fail_fast(template, node)
            if template.parallelism and nodes.active_pods[node.id] >= template.parallelism:
                raise Blocked
        boundary = nodes.by_id.get(execution.boundary_id) if execution.boundary_id else None
        if boundary is None or (node is not None and node.phase in ("Pending", "Running")):
            return
        around = self.op.template_at(boundary)
        if around is None:
            return
        self._fail_fast(around, boundary)
        if around.parallelism and nodes.active_children[boundary.id] >= around.parallelism:
            raise Blocked

    def _fail_fast(self, template: Template, node: Node) -> None:
        if not template.fail_fast or self.op.nodes.unsuccessful_children[node.id] == 0:
            return
        if self.op.nodes.active_pods[node.id] == 0:
            if template.type == "steps":
                groups = [n for n in self.op.nodes if n.type == "StepGroup" and n.boundary_id == node.id]
                if groups:
                    self.op.mark(groups[-1], "Failed", _FAIL_FAST)
            self.op.mark(node, "Failed", _FAIL_FAST)
            self.op.touch_node(node)
        raise Blocked

    def lock(self, execution: Execution) -> bool:
        """Take the template's mutexes; without them the node is made and waits, pending."""
        assert execution.template is not None
        if not execution.template.mutexes:
            return True
        names = Template(
            execution.substitute({"synchronization": execution.template.raw["synchronization"]}, self.op.state.globals)
        ).mutexes
        key = self.op.nodes.node_id(execution.name)
        taken = self.locks.acquire(names, key)
        node = self.op.nodes.get(execution.name)
        if not taken:
            self.waiting.pop(key, None)
            if node is not None and node.waiting_for:
                self.op.nodes.wait_for(node, "", "")
                self.op.updated = True
            return True
        lock = f"{self.op.state.namespace}/Mutex/{taken}"
        if node is None:
            kind = "Retry" if self.op.raw_retry(execution.template) is not None else NODE_TYPES[execution.template.type]
            node = self.op.initialize(execution, kind, "Pending")
            self._wake_for_timeout(execution, node)
        self.waiting[key] = execution
        self.op.nodes.wait_for(node, lock, f"Waiting for {lock} lock. Lock status: 0/1")
        return False

    def _wake_for_timeout(self, execution: Execution, node: Node) -> None:
        assert execution.template is not None
        raw = execution.template.raw.get("timeout")
        if raw:
            try:
                self.op.wake(
                    node.started + go_duration(execution.substitute(raw, self.op.state.globals)) + 0.01, execution
                )
            except ValueError:
                return

    def release(self, node: Node) -> None:
        """Give back a node's mutexes and let those that wait try again."""
        if not self.locks.used:
            return
        self.waiting.pop(node.id, None)
        if self.locks.release(node.id):
            self.touch_waiting()

    def touch_waiting(self) -> None:
        for execution in list(self.waiting.values()):
            execution.touch()
