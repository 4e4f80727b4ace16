"""DAG templates: tasks run when what they depend on allows it.

Argo walks up from the targets at every pass. The same comes out when each task is looked at once what it depends on has
settled (is fulfilled, its hooks too), and again when something under it changed; so that is what is kept here.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from workflows.local.dagorder import Order, verdict
from workflows.local.dagscope import DagScope
from workflows.local.dagwaits import Waits
from workflows.local.execution import Blocked, DepthExceeded, Execution, Holder, TemplateError, TimedOut
from workflows.local.language.exprlang import evaluate_bool
from workflows.local.language.exprsyntax import ExpressionError
from workflows.local.language.govaluate import WhenError, should_execute
from workflows.local.language.tags import Substitution, TagError
from workflows.local.loops import LoopError, expand
from workflows.local.nodes import Node
from workflows.local.plan import Base, Call

if TYPE_CHECKING:
    from workflows.local.operator import Operator

_RESULTS = {
    "Succeeded": "Succeeded",
    "Failed": "Failed",
    "Error": "Errored",
    "Skipped": "Skipped",
    "Omitted": "Omitted",
}


class _Group:
    """The items of a task with a loop."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.dirty = set(range(len(calls)))
        self.open = set(range(len(calls)))
        """Items whose node is not fulfilled, or whose exit hook is not done."""
        self.index = {call.name: number for number, call in enumerate(calls)}


