"""Walks a plan with the semantics of Argo's workflow controller.

The controller visits every node of a workflow each time something happens. So does this one, except that it skips what
nothing has touched: a change marks the executions above it (``Execution.touch``), and a pass visits only those.

1. A pod ends, a timer fires or a lock is free: ``touch``.
2. ``operate`` runs passes from the entrypoint down until one changes nothing.
3. ``execute`` is one template at one node: parallelism, locks, retries, then by type: pod, steps, dag, suspend.
4. Workflow hooks, the exit handler, and the workflow's own phase follow from the entrypoint's node.
"""

from __future__ import annotations

import heapq
import itertools
import re
import time
from collections.abc import Callable
from typing import Any

from workflows.local.dag import DagBody
from workflows.local.execution import (
    Blocked,
    DepthExceeded,
    Execution,
    Holder,
    PodRequest,
    Pods,
    TemplateError,
    TimedOut,
    prepare,
)
from workflows.local.hooks import Hooks
from workflows.local.language.tags import TagError
from workflows.local.language.values import any_string, duration, go_duration, to_json
from workflows.local.locks import Locks
from workflows.local.merging import with_defaults
from workflows.local.nodes import Node, Outputs
from workflows.local.plan import Base, Hook, Plan, Raw, Retry, Template
from workflows.local.retries import Retries, RetryBody
from workflows.local.state import WorkflowState
from workflows.local.steps import StepsBody

MAX_DEPTH = 100
"""Templates within templates, as in Argo's controller."""
_TYPES = {"container": "Pod", "script": "Pod", "steps": "Steps", "dag": "DAG", "suspend": "Suspend"}
_SEPARATOR = re.compile(r"^(\[\d+\])?\.")
_FAIL_FAST = "template has failed or errored children and failFast enabled"


