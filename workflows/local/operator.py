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
import time

from workflows.local.dag import DagBody
from workflows.local.execution import Blocked, DepthExceeded, Execution, Holder, Pods, TemplateError, prepare
from workflows.local.hooks import Hooks
from workflows.local.keeping import NodeKeeper
from workflows.local.language.tags import TagError
from workflows.local.language.values import any_string
from workflows.local.leaves import Leaves
from workflows.local.limits import Limits
from workflows.local.memo import Caches, Memoization
from workflows.local.merging import with_defaults
from workflows.local.nodes import Node, Outputs
from workflows.local.plan import Hook, Plan, Raw, Retry, Template
from workflows.local.retries import Retries
from workflows.local.state import WorkflowState
from workflows.local.steps import StepsBody

MAX_DEPTH = 100
"""Templates within templates, as in Argo's controller."""


class Operator(NodeKeeper):
    """One workflow on its way. Not thread-safe: its owner calls it from one loop."""

    def __init__(self, state: WorkflowState, pods: Pods, caches: Caches) -> None:
        super().__init__(state)
        self.plan: Plan = state.plan
        self.pods = pods
        self.limits = Limits(self)
        self.memoization = Memoization(self, caches)
        self.leaves = Leaves(self)
        self.hooks = Hooks(self)
        self.retries = Retries(self)
        self.executions: dict[str, Execution] = {}
        self.depth = 0
        self._begun = False
        self._timers: list[tuple[float, int, Execution | None]] = []
        self._counter = itertools.count()
        self._deferred: list[Execution] = []
        self.reasons: dict[str, str] = {}
        """Node name -> the reference to something missing that keeps it from starting."""

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
            self.touch_node(node)

    def ended(self, node: Node, phase: str, message: str, outputs: Outputs) -> None:
        """The pod of ``node`` has ended; a node that was failed meanwhile (by a deadline) keeps its phase."""
        node.outputs = outputs
        if not node.fulfilled:
            self.mark(node, phase, message)
        else:
            self.nodes.changed(node)
        self.state.add_outputs(node)
        self.touch_node(node)
        self.limits.touch_waiting()

    def resume_suspended(self, node: Node, values: dict[str, str] | None = None) -> None:
        """End a suspension by hand, with values for its supplied outputs."""
        for raw in node.outputs.parameters if node.outputs is not None else ():
            default = (raw.pop("valueFrom", None) or {}).get("default")
            raw["value"] = (values or {}).get(raw["name"], any_string(default) if default is not None else "")
        self.mark(node, "Succeeded", "")
        self.touch_node(node)

    def mark(self, node: Node, phase: str, message: str | None = None) -> Node:
        """Set a node's phase; one that is fulfilled gives its mutexes back."""
        was = node.phase
        super().mark(node, phase, message)
        if node.fulfilled:
            self.limits.release(node)
            if phase != was:
                self.memoization.keep(node)
        return node

    def defer(self, execution: Execution) -> None:
        """Something under ``execution`` could not go on: visit it again in the next pass."""
        self._deferred.append(execution)

    def touch_node(self, node: Node) -> None:
        """Visit the execution of a node again."""
        execution = self.executions.get(node.name)
        if execution is not None:
            execution.touch()

    # --- the whole workflow --------------------------------------------------------------------------------------

    def operate(self) -> None:
        """Bring the workflow as far as it gets without waiting."""
        if self.state.phase == "":
            self.state.mark("Running")
        if not self._begun:
            self._begun = True
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
        self.state.globals["workflow.status"] = {"Skipped": "Succeeded", "Omitted": "Succeeded"}.get(
            entry.phase, entry.phase
        )
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
        entry = self.nodes.get(self.state.name)
        if phase == "Error" and entry is not None and entry.phase == "Running":
            self.mark(entry, "Error", "Workflow operation error")
        self.state.mark(phase, message)
        self.updated = True

    def give_up(self) -> None:
        """Nothing runs and nothing is awaited: say what is missing, where Argo would wait for ever."""
        name, reason = next(iter(self.reasons.items()), (self.state.name, "no step can start"))
        self._finish("Error", f"nothing can go on: {name}: {reason}")

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
            self.touch_node(node)

    # --- one template --------------------------------------------------------------------------------------------

    def execute(self, execution: Execution) -> Node | None:
        """Visit an execution; its node, or None if there is none yet. Raises Blocked or TemplateError (the node is marked)."""
        self.depth += 1
        try:
            return self._execute(execution)
        except Blocked:
            execution.dirty = True
            raise
        finally:
            self.depth -= 1

    def _execute(self, execution: Execution) -> Node | None:
        node = self.nodes.get(execution.name)
        if self.depth >= MAX_DEPTH:
            raise self.error(
                execution,
                DepthExceeded(
                    "Maximum recursion depth exceeded. See https://argo-workflows.readthedocs.io/en/latest/scaling/"
                ),
            )
        if execution.template is None:
            try:
                self._resolve(execution)
            except (TemplateError, TagError) as error:
                raise self.error(execution, TemplateError(str(error))) from None
        assert execution.template is not None
        if node is not None and node.fulfilled:
            execution.dirty = False
            return node
        self.set_display_name(execution, node)
        self.limits.check_timeout(execution, node)
        if not execution.dirty and node is not None:
            return node
        self.limits.check_parallelism(execution, node)
        if not self.limits.lock(execution):
            return self.nodes.get(execution.name)
        try:
            node = self.memoization.look_up(execution)
        except TemplateError as error:
            raise self.error(execution, error) from None
        execution.dirty = False
        if node is not None and node.fulfilled:
            return node
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
        if template.is_pod and self.raw_retry(template) is None:
            local["pod.name"] = self.state.pod_name(execution.name, template.name)
        execution.template = template
        try:
            prepare(execution, self.state.globals, local)
        except (TemplateError, TagError):
            execution.template = None
            raise

    def raw_retry(self, template: Template) -> Raw | None:
        """The template's retry strategy, or the workflow's."""
        raw = template.raw.get("retryStrategy")
        return raw if raw is not None else self.state.spec.get("retryStrategy")

    def template_at(self, node: Node) -> Template | None:
        """The template that a node is of, if it is being executed."""
        execution = self.executions.get(node.name)
        return execution.template if execution is not None else None

    def retry_of(self, execution: Execution) -> Retry | None:
        """The retry strategy that applies, with its parameters replaced."""
        assert execution.template is not None
        raw = self.raw_retry(execution.template)
        return None if raw is None else Retry.read(execution.substitute(raw, self.state.globals))

    def run(self, execution: Execution) -> Node | None:
        """Execute by type, without retries. Raises TemplateError after marking the node."""
        assert execution.template is not None
        kind = execution.template.type
        node = self.nodes.get(execution.name)
        try:
            if execution.template.is_pod:
                node = self.leaves.pod(execution, node)
            elif kind == "suspend":
                node = self.leaves.suspend(execution, node)
            else:
                if execution.body is None:
                    execution.body = (StepsBody if kind == "steps" else DagBody)(self, execution)
                body = execution.body
                assert isinstance(body, (StepsBody, DagBody))
                node = body.visit()
        except (TemplateError, TagError) as error:
            existing = self.nodes.get(execution.name)
            if existing is None:
                raise self.error(execution, TemplateError(str(error))) from None
            self.mark(existing, "Error", str(error))
            raise TemplateError(str(error)) from None
        return node