class DagBody:
    """A DAG on its way."""

    def __init__(self, operator: Operator, execution: Execution) -> None:
        assert execution.template is not None and execution.inner is not None
        self._inner: Base = execution.inner
        self.op = operator
        self.execution = execution
        self.template = execution.template
        self.tasks = execution.template.tasks
        self.depends = execution.template.depends
        target = execution.substitute((self.template.raw.get("dag") or {}).get("target") or "", operator.state.globals)
        self.order = Order(self.template, target)
        self.targets = self.order.targets
        self.scope = DagScope(operator, execution, self.order)
        self.waits = Waits(self.order, operator.nodes, self._task_node_name(""))
        self.queue: list[tuple[int, str]] = []
        self.queued: set[str] = set()
        self.blocked: set[str] = set()
        self.groups: dict[str, _Group] = {}
        for name in self.order.position:
            if self.waits.count[name] == 0 or self.op.nodes.get(self._task_node_name(name)) is not None:
                self._enqueue(name)

    @property
    def node(self) -> Node:
        node = self.op.nodes.get(self.execution.name)
        assert node is not None
        return node

    def _enqueue(self, *names: str) -> None:
        for name in names:
            if name not in self.queued:
                self.queued.add(name)
                heapq.heappush(self.queue, (self.order.position[name], name))

    def changed(self, key: str) -> None:
        task, _, item = key.partition("\0")
        group = self.groups.get(task)
        if group is not None and item:
            group.dirty.add(int(item))
        self._enqueue(task)

    def _task_node_name(self, name: str) -> str:
        return f"{self.execution.name}.{name}"

    def visit(self) -> Node:
        """Look at every task that something happened to, then at the DAG as a whole."""
        op = self.op
        node = op.nodes.get(self.execution.name) or op.initialize(self.execution, "DAG", "Running")
        if node.phase == "Pending":
            op.mark(node, "Running")
        for name in self.blocked | self.waits.owed:
            self._enqueue(name)
        self.blocked.clear()
        while self.queue:
            _, name = heapq.heappop(self.queue)
            self.queued.discard(name)
            try:
                self._visit_task(name)
            except Blocked:
                self.blocked.add(name)
                limit = op.state.spec.get("parallelism")
                if limit is not None and op.nodes.active_pods[""] >= limit:
                    break
        self.waits.end_pass()
        if self.blocked or self.queue or self.waits.owed:
            op.defer(self.execution)
        return self._assess(node)

    # --- one task ------------------------------------------------------------------------------------------------

    def _visit_task(self, name: str) -> None:
        op, task = self.op, self.tasks[name]
        node = op.nodes.get(self._task_node_name(name))
        if name in self.waits.owed:
            self.waits.owed.discard(name)
            if not self.waits.is_reached(name):
                self._enqueue(*self.waits.settle(name))
                return
        if node is not None and (node.fulfilled or node.phase == "Running"):
            try:
                if not self._run_hooks(task, node):
                    return
            except (TemplateError, TagError) as error:
                op.mark(node, "Error", str(error))
        if node is not None and node.fulfilled:
            if not node.completed or self._run_exit(task, node, name):
                self._enqueue(*self.waits.settle(name))
            return
        if node is None and self.waits.count[name] > 0:
            return
        if node is None and self.depends[name].logic and not self._may_run(name):
            return
        if name in self.groups:
            self._visit_group(name, self.groups[name])
            return
        self._start(name, node)

    def _may_run(self, name: str) -> bool:
        """Evaluate what the task depends on; omitted, or in error, it is settled at once."""
        logic = self.depends[name].logic
        try:
            if evaluate_bool(logic, {d.replace("-", "_"): self._task_results(d) for d in self.depends[name].names}):
                return True
            self._skip(name, "Omitted", "omitted: depends condition not met")
        except ExpressionError as error:
            self._skip(name, "Error", f"unable to evaluate expression '{logic}': {error}")
        return False

    def _task_results(self, name: str) -> dict[str, bool]:
        node = self.op.nodes.get(self._task_node_name(name))
        assert node is not None
        results = dict.fromkeys(
            ("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned", "AnySucceeded", "AllFailed"), False
        )
        results[_RESULTS[node.phase]] = True
        if node.type == "TaskGroup":
            phases = [self.op.nodes.by_id[child].phase for child in node.children]
            results["AnySucceeded"] = "Succeeded" in phases
            results["AllFailed"] = bool(phases) and all(phase == "Failed" for phase in phases)
        return results

    def _skip(self, name: str, phase: str, message: str) -> Node:
        call = self.tasks[name]
        node = self.op.skip(self._task_node_name(name), self._inner, _holder(call), self.node.id, phase, message)
        self._connect(name, node.name, None)
        self._enqueue(name)
        return node

    def _connect(self, name: str, node_name: str, group: Node | None) -> None:
        """Hang a node on the outbound nodes of its dependencies, on its group, or on the DAG."""
        op, names = self.op, self.depends[name].names
        if group is not None:
            op.link(group, node_name)
        elif not names:
            op.link(self.node, node_name)
        else:
            for dependency in names:
                before = op.nodes.get(self._task_node_name(dependency))
                for outbound in op.outbound(before) if before is not None else ():
                    op.link(op.nodes.by_id[outbound], node_name)

    def _start(self, name: str, node: Node | None) -> None:
        """Resolve the task's references, expand its loop, execute it."""
        task = self.tasks[name]
        if node is not None and not task.expands and node.name in self.op.executions:
            # its arguments were replaced when it began; after a resume they must be again
            self._execute_one(name, task)
            return
        try:
            resolved = self._resolve(task)
        except TagError as error:
            if error.missing:
                self.op.reasons[self._task_node_name(name)] = str(error)
                raise Blocked from None
            self._skip(name, "Error", str(error))
            return
        except (TemplateError, WhenError) as error:
            self._skip(name, "Error", str(error))
            return
        try:
            calls = expand(resolved, {**self.op.state.globals, **self.scope.of(name)})
        except (TemplateError, LoopError, TagError) as error:
            self._skip(name, "Error", str(error))
            return
        if not task.expands:
            self._execute_one(name, calls[0])
        elif not calls:
            self._skip(name, "Skipped", "Skipped, empty params")
        else:
            self.groups[name] = _Group(calls)
            if node is None:
                self._connect(name, self._task_node_name(name), None)
                self.op.skip(
                    self._task_node_name(name),
                    self._inner,
                    _holder(task),
                    self.node.id,
                    "Running",
                    "",
                    kind="TaskGroup",
                )
            self._visit_group(name, self.groups[name])

    def _resolve(self, task: Call) -> Call:
        """The task with references to other tasks replaced; its ``when`` first, since a task that is skipped needs no others."""
        op = self.op
        raw = self.execution.substitute(task.raw, op.state.globals)
        hooks = {key: raw.pop(key) for key in ("hooks",) if key in raw}
        substitution = Substitution({**op.state.globals, **self.scope.of(task.name)}, ("tasks", "steps"))
        if raw.get("when"):
            when = substitution.apply(raw["when"])
            try:
                if not should_execute(when):
                    return Call("tasks", {**raw, **hooks, "when": when})
            except WhenError:
                if not task.expands:
                    raise
        return Call("tasks", {**substitution.apply(raw), **hooks})

    def _execute_one(self, name: str, call: Call) -> None:
        op, node_name = self.op, self._task_node_name(name)
        if op.nodes.get(node_name) is None:
            self._prepare_node(name, call, None)
            if op.nodes.get(node_name) is not None:
                self._enqueue(name)
                return
        node = self._run(name, call, node_name, name)
        if node is not None and node.fulfilled:
            self._ended(name, bool(self.tasks[name].running_hooks) and not self._has_exit_hook(name))

    def _prepare_node(self, name: str, call: Call, group: Node | None) -> None:
        """Skip a task or an item whose ``when`` does not hold."""
        op = self.op
        node_name = self._task_node_name(call.name)
        try:
            if should_execute(call.when):
                return
            phase, message = "Skipped", f"when '{call.when}' evaluated false"
        except WhenError as error:
            phase, message = "Error", str(error)
        op.skip(node_name, self._inner, _holder(self.tasks[name]), self.node.id, phase, message)
        self._connect(name, node_name, group)

    def _run(self, name: str, call: Call, node_name: str, key: str) -> Node | None:
        """Execute a task or an item; its node gets connected as soon as there is one."""
        op = self.op
        execution = op.executions.get(node_name)
        if execution is None:
            execution = Execution(
                node_name,
                self._inner,
                _holder(call),
                call.arguments,
                self.node.id,
                on_exit=self.execution.on_exit,
                parent=self.execution,
                key=key,
            )
            op.executions[node_name] = execution
        group = op.nodes.get(self._task_node_name(name)) if name in self.groups else None
        try:
            return op.execute(execution)
        except DepthExceeded:
            return op.nodes.get(node_name)
        except TimedOut as error:
            made = op.nodes.get(node_name)
            return op.mark(made, "Failed", str(error)) if made is not None else None
        except TemplateError as error:
            made = op.nodes.get(node_name)
            return op.mark(made, "Error", f"task '{node_name}' errored: {error}") if made is not None else None
        finally:
            if op.nodes.get(node_name) is not None:
                self._connect(name, node_name, group)

    # --- a task with a loop --------------------------------------------------------------------------------------

    def _visit_group(self, name: str, group: _Group) -> None:
        op = self.op
        node = op.nodes.get(self._task_node_name(name))
        assert node is not None
        for number in sorted(group.dirty & group.open):
            call = group.calls[number]
            node_name = self._task_node_name(call.name)
            if op.nodes.get(node_name) is None:
                self._prepare_node(name, call, node)
            made = op.nodes.get(node_name)
            if made is None or not (made.type == "Skipped" and made.fulfilled):
                made = self._run(name, call, node_name, f"{name}\0{number}")
            group.dirty.discard(number)
            if (
                made is not None
                and made.fulfilled
                and (not made.completed or self._run_exit(self.tasks[name], made, f"{name}\0{number}"))
            ):
                group.open.discard(number)
        if group.open:
            return
        phase = "Succeeded"
        for call in group.calls:
            made = op.nodes.get(self._task_node_name(call.name))
            if made is not None and made.unsuccessful:
                phase = made.phase
        op.mark(node, phase)
        self._ended(name, bool(self.tasks[name].hooks) or self._has_exit_hook(name))

    # --- hooks and scopes ----------------------------------------------------------------------------------------

    def _has_exit_hook(self, name: str) -> bool:
        return bool(self.tasks[name].raw.get("onExit")) or "exit" in self.tasks[name].hooks

    def _ended(self, name: str, hooks_are_late: bool) -> None:
        """A task ended while it was looked at: look at it again, or at what depends on it."""
        late = hooks_are_late and name not in self.targets
        self._enqueue(*(self.waits.end_late(name) if late else [name]))

    def _substituted(self, task: Call) -> Call:
        return Call(
            "tasks",
            self.execution.substitute(
                {k: task.raw[k] for k in ("hooks", "onExit", "name") if k in task.raw}, self.op.state.globals
            ),
        )

    def _run_hooks(self, task: Call, node: Node) -> bool:
        if not task.running_hooks:
            return True
        scope = self.scope.of(task.name) | {f"tasks.{task.name}.status": node.phase}
        hooks = self._substituted(task).running_hooks
        return self.op.hooks.run_conditional(
            hooks, node, scope, self._inner, f"tasks.{task.name}", self.execution, task.name
        )

    def _run_exit(self, task: Call, node: Node, key: str) -> bool:
        if not (task.raw.get("onExit") or "exit" in task.hooks):
            return True
        scope = self.scope.of(task.name) | {f"tasks.{task.name}.status": node.phase}
        hook = self._substituted(task).exit_hook(self.op.state.spec.get("arguments") or {})
        try:
            return self.op.hooks.run_exit(hook, node, scope, self._inner, f"tasks.{task.name}", self.execution, key)
        except TemplateError:
            return False

    # --- the whole -----------------------------------------------------------------------------------------------

    def _assess(self, node: Node) -> Node:
        op = self.op
        if op.nodes.unfulfilled[node.id] or self.queue:
            return node
        phase = verdict(
            node, [self._task_node_name(name) for name in self.targets], self._continues, self.template, op.nodes
        )
        if phase == "Running":
            return node
        if phase == "Succeeded":
            node.outputs = self.scope.outputs()
        node.outbound = []
        for name in self.targets:
            target = op.nodes.get(self._task_node_name(name))
            node.outbound += op.outbound(target) if target is not None else []
        op.nodes.changed(node)
        return op.mark(node, phase)

    def _continues(self, node_name: str, phase: str) -> bool:
        return self.tasks[node_name.removeprefix(f"{self.execution.name}.")].continues_on(phase)


def _holder(call: Call) -> Holder:
    return Holder(call.template, call.template_ref, call.inline, call.name, call.kind)
