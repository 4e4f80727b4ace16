"""Steps templates: groups one after the other, the steps of a group side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workflows.local.execution import Blocked, DepthExceeded, Execution, Holder, TemplateError, TimedOut
from workflows.local.language.govaluate import WhenError, should_execute
from workflows.local.language.tags import Substitution, TagError
from workflows.local.loops import LoopError, expand
from workflows.local.nodes import Node, Outputs
from workflows.local.plan import Base, Call, Parameter
from workflows.local.scopes import add_aggregate, add_node, template_outputs

if TYPE_CHECKING:
    from workflows.local.operator import Operator


class _Requeue(Exception):
    """A reference to a step's output that is not there yet."""


class _Group:
    """A step group on its way."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.calls: list[Call] | None = None
        """The group's steps, references replaced and loops expanded; None until then."""
        self.dirty: set[int] = set()
        self.open: set[int] = set()
        """Steps that are not done, their hooks included."""


class StepsBody:
    """A steps template on its way."""

    def __init__(self, operator: Operator, execution: Execution) -> None:
        assert execution.template is not None and execution.inner is not None
        self.op = operator
        self.execution = execution
        self.template = execution.template
        self.inner: Base = execution.inner
        self.scope: dict[str, str] = execution.scope_of_inputs()
        self.group: _Group | None = None
        self.number = 0

    @property
    def node(self) -> Node:
        node = self.op.nodes.get(self.execution.name)
        assert node is not None
        return node

    def changed(self, key: str) -> None:
        number, _, step = key.partition(":")
        if self.group is not None and self.group.number == int(number):
            self.group.dirty.add(int(step))

    def visit(self) -> Node:
        """Go on with the current group, and with the next ones as far as they get."""
        op = self.op
        node = op.nodes.get(self.execution.name) or op.initialize(self.execution, "Steps", "Running")
        if node.phase == "Pending":
            op.mark(node, "Running")
        self.scope |= {f"workflow.outputs.parameters.{o['name']}": o.get("value") or "" for o in op.state.outputs}
        while self.number < len(self.template.steps):
            group = self._enter(node)
            try:
                group_node = self._visit_group(group)
            except _Requeue:
                op.defer(self.execution)
                return node
            if not group_node.fulfilled:
                return node
            if group_node.unsuccessful:
                self._set_outbound(node)
                return op.mark(node, "Failed", group_node.message)
            self._collect(group, group_node)
            self.number += 1
            self.group = None
        self._set_outbound(node)
        self._set_outputs(node)
        return op.mark(node, "Succeeded")

    def _enter(self, node: Node) -> _Group:
        op, name = self.op, f"{node.name}[{self.number}]"
        if self.group is None:
            self.group = _Group(name, self.number)
        group_node = op.nodes.get(name)
        if group_node is None:
            group_node = op.skip(name, self.inner, Holder(""), node.id, "Running", "", kind="StepGroup")
            self._connect(node, group_node)
        return self.group

    def _connect(self, node: Node, group_node: Node) -> None:
        op = self.op
        if self.number == 0:
            op.link(node, group_node.name)
            return
        before = op.nodes.get(f"{node.name}[{self.number - 1}]")
        assert before is not None
        if not before.children:
            op.link(before, group_node.name)
        for child in before.children:
            for outbound in op.outbound(op.nodes.by_id[child]):
                op.link(op.nodes.by_id[outbound], group_node.name)

    # --- one group -----------------------------------------------------------------------------------------------

    def _visit_group(self, group: _Group) -> Node:
        op = self.op
        node = op.nodes.get(group.name)
        assert node is not None
        if node.fulfilled and self._children_fulfilled(node):
            return node
        if group.calls is None:
            try:
                group.calls = self._expand(group, [self._resolve(step) for step in self.template.steps[group.number]])
            except TagError as error:
                if error.missing:
                    op.reasons[group.name] = str(error)
                    raise _Requeue from None
                return op.mark(node, "Error", f"failed to resolve references: {error}")
            except WhenError as error:
                return op.mark(node, "Error", f"failed to resolve references: {error}")
            except (LoopError, TemplateError) as error:
                return op.mark(node, "Error", str(error))
            group.dirty = set(range(len(group.calls)))
            group.open = set(group.dirty)
        ended = self._visit_steps(group, node)
        return ended if ended is not None else self._judge(group, node)

    def _children_fulfilled(self, node: Node) -> bool:
        return all(self.op.nodes.by_id[child].fulfilled for child in node.children)

    def _resolve(self, step: Call) -> Call:
        """The step with references to earlier ones replaced; its ``when`` first, since a step that is skipped needs no others."""
        op = self.op
        raw = self.execution.substitute(step.raw, op.state.globals)
        hooks = {key: raw.pop(key) for key in ("hooks",) if key in raw}
        substitution = Substitution({**op.state.globals, **self.scope}, ("steps", "tasks"))
        if raw.get("when"):
            when = substitution.apply(raw["when"])
            try:
                if not should_execute(when):
                    return Call("steps", {**raw, **hooks, "when": when})
            except WhenError:
                if not step.expands:
                    raise
        return Call("steps", {**substitution.apply(raw), **hooks})

    def _expand(self, group: _Group, steps: list[Call]) -> list[Call]:
        op, calls = self.op, []
        node = op.nodes.get(group.name)
        assert node is not None
        for step in steps:
            try:
                expanded = expand(step, {**op.state.globals, **self.scope})
            except TagError as error:
                raise LoopError(str(error)) from None
            if not expanded and op.nodes.get(f"{group.name}.{step.name}") is None:
                op.skip(
                    f"{group.name}.{step.name}",
                    self.inner,
                    _holder(step),
                    self.node.id,
                    "Skipped",
                    "Skipped, empty params",
                )
                op.link(node, f"{group.name}.{step.name}")
            calls += expanded
        return calls

    def _visit_steps(self, group: _Group, node: Node) -> Node | None:
        """Execute what is new or changed; the group's node if that ends the group at once."""
        assert group.calls is not None
        op = self.op
        for number in sorted(group.dirty):
            call = group.calls[number]
            name = f"{group.name}.{call.name}"
            try:
                proceed = should_execute(call.when)
            except WhenError as error:
                if op.nodes.get(name) is None:
                    op.skip(name, self.inner, _holder(call), self.node.id, "Error", str(error))
                    op.link(node, name)
                return op.mark(node, "Error", str(error))
            group.dirty.discard(number)
            if not proceed:
                if op.nodes.get(name) is None:
                    op.skip(
                        name, self.inner, _holder(call), self.node.id, "Skipped", f"when '{call.when}' evaluated false"
                    )
                    op.link(node, name)
                continue
            try:
                ended = self._execute(group, number, call, name, node)
            except Blocked:
                group.dirty.add(number)
                op.defer(self.execution)
                limit = op.state.spec.get("parallelism")
                if limit is not None and op.nodes.active_pods[""] >= limit:
                    break
                continue
            if ended is not None:
                return ended
        return None

    def _execute(self, group: _Group, number: int, call: Call, name: str, node: Node) -> Node | None:
        op = self.op
        execution = op.executions.get(name)
        if execution is None:
            execution = Execution(
                name, self.inner, _holder(call), call.arguments, self.node.id, on_exit=self.execution.on_exit, parent=self.execution,
                key=f"{group.number}:{number}",
            )  # fmt: skip
            op.executions[name] = execution
        try:
            op.execute(execution)
        except DepthExceeded:
            pass
        except TimedOut as error:
            return op.mark(node, "Failed", str(error))
        except TemplateError as error:
            if op.nodes.get(name) is not None:
                op.link(node, name)
            return op.mark(node, "Error", f"step group deemed errored due to child {name} error: {error}")
        finally:
            if op.nodes.get(name) is not None:
                op.link(node, name)
        return None

    def _judge(self, group: _Group, node: Node) -> Node:
        """Run the hooks of the steps; when all are done, the group's phase."""
        assert group.calls is not None
        op = self.op
        for number in sorted(group.open):
            call = group.calls[number]
            child = op.nodes.get(f"{group.name}.{call.name}")
            if child is None:
                continue
            self.scope[f"steps.{child.display_name}.status"] = child.phase
            key = f"{group.number}:{number}"
            prefix = f"steps.{call.name}"
            skipped = child.type == "Skipped" and not child.completed
            try:
                if not skipped and not op.hooks.run_conditional(
                    call.running_hooks, child, self.scope, self.inner, prefix, self.execution, key
                ):
                    return node
                if not child.fulfilled:
                    continue
                exit_hook = call.exit_hook(op.state.spec.get("arguments") or {})
                if child.completed and not op.hooks.run_exit(
                    exit_hook, child, self.scope, self.inner, prefix, self.execution, key
                ):
                    continue
            except (TemplateError, TagError) as error:
                return op.mark(node, "Error", str(error))
            group.open.discard(number)
        if group.open:
            return node
        for call in group.calls:
            child = op.nodes.get(f"{group.name}.{call.name}")
            if child is not None and child.unsuccessful and not call.continues_on(child.phase):
                return op.mark(node, "Failed", f"child '{child.id}' failed")
        return op.mark(node, "Succeeded")

    # --- afterwards ----------------------------------------------------------------------------------------------

    def _collect(self, group: _Group, group_node: Node) -> None:
        """What the following groups see of this one."""
        op = self.op
        for step in self.template.steps[group.number]:
            name, prefix = f"{group.name}.{step.name}", f"steps.{step.name}"
            child = op.nodes.get(name)
            if child is not None:
                add_node(self.scope, prefix, child, op.nodes)
                continue
            items = [op.nodes.by_id[i] for i in group_node.children]
            add_aggregate(
                self.scope,
                prefix,
                [item for item in items if item.name.startswith(f"{name}(") and item.type != "Skipped"],
            )
            add_node(self.scope, prefix, group_node, op.nodes)

    def _set_outbound(self, node: Node) -> None:
        op = self.op
        for number in range(len(self.template.steps) - 1, -1, -1):
            group = op.nodes.get(f"{node.name}[{number}]")
            if group is not None:
                node.outbound = [i for child in group.children for i in op.outbound(op.nodes.by_id[child])]
                op.nodes.changed(node)
                return

    def _set_outputs(self, node: Node) -> None:
        if not self.template.outputs:
            return
        raw = self.execution.substitute(self.template.raw.get("outputs") or {}, self.op.state.globals)
        wanted = tuple(Parameter.read(parameter) for parameter in raw.get("parameters") or ())
        node.outputs = Outputs(template_outputs(self.template, wanted, self.scope))
        self.op.state.add_outputs(node)


def _holder(call: Call) -> Holder:
    return Holder(call.template, call.template_ref, call.inline, call.name, call.kind)
