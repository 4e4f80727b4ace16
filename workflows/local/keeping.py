"""Making, marking and linking the nodes of a running workflow."""

from __future__ import annotations

import re
import time

from workflows.local.execution import Execution, Holder, TemplateError
from workflows.local.nodes import Node, Outputs
from workflows.local.plan import Base
from workflows.local.state import WorkflowState

_SEPARATOR = re.compile(r"^(\[\d+\])?\.")
_DISPLAY_NAME = r"[a-zA-Z0-9][a-zA-Z0-9-.]{0,61}[a-zA-Z0-9]"


class NodeKeeper:
    """The operator's hands: every change of a node goes through here, so that a pass knows whether it changed anything."""

    def __init__(self, state: WorkflowState) -> None:
        self.state = state
        self.nodes = state.nodes
        self.updated = False
        """Whether this pass changed a node: then another one follows."""

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
            self.skip(
                execution.name,
                execution.base,
                execution.holder,
                execution.boundary_id,
                "Error",
                str(error),
                execution=execution,
            )
        return error

    def skip(
        self,
        name: str,
        base: Base,
        holder: Holder,
        boundary_id: str,
        phase: str,
        message: str,
        *,
        kind: str = "Skipped",
        execution: Execution | None = None,
    ) -> Node:
        """A node of a template that is not executed: skipped, omitted, in error, or the group of a loop."""
        hooked = execution is not None and execution.hooked
        return self._add(
            name, base, holder, boundary_id, kind, phase, message, hooked=hooked, retried=False, flagged=True
        )

    def initialize(self, execution: Execution, kind: str, phase: str) -> Node:
        """The node of a template that is executed."""
        retried = execution.attempt_of is not None
        node = self._add(
            execution.name,
            execution.base,
            execution.holder,
            execution.boundary_id,
            kind,
            phase,
            "",
            hooked=execution.hooked,
            retried=retried,
            flagged=False,
        )
        node.inputs = [parameter.write() for parameter in execution.inputs]
        assert execution.template is not None
        if retried and execution.attempt_of is not None:
            above = self.nodes.get(execution.attempt_of.name)
            node.memoization = dict(above.memoization) if above is not None and above.memoization else None
        if kind == "Suspend":
            node.outputs = _supplied_outputs(execution)
        return node

    def _add(
        self,
        name: str,
        base: Base,
        holder: Holder,
        boundary_id: str,
        kind: str,
        phase: str,
        message: str,
        *,
        hooked: bool,
        retried: bool,
        flagged: bool,
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
        """Make the node of a name a child of ``parent``, once."""
        self.nodes.link(parent, self.nodes.node_id(child_name))

    def outbound(self, node: Node) -> list[str]:
        """The ids of the nodes that whatever follows ``node`` hangs on."""
        if node.type in ("Skipped", "Suspend", "Pod"):
            return [node.id]
        if node.type == "TaskGroup":
            return (
                [i for child in node.children for i in self.outbound(self.nodes.by_id[child])]
                if node.children
                else [node.id]
            )
        if node.type == "Retry" and node.children:
            return [node.children[-1]]
        return [i for child in node.outbound for i in self.outbound(self.nodes.by_id[child])]

    def set_display_name(self, execution: Execution, node: Node | None) -> None:
        """Apply the template's display-name annotation."""
        assert execution.template is not None
        name = (execution.template.raw.get("annotations") or {}).get("workflows.argoproj.io/display-name")
        if name and node is not None:
            name = execution.substitute(name, self.state.globals)
            if not re.fullmatch(_DISPLAY_NAME, name):
                raise self.error(
                    execution,
                    TemplateError(f"displayName must match the regex ^{_DISPLAY_NAME}$"),
                )
            if node.display_name != name:
                node.display_name = name
                self.nodes.changed(node)


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