class Operator:
    """One workflow on its way. Not thread-safe: its owner calls it from one loop."""

    def __init__(self, state: WorkflowState, pods: Pods) -> None:
        self.state = state
        self.plan: Plan = state.plan
        self.nodes = state.nodes
        self.pods = pods
        self.locks = Locks()
        self.hooks = Hooks(self)
        self.retries = Retries(self)
        self.executions: dict[str, Execution] = {}
        self.waiting_for_lock: dict[str, Execution] = {}
        self.depth = 0
        self.updated = False
        self._timers: list[tuple[float, int, Execution | None]] = []
        self._counter = itertools.count()
        self._results: dict[str, frozenset[str]] = {}
        self._deferred: list[Execution] = []

    # --- the outside ---------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """When something has to be looked at again by itself, seconds since the epoch."""
        return self._timers[0][0] if self._timers else None

    def wake(self, when: float, execution: Execution | None = None) -> None:
        heapq.heappush(self._timers, (when, next(self._counter), execution))

    def fire_timers(self) -> None:
        now = time.time()
        while self._timers and self._timers[0][0] <= now:
            execution = heapq.heappop(self._timers)[2]
            if execution is not None:
                execution.touch()

    def started(self, node: Node) -> None:
        """The pod of ``node`` runs."""
        if node.phase == "Pending":
            self.mark(node, "Running", "")
            self._touch_node(node)

    def ended(self, node: Node, phase: str, message: str, outputs: Outputs) -> None:
        """The pod of ``node`` has ended; a node that was failed meanwhile (by a deadline) keeps its phase."""
        node.outputs = outputs
        if not node.fulfilled:
            self.mark(node, phase, message)
        else:
            self.nodes.changed(node)
        self.state.add_outputs(node)
        self._touch_node(node)
        self._touch_lock_waiters()

    def resume_suspended(self, node: Node, values: dict[str, str] | None = None) -> None:
        """End a suspension by hand, with values for its supplied outputs."""
        for raw in node.outputs.parameters if node.outputs is not None else ():
            default = (raw.pop("valueFrom", None) or {}).get("default")
            raw["value"] = (values or {}).get(raw["name"], any_string(default) if default is not None else "")
        self.mark(node, "Succeeded", "")
        self._touch_node(node)

    def defer(self, execution: Execution) -> None:
        """Something under ``execution`` could not go on: visit it again in the next pass."""
        self._deferred.append(execution)

    def _touch_node(self, node: Node) -> None:
        execution = self.executions.get(node.name)
        if execution is not None:
            execution.touch()

    def _touch_lock_waiters(self) -> None:
        for execution in list(self.waiting_for_lock.values()):
            execution.touch()

    # --- the whole workflow --------------------------------------------------------------------------------------

    def operate(self) -> None:
        """Bring the workflow as far as it gets without waiting."""
        if self.state.phase == "":
            self.state.mark("Running")
            if self.state.deadline is not None:
                self.wake(self.state.deadline + 0.01)
        self.fire_timers()
        while not self.state.fulfilled:
            self.updated = False
            self.state.refresh()
            self._fail_overdue()
            deferred, self._deferred = self._deferred, []
            for execution in deferred:
                execution.touch()
            self._pass()
            if not self.updated:
                break

    def _pass(self) -> None:
        spec = self.state.spec
        try:
            entry = self.execute(self._top(self.state.name, Holder(spec.get("entrypoint") or "")))
        except Blocked:
            return
        except TemplateError as error:
            self._finish("Error", f"error in entry template execution: {error}")
            return
        if entry is None:
            return
        self.state.globals["workflow.status"] = {"Skipped": "Succeeded", "Omitted": "Succeeded"}.get(entry.phase, entry.phase)
        if entry.fulfilled or spec.get("hooks"):
            self.state.summarise(entry)
        try:
            hooks_done = self.hooks.run_workflow_hooks()
        except TemplateError as error:
            self.mark(entry, "Error", str(error))
            hooks_done = True
        if hooks_done and entry.fulfilled:
            self._conclude(entry)

    def _conclude(self, entry: Node) -> None:
        """Run the exit handler; then the workflow ends as its entrypoint did, or worse if the handler failed."""
        phase = str(self.state.globals["workflow.status"])
        handler: Node | None = None
        hook = self._exit_hook()
        if hook is not None:
            try:
                holder = Holder(hook.template, hook.template_ref)
                handler = self.execute(self._top(f"{self.state.name}.onExit", holder, hook.arguments, on_exit=True))
            except Blocked:
                return
            except TemplateError as error:
                self._finish("Error", f"error in exit template execution : {error}")
                return
            if handler is None or not handler.fulfilled:
                return
        if phase == "Succeeded" and handler is not None and handler.unsuccessful:
            self._finish(handler.phase, handler.message)
        else:
            self._finish(phase, "" if phase == "Succeeded" else entry.message)

    def _exit_hook(self) -> Hook | None:
        spec = self.state.spec
        arguments = spec.get("arguments") or {}
        if spec.get("onExit"):
            return Hook(spec["onExit"], None, arguments, "")
        raw = (spec.get("hooks") or {}).get("exit")
        return None if raw is None else Hook.read(raw).with_arguments(arguments)

    def _finish(self, phase: str, message: str) -> None:
        self.state.mark(phase, message)
        self.updated = True

    def _top(self, name: str, holder: Holder, arguments: Raw | None = None, *, on_exit: bool = False) -> Execution:
        execution = self.executions.get(name)
        if execution is None:
            given = self.state.spec.get("arguments") or {} if arguments is None else arguments
            execution = Execution(name, self.plan.local, holder, given, on_exit=on_exit, hooked=on_exit)
            self.executions[name] = execution
        return execution

    def _fail_overdue(self) -> None:
        """Past the workflow's deadline pods are ended and whatever waits fails, exit handlers aside."""
        deadline = self.state.deadline
        if deadline is None or time.time() <= deadline or not self.nodes.unfulfilled:
            return
        for node in list(self.nodes):
            if node.fulfilled or self.nodes.part_of_exit_handler(node):
                continue
            waits = node.phase == "Pending" or (node.type == "Suspend" and node.phase == "Running")
            if node.type == "Pod" and node.phase in ("Pending", "Running"):
                self.pods.terminate(node)
                self.mark(node, "Failed", "Step exceeded its deadline")
            elif waits:
                self.mark(node, "Failed", "Step exceeded its deadline")
            else:
                continue
            self._touch_node(node)

    # --- one template --------------------------------------------------------------------------------------------

    def execute(self, execution: Execution) -> Node | None:
        """Visit an execution; its node, or None if there is none yet. Raises Blocked or TemplateError (the node is marked)."""
        self.depth += 1
        try:
            return self._execute(execution)
        finally:
            self.depth -= 1

    def _execute(self, execution: Execution) -> Node | None:
        node = self.nodes.get(execution.name)
        if self.depth >= MAX_DEPTH:
            raise self.error(execution, DepthExceeded("Maximum recursion depth exceeded. See https://argo-workflows.readthedocs.io/en/latest/scaling/"))
        if execution.template is None:
            try:
                self._resolve(execution)
            except (TemplateError, TagError) as error:
                raise self.error(execution, TemplateError(str(error))) from None
        assert execution.template is not None
        if node is not None and node.fulfilled:
            self._release(node)
            execution.dirty = False
            return node
        self._display_name(execution, node)
        self._check_timeout(execution, node)
        if not execution.dirty and node is not None:
            return node
        self._check_parallelism(execution, node)
        if not self._lock(execution):
            return self.nodes.get(execution.name)
        execution.dirty = False
        if self.retry_of(execution) is not None:
            return self.retries.execute(execution)
        return self.run(execution)

    def _resolve(self, execution: Execution) -> None:
        holder = execution.holder
        raw = self.plan.find(execution.base, holder.template, holder.ref, holder.inline)
        if raw is None:
            raise TemplateError(f"template {holder.template or (holder.ref or {}).get('template')} not found")
        execution.inner = self.plan.base_of(holder.ref, execution.base)
        template = Template(with_defaults(raw, self.state.spec.get("templateDefaults")))
        if not template.type:
            raise TemplateError(f"template '{template.name}' type is unknown")
        local = {f"{holder.kind}.name": holder.name, "node.name": execution.name}
        if template.is_pod and self._raw_retry(template) is None:
            local["pod.name"] = self.state.pod_name(execution.name, template.name)
        execution.template = template
        try:
            prepare(execution, self.state.globals, local)
        except (TemplateError, TagError):
            execution.template = None
            raise

    def _raw_retry(self, template: Template) -> Raw | None:
        raw = template.raw.get("retryStrategy")
        return raw if raw is not None else self.state.spec.get("retryStrategy")

    def retry_of(self, execution: Execution) -> Retry | None:
        """The retry strategy that applies, with its parameters replaced."""
        assert execution.template is not None
        raw = self._raw_retry(execution.template)
        return None if raw is None else Retry.read(execution.substitute(raw, self.state.globals))

    def run(self, execution: Execution) -> Node | None:
        """Execute by type, without retries. Raises TemplateError after marking the node."""
        assert execution.template is not None
        kind = execution.template.type
        node = self.nodes.get(execution.name)
        try:
            if execution.template.is_pod:
                node = self._pod(execution, node)
            elif kind == "suspend":
                node = self._suspend(execution, node)
            else:
                if execution.body is None or isinstance(execution.body, RetryBody):
                    execution.body = (StepsBody if kind == "steps" else DagBody)(self, execution)
                body = execution.body
                assert isinstance(body, (StepsBody, DagBody))
                node = body.visit()
        except (TemplateError, TagError) as error:
            existing = self.nodes.get(execution.name)
            if existing is None:
                raise self.error(execution, TemplateError(str(error))) from None
            self.mark(existing, "Error", str(error))
            self._release(existing)
            raise TemplateError(str(error)) from None
        if node is not None and node.fulfilled:
            self._release(node)
        return node

    def _release(self, node: Node) -> None:
        self.waiting_for_lock.pop(node.id, None)
        if self.locks.release(node.id):
            self._touch_lock_waiters()

    # --- limits --------------------------------------------------------------------------------------------------

    def _check_timeout(self, execution: Execution, node: Node | None) -> None:
        assert execution.template is not None
        raw = execution.template.raw.get("timeout")
        if not raw or node is None or node.phase != "Pending":
            return
        timeout = execution.substitute(raw, self.state.globals)
        try:
            deadline = node.started + go_duration(timeout)
        except ValueError as error:
            raise self.error(execution, TimedOut(f"invalid timeout format. {error}")) from None
        if time.time() > deadline:
            self.mark(node, "Failed", "timeout")
            self._release(node)
            raise TimedOut("timeout")

    def _check_parallelism(self, execution: Execution, node: Node | None) -> None:
        """``Blocked`` where the workflow, this template or the one around it has its share of running pods."""
        nodes, limit = self.nodes, self.state.spec.get("parallelism")
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
        around = self._template_at(boundary)
        if around is None:
            return
        self._fail_fast(around, boundary)
        if around.parallelism and nodes.active_children[boundary.id] >= around.parallelism:
            raise Blocked

    def _fail_fast(self, template: Template, node: Node) -> None:
        if not template.fail_fast or self.nodes.unsuccessful_children[node.id] == 0:
            return
        if self.nodes.active_pods[node.id] == 0:
            if template.type == "steps":
                groups = [n for n in self.nodes if n.type == "StepGroup" and n.boundary_id == node.id]
                if groups:
                    self.mark(groups[-1], "Failed", _FAIL_FAST)
            self.mark(node, "Failed", _FAIL_FAST)
            self._touch_node(node)
        raise Blocked

    def _template_at(self, node: Node) -> Template | None:
        execution = self.executions.get(node.name)
        return execution.template if execution is not None else None

    def _lock(self, execution: Execution) -> bool:
        """Take the template's mutexes; without them the node is made and waits, pending."""
        assert execution.template is not None
        if not execution.template.mutexes:
            return True
        names = Template(execution.substitute({"synchronization": execution.template.raw["synchronization"]}, self.state.globals)).mutexes
        key = self.nodes.node_id(execution.name)
        taken = self.locks.acquire(names, key)
        node = self.nodes.get(execution.name)
        if not taken:
            self.waiting_for_lock.pop(key, None)
            if node is not None and node.waiting_for:
                self.nodes.wait_for(node, "", "")
                self.updated = True
            return True
        lock = f"{self.state.namespace}/Mutex/{taken}"
        if node is None:
            kind = "Retry" if self._raw_retry(execution.template) is not None else _TYPES[execution.template.type]
            node = self.initialize(execution, kind, "Pending")
            self._wake_for_timeout(execution, node)
        self.waiting_for_lock[key] = execution
        self.nodes.wait_for(node, lock, f"Waiting for {lock} lock. Lock status: 0/1")
        return False

    # --- nodes ---------------------------------------------------------------------------------------------------

    def mark(self, node: Node, phase: str, message: str | None = None) -> Node:
        """Set a node's phase; a pass that does so is followed by another."""
        if node.phase != phase or (message is not None and node.message != message):
            self.updated = True
        return self.nodes.mark(node, phase, message)

    def error(self, execution: Execution, error: TemplateError) -> TemplateError:
        """Make or mark the node of an execution that cannot be executed; the error to raise."""
        node = self.nodes.get(execution.name)
        if node is not None:
            self.mark(node, "Error", str(error))
        else:
            self.skip(execution.name, execution.base, execution.holder, execution.boundary_id, "Error", str(error), execution=execution)
        return error

    def skip(
        self, name: str, base: Base, holder: Holder, boundary_id: str, phase: str, message: str, *, kind: str = "Skipped", execution: Execution | None = None
    ) -> Node:
        """A node of a template that is not executed: skipped, omitted, in error, or the group of a loop."""
        hooked = execution is not None and execution.hooked
        return self._add(name, base, holder, boundary_id, kind, phase, message, hooked=hooked, retried=False, flagged=True)

    def initialize(self, execution: Execution, kind: str, phase: str) -> Node:
        """The node of a template that is executed."""
        retried = execution.attempt_of is not None
        node = self._add(
            execution.name, execution.base, execution.holder, execution.boundary_id, kind, phase, "", hooked=execution.hooked, retried=retried, flagged=False
        )
        node.inputs = [parameter.write() for parameter in execution.inputs]
        assert execution.template is not None
        if kind == "Suspend":
            node.outputs = _supplied_outputs(execution)
        return node

    def _add(
        self, name: str, base: Base, holder: Holder, boundary_id: str, kind: str, phase: str, message: str, *, hooked: bool, retried: bool, flagged: bool
    ) -> Node:
        boundary = self.nodes.by_id.get(boundary_id)
        display = name
        if boundary is not None:
            display = _SEPARATOR.sub("", name.removeprefix(boundary.name))
        now = time.time()
        node = Node(
            id=self.nodes.node_id(name),
            name=name,
            display_name=display,
            type=kind,
            phase=phase,
            template_name=holder.template,
            template_ref=holder.ref,
            template_scope=base.scope,
            boundary_id=boundary_id,
            message=message,
            started=now,
            hooked=hooked,
            retried=retried,
            flagged=flagged,
            progress="0/1" if kind == "Pod" else "",
        )
        node.finished = now if node.fulfilled else 0.0
        self.updated = True
        return self.nodes.add(node)

    def link(self, parent: Node, child_name: str) -> None:
        self.nodes.link(parent, self.nodes.node_id(child_name))

    def outbound(self, node: Node) -> list[str]:
        """The ids of the nodes that whatever follows ``node`` hangs on."""
        if node.type in ("Skipped", "Suspend", "Pod"):
            return [node.id]
        if node.type == "TaskGroup":
            return [i for child in node.children for i in self.outbound(self.nodes.by_id[child])] if node.children else [node.id]
        if node.type == "Retry" and node.children:
            return [node.children[-1]]
        return [i for child in node.outbound for i in self.outbound(self.nodes.by_id[child])]

    def _display_name(self, execution: Execution, node: Node | None) -> None:
        assert execution.template is not None
        name = (execution.template.raw.get("annotations") or {}).get("workflows.argoproj.io/display-name")
        if name and node is not None:
            name = execution.substitute(name, self.state.globals)
            if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9-.]{0,61}[a-zA-Z0-9]", name):
                raise self.error(execution, TemplateError("displayName must match the regex ^[a-zA-Z0-9][a-zA-Z0-9-.]{0,61}[a-zA-Z0-9]$"))
            if node.display_name != name:
                node.display_name = name
                self.nodes.changed(node)

    # --- leaves --------------------------------------------------------------------------------------------------

    def _pod(self, execution: Execution, node: Node | None) -> Node:
        assert execution.template is not None
        if node is None:
            node = self.initialize(execution, "Pod", "Pending")
        elif node.phase != "Pending":
            return node
        deadline = self.state.deadline
        if deadline is not None and not execution.on_exit and deadline - time.time() < 1:
            self.wake(deadline + 0.01)
            return node
        raw = execution.substitute(execution.template.raw, self.state.globals)
        self.pods.submit(
            PodRequest(
                node=node,
                template=raw,
                capture=self._is_result_wanted(execution),
                active_seconds=self._active_seconds(execution, node, raw),
                deadline=execution.deadline,
                on_exit=execution.on_exit,
            )
        )
        return node

    def _active_seconds(self, execution: Execution, node: Node, raw: Raw) -> float | None:
        """How long the pod may run: the template's and the workflow's deadline and the timeout, whole seconds as in Kubernetes."""
        limits: list[int] = []
        if raw.get("activeDeadlineSeconds") is not None:
            try:
                limits.append(int(raw["activeDeadlineSeconds"]))
            except ValueError:
                raise TemplateError(f"activeDeadlineSeconds '{raw['activeDeadlineSeconds']}' is not a number") from None
        if self.state.deadline is not None and not execution.on_exit:
            limits.append(int(self.state.deadline - time.time()))
        if raw.get("timeout"):
            try:
                left = int(node.started + go_duration(raw["timeout"]) - time.time())
            except ValueError as error:
                raise TemplateError(f"invalid timeout format. {error}") from None
            if left <= 1:
                raise TemplateError(f"{node.name} exceeded its deadline")
            limits.append(left)
        return float(min(limits)) if limits else None

    def _wake_for_timeout(self, execution: Execution, node: Node) -> None:
        assert execution.template is not None
        raw = execution.template.raw.get("timeout")
        if raw:
            try:
                self.wake(node.started + go_duration(execution.substitute(raw, self.state.globals)) + 0.01, execution)
            except ValueError:
                return

    def _is_result_wanted(self, execution: Execution) -> bool:
        """Whether the template around refers to this step's ``outputs.result`` (Argo looks with regular expressions, too)."""
        boundary = self.nodes.by_id.get(execution.boundary_id)
        around = self._template_at(boundary) if boundary is not None else None
        if around is None:
            return False
        if execution.boundary_id not in self._results:
            self._results[execution.boundary_id] = _results_wanted(around)
        return _call_name(execution.name) in self._results[execution.boundary_id]

    def _suspend(self, execution: Execution, node: Node | None) -> Node:
        assert execution.template is not None
        if node is None:
            node = self.initialize(execution, "Suspend", "Pending")
        raw = (execution.substitute(execution.template.raw.get("suspend") or {}, self.state.globals)).get("duration")
        if raw:
            try:
                until = node.started + duration(any_string(raw))
            except ValueError as error:
                raise TemplateError(str(error)) from None
            if time.time() > until:
                self._use_defaults(node)
                return self.mark(node, "Succeeded")
            self.wake(until + 0.001, execution)
        return self.mark(node, "Running")

    def _use_defaults(self, node: Node) -> None:
        for raw in node.outputs.parameters if node.outputs is not None else ():
            default = (raw.get("valueFrom") or {}).get("default")
            if default is None:
                raise TemplateError(f"raw output parameter '{raw['name']}' has not been set and does not have a default value")
            raw["value"] = any_string(default)
            raw.pop("valueFrom")


