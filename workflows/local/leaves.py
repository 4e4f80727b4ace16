"""The leaves of the tree: pods and suspensions."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from workflows.local.execution import Execution, PodRequest, TemplateError
from workflows.local.language.values import any_string, duration, go_duration, to_json
from workflows.local.nodes import Node
from workflows.local.plan import Raw, Template

if TYPE_CHECKING:
    from workflows.local.operator import Operator


class Leaves:
    """Container, script and suspend templates of one workflow."""

    def __init__(self, operator: Operator) -> None:
        self.op = operator
        self._results: dict[str, frozenset[str]] = {}

    def pod(self, execution: Execution, node: Node | None) -> Node:
        """The node of a container or script; its pod is asked for while it is pending."""
        assert execution.template is not None
        if node is None:
            node = self.op.initialize(execution, "Pod", "Pending")
        elif node.phase != "Pending":
            return node
        deadline = self.op.state.deadline
        if deadline is not None and not execution.on_exit and deadline - time.time() < 1:
            self.op.wake(deadline + 0.01)
            return node
        raw = execution.substitute(execution.template.raw, self.op.state.globals)
        self.op.nodes.take_up(node)
        self.op.pods.submit(
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
        if self.op.state.deadline is not None and not execution.on_exit:
            limits.append(int(self.op.state.deadline - time.time()))
        if raw.get("timeout"):
            try:
                left = int(node.started + go_duration(raw["timeout"]) - time.time())
            except ValueError as error:
                raise TemplateError(f"invalid timeout format. {error}") from None
            if left <= 1:
                raise TemplateError(f"{node.name} exceeded its deadline")
            limits.append(left)
        return float(min(limits)) if limits else None

    def _is_result_wanted(self, execution: Execution) -> bool:
        """Whether the template around refers to this step's ``outputs.result`` (Argo looks with regular expressions, too)."""
        boundary = self.op.nodes.by_id.get(execution.boundary_id)
        around = self.op.template_at(boundary) if boundary is not None else None
        if around is None:
            return False
        if execution.boundary_id not in self._results:
            self._results[execution.boundary_id] = _results_wanted(around)
        return _call_name(execution.name) in self._results[execution.boundary_id]

    def suspend(self, execution: Execution, node: Node | None) -> Node:
        """The node of a suspension; one with a duration ends by itself."""
        assert execution.template is not None
        if node is None:
            node = self.op.initialize(execution, "Suspend", "Pending")
        raw = (execution.substitute(execution.template.raw.get("suspend") or {}, self.op.state.globals)).get("duration")
        if raw:
            try:
                until = node.started + duration(any_string(raw))
            except ValueError as error:
                raise TemplateError(str(error)) from None
            if time.time() > until:
                self._use_defaults(node)
                return self.op.mark(node, "Succeeded")
            self.op.wake(until + 0.001, execution)
        return self.op.mark(node, "Running")

    def _use_defaults(self, node: Node) -> None:
        for raw in node.outputs.parameters if node.outputs is not None else ():
            default = (raw.get("valueFrom") or {}).get("default")
            if default is None:
                raise TemplateError(
                    f"raw output parameter '{raw['name']}' has not been set and does not have a default value"
                )
            raw["value"] = any_string(default)
            raw.pop("valueFrom")


def _results_wanted(template: Template) -> frozenset[str]:
    """The steps or tasks whose result the text of a template mentions (in brackets only with single quotes, as in Argo)."""
    kind, text = "tasks" if template.type == "dag" else "steps", to_json(template.raw)
    return frozenset(
        re.findall(rf"{kind}\.([-\w]+)\.outputs\.result", text)
        + re.findall(rf"{kind}\['([^']*)'\]\.outputs.result", text)
    )


_TRAILERS = re.compile(r"(\([^()]*\)|\[[^\[\]]*\])+$")


def _call_name(node_name: str) -> str:
    """The step or task that made a node: without attempts, items and what is before the last dot."""
    match = _TRAILERS.search(node_name)
    name = node_name[: match.start()] if match else node_name
    return name.rpartition(".")[2]
