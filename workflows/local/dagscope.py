"""What the tasks of a DAG see of each other, and what the DAG gives of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workflows.local.dagorder import Order
from workflows.local.execution import Execution, TemplateError
from workflows.local.nodes import Node, Outputs
from workflows.local.plan import Parameter
from workflows.local.scopes import add_aggregate, add_node, template_outputs

if TYPE_CHECKING:
    from workflows.local.operator import Operator


class DagScope:
    """The variables of one DAG."""

    def __init__(self, operator: Operator, execution: Execution, order: Order) -> None:
        assert execution.template is not None and execution.inner is not None
        self.op = operator
        self.execution = execution
        self.template = execution.template
        self.inner = execution.inner
        self.order = order

    def of(self, name: str) -> dict[str, str]:
        """What a task sees: the DAG's inputs, global outputs, and of its ancestors those that it mentions."""
        scope = self.execution.scope_of_inputs()
        scope |= {f"workflow.outputs.parameters.{o['name']}": o.get("value") or "" for o in self.op.state.outputs}
        mentioned = self.order.mentioned(name)
        if mentioned is not None and not mentioned:
            return scope
        for ancestor in self.order.ancestors(name):
            if mentioned is None or ancestor in mentioned:
                self._add(scope, ancestor)
        return scope

    def _node(self, name: str) -> Node | None:
        return self.op.nodes.get(f"{self.execution.name}.{name}")

    def _add(self, scope: dict[str, str], name: str) -> None:
        prefix, node = f"tasks.{name}", self._node(name)
        if node is None:
            raise TemplateError(f"Ancestor task node {name} not found")
        self._add_outputs(scope, prefix, node)
        if node.phase in ("Skipped", "Omitted") and node.outputs is None:
            task = self.template.tasks[name]
            raw = self.op.plan.find(self.inner, task.template, task.template_ref, task.inline)
            for output in ((raw or {}).get("outputs") or {}).get("parameters") or ():
                scope[f"{prefix}.outputs.parameters.{output.get('name')}"] = ""

    def _add_outputs(self, scope: dict[str, str], prefix: str, node: Node) -> None:
        if node.type == "TaskGroup":
            add_aggregate(scope, prefix, [self.op.nodes.by_id[child] for child in node.children])
        add_node(scope, prefix, node, self.op.nodes)

    def outputs(self) -> Outputs | None:
        """The DAG's own outputs, now that its tasks are done; theirs are exported where they have a global name."""
        scope = self.execution.scope_of_inputs()
        for name in self.template.tasks:
            node = self._node(name)
            if node is None:
                continue
            if self.template.outputs:
                self._add_outputs(scope, f"tasks.{name}", node)
            self.op.state.add_outputs(node)
        if not self.template.outputs:
            return None
        raw = self.execution.substitute(self.template.raw.get("outputs") or {}, self.op.state.globals)
        wanted = tuple(Parameter.read(parameter) for parameter in raw.get("parameters") or ())
        return Outputs(template_outputs(self.template, wanted, scope))
