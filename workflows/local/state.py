"""A workflow while it runs: its name, phase, global variables and outputs, around its nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from workflows.local.language.exprlang import evaluate
from workflows.local.language.exprsyntax import ExpressionError
from workflows.local.language.tags import Substitution, environment
from workflows.local.language.values import go_quote, timestamp, to_json
from workflows.local.nodes import Node, Nodes
from workflows.local.plan import Parameter, Plan, Raw, parameters

_DATE_PARTS = "aAbBcdHIjLmMpQSTUwWxXyYZzfFeDkhnrRtuvVsCgG"
_LABEL = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")


class WorkflowState:
    """What ``workflow.json`` says, in memory."""

    def __init__(self, plan: Plan, name: str, uid: str, created: float, changed: Callable[[Node], Any]) -> None:
        self.plan = plan
        self.name = name
        self.uid = uid
        self.created = created
        self.labels: dict[str, str] = dict(plan.metadata.get("labels") or {})
        self.annotations: dict[str, str] = dict(plan.metadata.get("annotations") or {})
        self.phase = ""
        self.message = ""
        self.started = 0.0
        self.finished = 0.0
        self.outputs: list[Raw] = []
        self.nodes = Nodes(name, changed)
        self.spec: Raw = plan.spec
        """With global variables replaced, templates aside."""
        self.globals: dict[str, str] = {}

    @property
    def fulfilled(self) -> bool:
        return self.phase in ("Succeeded", "Failed", "Error")

    @property
    def namespace(self) -> str:
        return str(self.plan.metadata.get("namespace") or "default")

    @property
    def deadline(self) -> float | None:
        """When the workflow's own time is up, seconds since the epoch."""
        seconds = self.spec.get("activeDeadlineSeconds")
        return None if seconds is None or not self.started else int(self.started) + seconds

    def begin(self) -> None:
        """Set the global variables and replace them in the specification. ``ValueError`` says why that cannot be done."""
        self._set_globals()
        self._substitute(self.globals)
        self._set_metadata()
        self.refresh()

    def refresh(self) -> None:
        """The global variables that change while the workflow runs."""
        self.globals["workflow.status"] = self.phase
        end = self.finished or time.time()
        self.globals["workflow.duration"] = f"{max(0.0, end - self.started) if self.started else 0.0:f}"

    def _set_globals(self) -> None:
        spec = self.plan.spec
        own = {
            "workflow.name": self.name,
            "workflow.namespace": self.namespace,
            "workflow.mainEntrypoint": spec.get("entrypoint") or "",
            "workflow.serviceAccountName": spec.get("serviceAccountName") or "",
            "workflow.uid": self.uid,
            "workflow.creationTimestamp": timestamp(self.created),
            "workflow.creationTimestamp.s": str(int(self.created)),
            "workflow.creationTimestamp.RFC3339": timestamp(self.created),
        }
        if spec.get("priority") is not None:
            own["workflow.priority"] = str(spec["priority"])
        for part in _DATE_PARTS:
            own.setdefault(f"workflow.creationTimestamp.{part}", time.strftime(f"%{part}", time.gmtime(self.created)))
        arguments = parameters(spec.get("arguments"))
        listed = to_json([parameter.write() for parameter in arguments])
        own |= {"workflow.parameters": listed, "workflow.parameters.json": listed}
        for parameter in arguments:
            if parameter.value is None:
                raise ValueError(
                    f"either value or valueFrom must be specified in order to set global parameter {parameter.name}"
                )
            own[f"workflow.parameters.{parameter.name}"] = parameter.value
        extra = spec.get("workflowMetadata") or {}
        from_expressions = extra.get("labelsFrom") or {}
        for kind, values in (("annotations", self.annotations), ("labels", self.labels)):
            text = to_json(values or None, sort_keys=True)
            own |= {f"workflow.{kind}": text, f"workflow.{kind}.json": text}
            for key, value in {**values, **(extra.get(kind) or {})}.items():
                if kind == "annotations" or key not in from_expressions:
                    own[f"workflow.{kind}.{key}"] = value
        for output in self.outputs:
            own[f"workflow.outputs.parameters.{output['name']}"] = output.get("value", "")
        self.globals |= own

    def _set_metadata(self) -> None:
        """``workflowMetadata``: labels and annotations, some of them from expressions."""
        extra = self.spec.get("workflowMetadata") or {}
        changed: dict[str, str] = {}
        for kind, values in (("labels", self.labels), ("annotations", self.annotations)):
            for key, value in (extra.get(kind) or {}).items():
                values[key] = value
                changed[f"workflow.{kind}.{key}"] = value
        for key, source in (extra.get("labelsFrom") or {}).items():
            expression = str((source or {}).get("expression") or "")
            try:
                value = evaluate(expression, environment(self.globals))
            except ExpressionError as error:
                raise ValueError(f'failed to evaluate label "{key}" expression "{expression}": {error}') from None
            if not isinstance(value, str):
                raise ValueError(f'failed to evaluate label "{key}" expression "{expression}": it must be a string')
            self.labels[key] = value
            changed[f"workflow.labels.{key}"] = value
        for key, value in self.labels.items():
            if not _LABEL.match(value) or len(value) > 63:
                raise ValueError(f'invalid label value "{value}" for label "{key}"')
        self.globals |= changed
        if changed:
            self._substitute(changed)

    def _substitute(self, scope: dict[str, str]) -> None:
        templates = self.spec.get("templates")
        rest = {key: value for key, value in self.spec.items() if key not in ("templates", "templateDefaults")}
        kept = {key: self.spec[key] for key in ("templateDefaults",) if key in self.spec}
        self.spec = Substitution(scope).apply(rest) | kept | ({"templates": templates} if templates is not None else {})

    def add_outputs(self, node: Node) -> None:
        """Export the outputs that have a global name."""
        for raw in node.outputs.parameters if node.outputs is not None else ():
            parameter = Parameter.read(raw)
            if not parameter.global_name:
                continue
            value = parameter.value if parameter.value is not None else (parameter.default or "")
            self.globals[f"workflow.outputs.parameters.{parameter.global_name}"] = value
            for output in self.outputs:
                if output["name"] == parameter.global_name:
                    output["value"] = value
                    break
            else:
                self.outputs.append({"name": parameter.global_name, "value": value})

    def summarise(self, entry: Node) -> None:
        """``workflow.status`` and ``workflow.failures`` as exit handlers and hooks see them."""
        self.globals["workflow.status"] = {"Skipped": "Succeeded", "Omitted": "Succeeded"}.get(entry.phase, entry.phase)
        failures = [
            {
                "displayName": node.display_name,
                "message": node.message,
                "templateName": node.template_name,
                "phase": node.phase,
                "podName": self.pod_name(node.name, node.template_name),
                "finishedAt": timestamp(node.finished) if node.finished else None,
            }
            for node in self.nodes
            if node.unsuccessful
        ]
        self.globals["workflow.failures"] = go_quote(to_json(failures or None))

    def pod_name(self, node_name: str, template: str) -> str:
        """The name the pod of a node would have."""
        if node_name == self.name:
            return self.name
        prefix = f"{self.name}-{template}" if template else self.name
        return f"{prefix[:241]}-{self.nodes.node_id(node_name).rpartition('-')[2]}"

    def mark(self, phase: str, message: str = "") -> None:
        self.phase, self.message = phase, message
        if not self.started and phase != "Pending":
            self.started = time.time()
        if self.fulfilled and not self.finished:
            self.finished = time.time()
        self.refresh()

    def progress(self) -> str:
        """Argo's n/m over the pods."""
        done = total = 0
        for node in self.nodes:
            if node.type in ("Pod", "Suspend"):
                n, _, m = (node.progress or "0/1").partition("/")
                total += int(m)
                done += int(m) if node.phase in ("Succeeded", "Skipped", "Omitted") else int(n)
        return f"{done}/{total}"

    def write(self) -> Raw:
        """The whole Workflow, in Argo's shape."""
        metadata = {key: value for key, value in self.plan.metadata.items() if key not in ("labels", "annotations")}
        labels = self.labels | {
            "workflows.argoproj.io/phase": self.phase,
            "workflows.argoproj.io/completed": "true" if self.fulfilled else "false",
        }
        metadata |= {"name": self.name, "uid": self.uid, "creationTimestamp": timestamp(self.created), "labels": labels}
        if self.annotations:
            metadata["annotations"] = self.annotations
        status: Raw = {
            "phase": self.phase,
            "message": self.message or None,
            "startedAt": timestamp(self.started) if self.started else None,
            "finishedAt": timestamp(self.finished) if self.finished else None,
            "progress": self.progress(),
            "outputs": {"parameters": self.outputs} if self.outputs else None,
            "nodes": {node.id: node.write() for node in self.nodes},
        }
        return {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": metadata,
            "spec": self.plan.original_spec
            | ({"arguments": self.plan.spec["arguments"]} if self.plan.spec.get("arguments") else {}),
            "status": {key: value for key, value in status.items() if value is not None},
        }
