"""Refuses a workflow that cannot mean anything, before anything runs: the checks of Argo's own admission, and a few more.

Names, templates, arguments, tags, dependencies, expressions. Each refusal is a ``Problem`` at a place of the document.
"""

from __future__ import annotations

import re

from workflows.local.callchecks import CallChecks
from workflows.local.checks import FIELD_NAME, PARAMETER_NAME
from workflows.local.document import Problem, Where
from workflows.local.language.tags import is_parameter
from workflows.local.language.values import any_string
from workflows.local.merging import with_defaults
from workflows.local.plan import TYPES, Base, Plan, Raw, Template, parameters, ref_key


class Validation(CallChecks):
    """One check of one plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.where = {
            t.get("name") or "": ("spec", "templates", i)
            for i, t in enumerate(plan.original_spec.get("templates") or ())
        }
        self.globals = self._globals()
        self.done: set[tuple[str, str]] = set()
        self.reached: dict[tuple[str, str], tuple[Base, Raw, Where]] = {}

    def run(self) -> None:
        """Check everything. Templates that nothing reaches are checked too, but for what they would need to run."""
        spec = self.plan.spec
        self.names(spec.get("templates") or (), ("spec", "templates"), FIELD_NAME)
        self.arguments(spec.get("arguments"), ("spec", "arguments"), allow_empty=False)
        self.retry(spec.get("retryStrategy"), ("spec", "retryStrategy"))
        entry = spec.get("entrypoint") or ""
        if not entry:
            raise Problem(("spec",), "spec.entrypoint is required")
        supplied = {p.name for p in parameters(spec.get("arguments"))}
        self._roots(entry, supplied)
        for name, raw in self.plan.local.templates.items():
            self._template(self.plan.local, raw, self._place(self.plan.local, name))

    def _roots(self, entry: str, supplied: set[str]) -> None:
        spec, base = self.plan.spec, self.plan.local
        self.use(base, entry, None, None, ("spec", "entrypoint"), supplied)
        self.hooks(spec.get("hooks"), base, ("spec", "hooks"))
        if spec.get("onExit"):
            self.globals |= {"workflow.failures"}
            self.use(base, spec["onExit"], None, None, ("spec", "onExit"), supplied)

    def _globals(self) -> set[str]:
        spec, metadata = self.plan.spec, self.plan.metadata
        names = {
            f"workflow.{name}"
            for name in (
                "name",
                "namespace",
                "mainEntrypoint",
                "serviceAccountName",
                "uid",
                "status",
                "priority",
                "failures",
            )
        }
        names |= {
            f"workflow.{name}"
            for name in ("parameters", "parameters.json", "annotations", "annotations.json", "labels", "labels.json")
        }
        names |= {f"workflow.parameters.{p.name}" for p in parameters(spec.get("arguments"))}
        extra = spec.get("workflowMetadata") or {}
        for kind in ("annotations", "labels"):
            names |= {f"workflow.{kind}.{key}" for key in (metadata.get(kind) or {})}
            names |= {f"workflow.{kind}.{key}" for key in (extra.get(kind) or {})}
        return names | {f"workflow.labels.{key}" for key in (extra.get("labelsFrom") or {})}

    def _place(self, base: Base, name: str) -> Where:
        return self.where.get(name, ()) if base is self.plan.local else ()

    # --- templates -----------------------------------------------------------------------------------------------

    def use(
        self, base: Base, name: str, ref: Raw | None, inline: Raw | None, where: Where, supplied: set[str] | None
    ) -> Template | None:
        """Check the template a call means and that its inputs are supplied; None where the call is a parameter itself."""
        if ref is not None:
            if name:
                raise Problem(where, "template name cannot be specified with templateRef")
            if not ref.get("name") or not ref.get("template"):
                raise Problem(where, "templateRef needs a name and a template")
            if is_parameter(str(ref.get("name"))) or is_parameter(str(ref.get("template"))):
                raise Problem(where, "a templateRef made from parameters is not implemented")
            if ref_key(ref) not in self.plan.bases:
                raise Problem(where, f"workflow template '{ref['name']}' not found in this file or its directory")
        raw = self.plan.find(base, name, ref, inline)
        if raw is None:
            what = (
                f"template '{ref.get('template')}' of workflow template '{ref.get('name')}'"
                if ref
                else f"template '{name}'"
            )
            raise Problem(where, f"{what} is not defined")
        inner = self.plan.base_of(ref, base)
        place = where if inline is not None else self._place(inner, str(raw.get("name")))
        template = self._template(inner, raw, place, inline=inline is not None)
        key = (inner.scope, str(raw.get("name")) if inline is None else f"inline {where}")
        self.reached.setdefault(key, (inner, raw, place))
        for parameter in template.inputs:
            missing = (
                parameter.value is None
                and parameter.default is None
                and (parameter.value_from or {}).get("supplied") is None
            )
            if supplied is not None and missing and parameter.name not in supplied:
                raise Problem(where, f"{template.label} inputs.parameters.{parameter.name} was not supplied")
        return template

    def _template(self, base: Base, raw: Raw, where: Where, *, inline: bool = False) -> Template:
        template = Template(with_defaults(raw, self.plan.spec.get("templateDefaults")))
        key = (base.scope, template.name)
        if not inline and key in self.done:
            return template
        self.done.add(key)
        kinds = [kind for kind in TYPES if raw.get(kind) is not None]
        if len(kinds) > 1:
            raise Problem(where, f"{template.label} has several types ({', '.join(kinds)}); choose one")
        if not kinds and not self._has_refused_type(raw):
            raise Problem(where, f"{template.label} has no type; give it one of {', '.join(TYPES)}")
        self.names((raw.get("inputs") or {}).get("parameters") or (), (*where, "inputs", "parameters"), PARAMETER_NAME)
        self._timing(Template(raw), where)
        self.retry(raw.get("retryStrategy"), (*where, "retryStrategy"))
        scope = self._scope(template)
        if template.type == "steps":
            self.steps(base, template, scope, where)
        elif template.type == "dag":
            self.dag(base, template, scope, where)
        else:
            self.tags({k: v for k, v in template.raw.items() if k != "metrics"}, scope, f"{template.label}", where)
            self._leaf(template, where)
        self._outputs(template, scope, where)
        return template

    def _has_refused_type(self, raw: Raw) -> bool:
        return any(raw.get(kind) is not None for kind in ("containerSet", "data", "http", "plugin", "resource"))

    def _scope(self, template: Template) -> set[str]:
        scope = set(self.globals) | {f"inputs.parameters.{p.name}" for p in template.inputs}
        if template.inputs:
            scope.add("inputs.parameters")
        if template.is_pod:
            scope.add("pod.name")
            scope |= {f"outputs.parameters.{p.name}.path" for p in template.outputs}
        return scope

    def _timing(self, template: Template, where: Where) -> None:
        timeout = template.raw.get("timeout")
        if timeout:
            if template.type in ("steps", "dag", "suspend"):
                raise Problem((*where, "timeout"), f"a {template.type} template doesn't support timeout")
            if re.fullmatch(r"\d+", timeout):
                raise Problem((*where, "timeout"), f"timeout '{timeout}' needs a unit ('{timeout}s')")
            self.duration(timeout, (*where, "timeout"), go=True)
        deadline = template.raw.get("activeDeadlineSeconds")
        if deadline is not None:
            if template.type in ("steps", "dag"):
                raise Problem(
                    (*where, "activeDeadlineSeconds"), "activeDeadlineSeconds is only valid for leaf templates"
                )
            self.whole(deadline, (*where, "activeDeadlineSeconds"), positive=True)
        suspend = (template.raw.get("suspend") or {}).get("duration")
        if suspend is not None:
            self.duration(any_string(suspend), (*where, "suspend", "duration"))

    def _leaf(self, template: Template, where: Where) -> None:
        if template.raw.get("parallelism") is not None:
            raise Problem((*where, "parallelism"), "parallelism is only valid for steps and dag templates")
        mounts: set[str] = set()
        for index, mount in enumerate(template.container.get("volumeMounts") or ()):
            here = (*where, template.type, "volumeMounts", index)
            path = mount.get("mountPath") or ""
            if not path.startswith("/") and "{{" not in path:
                raise Problem((*here, "mountPath"), f"mountPath '{path}' must be an absolute path")
            if path in mounts:
                raise Problem(here, f"mountPath '{path}' is already mounted")
            mounts.add(path)

    def _outputs(self, template: Template, scope: set[str], where: Where) -> None:
        raw = template.raw.get("outputs") or {}
        here = (*where, "outputs", "parameters")
        self.names(raw.get("parameters") or (), here, PARAMETER_NAME)
        self.tags(raw, scope, f"{template.label}.outputs", here)
        wanted = {
            "container": ("path",),
            "script": ("path",),
            "steps": ("parameter", "expression"),
            "dag": ("parameter", "expression"),
            "suspend": ("supplied",),
        }
        for index, parameter in enumerate(template.outputs):
            source = parameter.value_from
            if source is None and parameter.value is None:
                raise Problem((*here, index), f"output '{parameter.name}' does not have valueFrom or value specified")
            if source is None:
                continue
            given = [name for name in ("path", "parameter", "expression") if source.get(name)] + (
                ["supplied"] if source.get("supplied") is not None else []
            )
            allowed = wanted.get(template.type, ())
            if len(given) != 1 or given[0] not in allowed:
                raise Problem(
                    (*here, index, "valueFrom"),
                    f"output '{parameter.name}' of a {template.type} template needs one of: {', '.join(allowed)}",
                )
            if "{{" not in (source.get("expression") or "{{"):
                self.expression(source["expression"], (*here, index, "valueFrom", "expression"))