def _supplied_outputs(execution: Execution) -> Outputs | None:
    assert execution.template is not None
    defaults = {p.name: p.default for p in execution.inputs if p.default is not None}
    listed = []
    for parameter in execution.template.outputs:
        source = dict(parameter.value_from or {})
        if source.get("supplied") is None:
            continue
        if source.get("default") is None and parameter.name in defaults:
            source["default"] = defaults[parameter.name]
        listed.append(parameter.write() | {"valueFrom": source})
    return Outputs(listed) if listed else None


def _results_wanted(template: Template) -> frozenset[str]:
    """The steps or tasks whose result the text of a template mentions (in brackets only with single quotes, as in Argo)."""
    kind, text = "tasks" if template.type == "dag" else "steps", to_json(template.raw)
    return frozenset(re.findall(rf"{kind}\.([-\w]+)\.outputs\.result", text) + re.findall(rf"{kind}\['([^']*)'\]\.outputs.result", text))


_TRAILERS: Callable[[str], Any] = re.compile(r"(\([^()]*\)|\[[^\[\]]*\])+$").search


def _call_name(node_name: str) -> str:
    """The step or task that made a node: without attempts, items and what is before the last dot."""
    match = _TRAILERS(node_name)
    name = node_name[: match.start()] if match else node_name
    return name.rpartition(".")[2]
