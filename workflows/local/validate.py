"""Refuses a workflow that cannot mean anything, before anything runs: the checks of Argo's own admission, and a few more.

Names, templates, arguments, tags, dependencies, expressions. Each refusal is a ``Problem`` at a place of the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from workflows.local.document import Problem, Where
from workflows.local.language.govaluate import WhenError, should_execute
from workflows.local.language.tags import is_parameter, tags_of
from workflows.local.language.values import any_string, duration, go_duration
from workflows.local.merging import with_defaults
from workflows.local.plan import RESULTS, TYPES, Base, Call, Parameter, Plan, Raw, Template, expression_error, parameters, ref_key

_FIELD_NAME = re.compile(r"^[a-zA-Z0-9][-a-zA-Z0-9]*$")
_PARAMETER_NAME = re.compile(r"^[-a-zA-Z0-9_]+$")
_CHECKED = ("item.", "steps.", "inputs.", "outputs.", "pod.", "workflow.", "tasks.")
"""Tags with these prefixes must be known; others may mean something to the program that reads them."""
_ALWAYS = ("outputs.", "workflow.creationTimestamp", "workflow.scheduledTime", "workflow.duration", "tasks.name", "steps.name", "node.name")
_POLICIES = ("Always", "OnFailure", "OnError", "OnTransientError")


class Validation:
    """One check of one plan. ``where_of`` finds the place of a template of the workflow's own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.where = {t.get("name") or "": ("spec", "templates", i) for i, t in enumerate(plan.original_spec.get("templates") or ())}
        self.globals = self._globals()
        self.done: set[tuple[str, str]] = set()
        self.any_global_output = False
        self.reached: dict[tuple[str, str], tuple[Base, Raw, Where]] = {}

    def run(self) -> None:
        """Check everything. Templates that nothing reaches are checked too, but for what they would need to run."""
        spec = self.plan.spec
        self._names(spec.get("templates") or (), ("spec", "templates"), _FIELD_NAME)
        self._arguments(spec.get("arguments"), ("spec", "arguments"), allow_empty=False)
        self._retry(spec.get("retryStrategy"), ("spec", "retryStrategy"))
        entry = spec.get("entrypoint") or ""
        if not entry:
            raise Problem(("spec",), "spec.entrypoint is required")
        supplied = {p.name for p in parameters(spec.get("arguments"))}
        self._roots(entry, supplied)
        for name, raw in self.plan.local.templates.items():
            self._template(self.plan.local, raw, self._place(self.plan.local, name))

    def _roots(self, entry: str, supplied: set[str]) -> None:
        spec, base = self.plan.spec, self.plan.local
        self._use(base, entry, None, None, ("spec", "entrypoint"), supplied)
        self._hooks(spec.get("hooks"), base, ("spec", "hooks"))
        if spec.get("onExit"):
            self.globals |= {"workflow.failures"}
            self._use(base, spec["onExit"], None, None, ("spec", "onExit"), supplied)

    def _globals(self) -> set[str]:
        spec, metadata = self.plan.spec, self.plan.metadata
        names = {f"workflow.{name}" for name in ("name", "namespace", "mainEntrypoint", "serviceAccountName", "uid", "status", "priority", "failures")}
        names |= {f"workflow.{name}" for name in ("parameters", "parameters.json", "annotations", "annotations.json", "labels", "labels.json")}
        names |= {f"workflow.parameters.{p.name}" for p in parameters(spec.get("arguments"))}
        extra = spec.get("workflowMetadata") or {}
        for kind in ("annotations", "labels"):
            names |= {f"workflow.{kind}.{key}" for key in (metadata.get(kind) or {})}
            names |= {f"workflow.{kind}.{key}" for key in (extra.get(kind) or {})}
        return names | {f"workflow.labels.{key}" for key in (extra.get("labelsFrom") or {})}

    def _place(self, base: Base, name: str) -> Where:
        return self.where.get(name, ()) if base is self.plan.local else ()

    # --- names and arguments -------------------------------------------------------------------------------------

    def _names(self, items: Iterable[Raw], where: Where, pattern: re.Pattern[str]) -> None:
        seen: set[str] = set()
        for index, item in enumerate(items):
            name = item.get("name") or ""
            here = (*where, index)
            if not name:
                raise Problem(here, "name is required")
            if not pattern.match(name) or len(name) > 128:
                raise Problem((*here, "name"), f"name '{name}' is invalid: letters, digits and '-', starting with a letter or digit")
            if name in seen:
                raise Problem((*here, "name"), f"name '{name}' is not unique")
            seen.add(name)

    def _arguments(self, raw: Any, where: Where, *, allow_empty: bool) -> None:
        items = (raw or {}).get("parameters") or ()
        self._names(items, (*where, "parameters"), _PARAMETER_NAME)
        for index, parameter in enumerate(parameters(raw)):
            here = (*where, "parameters", index)
            if parameter.value is None and parameter.value_from is None and not allow_empty:
                raise Problem(here, f"parameter '{parameter.name}' has no value; give it one (-p {parameter.name}=VALUE)")
            if parameter.value_from is not None and (parameter.value_from or {}).get("supplied") is None:
                raise Problem((*here, "valueFrom"), "valueFrom only allows: default, configMapKeyRef and supplied")
            if items[index].get("enum") is not None:
                self._enum(parameter, here)

    def _enum(self, parameter: Parameter, where: Where) -> None:
        if not parameter.enum:
            raise Problem((*where, "enum"), "enum should contain at least one value")
        if parameter.value is None or parameter.value not in parameter.enum:
            raise Problem(where, f"'{parameter.value}' is not one of {parameter.name}'s values: {', '.join(parameter.enum)}")

    # --- templates -----------------------------------------------------------------------------------------------

    def _use(self, base: Base, name: str, ref: Raw | None, inline: Raw | None, where: Where, supplied: set[str] | None) -> Template | None:
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
            what = f"template '{ref.get('template')}' of workflow template '{ref.get('name')}'" if ref else f"template '{name}'"
            raise Problem(where, f"{what} is not defined")
        inner = self.plan.base_of(ref, base)
        place = where if inline is not None else self._place(inner, str(raw.get("name")))
        template = self._template(inner, raw, place, inline=inline is not None)
        key = (inner.scope, str(raw.get("name")) if inline is None else f"inline {where}")
        self.reached.setdefault(key, (inner, raw, place))
        for parameter in template.inputs:
            missing = parameter.value is None and parameter.default is None and (parameter.value_from or {}).get("supplied") is None
            if supplied is not None and missing and parameter.name not in supplied:
                raise Problem(where, f"templates.{template.name} inputs.parameters.{parameter.name} was not supplied")
        return template

    def _template(self, base: Base, raw: Raw, where: Where, *, inline: bool = False) -> Template:
        template = Template(with_defaults(raw, self.plan.spec.get("templateDefaults")))
        key = (base.scope, template.name)
        if not inline and key in self.done:
            return template
        self.done.add(key)
        kinds = [kind for kind in TYPES if raw.get(kind) is not None]
        if len(kinds) > 1:
            raise Problem(where, f"templates.{template.name} has several types ({', '.join(kinds)}); choose one")
        if not kinds and not self._has_refused_type(raw):
            raise Problem(where, f"templates.{template.name} has no type; give it one of {', '.join(TYPES)}")
        self._names((raw.get("inputs") or {}).get("parameters") or (), (*where, "inputs", "parameters"), _PARAMETER_NAME)
        self._timing(Template(raw), where)
        self._retry(raw.get("retryStrategy"), (*where, "retryStrategy"))
        scope = self._scope(template)
        if template.type == "steps":
            self._steps(base, template, scope, where)
        elif template.type == "dag":
            self._dag(base, template, scope, where)
        else:
            self._tags({k: v for k, v in template.raw.items() if k != "metrics"}, scope, f"templates.{template.name}", where)
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
            self._duration(timeout, (*where, "timeout"), go=True)
        deadline = template.raw.get("activeDeadlineSeconds")
        if deadline is not None:
            if template.type in ("steps", "dag"):
                raise Problem((*where, "activeDeadlineSeconds"), "activeDeadlineSeconds is only valid for leaf templates")
            self._whole(deadline, (*where, "activeDeadlineSeconds"), positive=True)
        suspend = (template.raw.get("suspend") or {}).get("duration")
        if suspend is not None:
            self._duration(any_string(suspend), (*where, "suspend", "duration"))

    def _leaf(self, template: Template, where: Where) -> None:
        if template.raw.get("parallelism") is not None:
            raise Problem((*where, "parallelism"), "parallelism is only valid for steps and dag templates")
        mounts: set[str] = set()
        for index, mount in enumerate(template.container.get("volumeMounts") or ()):
            here = (*where, template.type, "volumeMounts", index)
            path = mount.get("mountPath") or ""
            if path in mounts:
                raise Problem(here, f"mountPath '{path}' is already mounted")
            mounts.add(path)

    def _retry(self, raw: Any, where: Where) -> None:
        if not raw:
            return
        if raw.get("retryPolicy") and raw["retryPolicy"] not in _POLICIES:
            raise Problem((*where, "retryPolicy"), f"'{raw['retryPolicy']}' is not one of {', '.join(_POLICIES)}")
        if raw.get("limit") is not None:
            self._whole(raw["limit"], (*where, "limit"))
        self._expression(raw.get("expression"), (*where, "expression"))
        backoff = raw.get("backoff") or {}
        if raw.get("backoff") is not None and not backoff.get("duration"):
            raise Problem((*where, "backoff"), "no base duration specified for retryStrategy")
        for name in ("duration", "maxDuration", "cap"):
            if backoff.get(name):
                self._duration(backoff[name], (*where, "backoff", name))
        if backoff.get("factor") is not None:
            self._whole(backoff["factor"], (*where, "backoff", "factor"))

    def _outputs(self, template: Template, scope: set[str], where: Where) -> None:
        raw = template.raw.get("outputs") or {}
        here = (*where, "outputs", "parameters")
        self._names(raw.get("parameters") or (), here, _PARAMETER_NAME)
        self._tags(raw, scope, f"templates.{template.name}.outputs", here)
        wanted = {"container": ("path",), "script": ("path",), "steps": ("parameter", "expression"), "dag": ("parameter", "expression"), "suspend": ("supplied",)}
        for index, parameter in enumerate(template.outputs):
            source = parameter.value_from
            if source is None and parameter.value is None:
                raise Problem((*here, index), f"output '{parameter.name}' does not have valueFrom or value specified")
            if source is None:
                continue
            given = [name for name in ("path", "parameter", "expression") if source.get(name)] + (["supplied"] if source.get("supplied") is not None else [])
            allowed = wanted.get(template.type, ())
            if len(given) != 1 or given[0] not in allowed:
                raise Problem((*here, index, "valueFrom"), f"output '{parameter.name}' of a {template.type} template needs one of: {', '.join(allowed)}")
            if "{{" not in (source.get("expression") or "{{"):
                self._expression(source["expression"], (*here, index, "valueFrom", "expression"))

    # --- steps and dags ------------------------------------------------------------------------------------------

    def _steps(self, base: Base, template: Template, scope: set[str], where: Where) -> None:
        seen: set[str] = set()
        for number, group in enumerate(template.steps):
            for index, step in enumerate(group):
                here = (*where, "steps", number, index)
                self._names([step.raw], here[:-1], _FIELD_NAME)
                if step.name in seen:
                    raise Problem((*here, "name"), f"name '{step.name}' is not unique")
                seen.add(step.name)
                scope.add(f"steps.{step.name}.status")
                used = self._call(base, step, here)
                own = scope | self._items(step, here) | self._inline_inputs(step)
                if step.exit_hook({}) is not None or step.hooks:
                    own |= self._results(step, used, aggregate=False)
                self._tags(step.raw, own, f"templates.{template.name}.steps", here)
                scope |= self._results(step, used, aggregate=step.expands)

    def _dag(self, base: Base, template: Template, scope: set[str], where: Where) -> None:
        tasks = (template.raw.get("dag") or {}).get("tasks") or ()
        here = (*where, "dag", "tasks")
        if not tasks:
            raise Problem((*where, "dag"), f"templates.{template.name} must have at least one task")
        self._names(tasks, here, _FIELD_NAME)
        uses_depends = any(task.get("depends") for task in tasks)
        places = {task["name"]: (*here, index) for index, task in enumerate(tasks)}
        used: dict[str, Template | None] = {}
        for task in template.tasks.values():
            self._task_rules(template, task, uses_depends, places[task.name])
            used[task.name] = self._call(base, task, places[task.name])
            scope |= self._results(task, used[task.name], aggregate=task.expands)
        order = self._order(template, where)
        self._target(template, scope, (*where, "dag", "target"))
        ancestors: dict[str, int] = {}
        bits = {name: 1 << index for index, name in enumerate(order)}
        for name in order:
            mask = 0
            for dependency in template.depends[name].names:
                mask |= ancestors[dependency] | bits[dependency]
            ancestors[name] = mask
        for task in template.tasks.values():
            self._task_tags(template, task, scope, used, bits, ancestors[task.name], places[task.name])

    def _task_rules(self, template: Template, task: Call, uses_depends: bool, where: Where) -> None:
        raw, depends = task.raw, template.depends[task.name]
        if (uses_depends or raw.get("dependencies")) and task.name[0].isdigit():
            raise Problem((*where, "name"), f"name '{task.name}' cannot begin with a digit when using 'depends' or 'dependencies'")
        if uses_depends and raw.get("dependencies"):
            raise Problem((*where, "dependencies"), "cannot use both 'depends' and 'dependencies' in the same DAG template")
        if uses_depends and raw.get("continueOn") is not None:
            raise Problem((*where, "continueOn"), "cannot use 'continueOn' when using 'depends'; use TASK.Failed or TASK.Errored")
        for match in re.finditer(r"([a-zA-Z0-9][-a-zA-Z0-9]*)\.([A-Z][a-zA-Z]+)", raw.get("depends") or ""):
            if match.group(2) not in RESULTS:
                raise Problem((*where, "depends"), f"task result '{match.group(2)}' for task '{match.group(1)}' is invalid; use one of {', '.join(RESULTS)}")
        for name in depends.names:
            dependency = template.tasks.get(name)
            if dependency is None:
                raise Problem((*where, "depends" if raw.get("depends") else "dependencies"), f"task '{task.name}' depends on '{name}', which is not defined")
            if name in depends.items and not dependency.expands:
                raise Problem((*where, "depends"), f"'{name}' has no items, so .AnySucceeded and .AllFailed say nothing about it")
        if depends.logic and (error := expression_error(depends.logic)):
            raise Problem((*where, "depends"), f"depends '{raw.get('depends')}' is not valid: {error}")

    def _task_tags(self, template: Template, task: Call, scope: set[str], used: Mapping[str, Any], bits: Mapping[str, int], mask: int, where: Where) -> None:
        own = self._items(task, where) | self._inline_inputs(task)
        if task.hooks:
            own.add(f"tasks.{task.name}.status")
        tags = tags_of(task.raw)
        referenced = {tag.split(".")[1] for tag in tags if tag.startswith("tasks.") and tag.count(".") >= 1}
        for name in referenced & bits.keys():
            if mask & bits[name]:
                own |= self._results(template.tasks[name], used[name], aggregate=template.tasks[name].expands) | {f"tasks.{name}.status"}
        self._tags(task.raw, scope, f"templates.{template.name}.tasks.{task.name}", where, own)
        for parameter in parameters(task.arguments):
            if parameter.value is not None and parameter.value.startswith("{{tasks."):
                name = parameter.value.split(".")[1].removesuffix("}}")
                if not mask & bits.get(name, 0):
                    raise Problem(where, f"missing dependency '{name}' for parameter '{parameter.name}'")

    def _order(self, template: Template, where: Where) -> list[str]:
        """The tasks with every dependency before what depends on it; a cycle is a ``Problem`` that shows it."""
        order: list[str] = []
        state: dict[str, int] = {}
        for start in template.tasks:
            stack = [(start, iter(template.depends[start].names))] if start not in state else []
            if stack:
                state[start] = 1
            while stack:
                name, rest = stack[-1]
                following = next(rest, None)
                if following is None:
                    state[name] = 2
                    order.append(name)
                    stack.pop()
                elif state.get(following) == 1:
                    names = [entry[0] for entry in stack]
                    cycle = [*names[names.index(following) :], following]
                    raise Problem((*where, "dag", "tasks"), f"templates.{template.name}.tasks dependency cycle detected: {'->'.join(cycle)}")
                elif following not in state:
                    state[following] = 1
                    stack.append((following, iter(template.depends[following].names)))
        return order

    def _target(self, template: Template, scope: set[str], where: Where) -> None:
        target = (template.raw.get("dag") or {}).get("target") or ""
        self._tags(target, scope, f"templates.{template.name}.target", where)
        for name in target.split(" ") if target else ():
            if not is_parameter(name) and name not in template.tasks:
                raise Problem(where, f"target '{name}' is not defined")

    def _call(self, base: Base, call: Call, where: Where) -> Template | None:
        self._arguments(call.raw.get("arguments"), (*where, "arguments"), allow_empty=False)
        self._loops(call, where)
        if call.when and "{{" not in call.when:
            try:
                should_execute(call.when)
            except WhenError as error:
                raise Problem((*where, "when"), str(error)) from None
        self._hooks(call.raw.get("hooks"), base, (*where, "hooks"))
        if call.raw.get("onExit"):
            self._use(base, call.raw["onExit"], None, None, (*where, "onExit"), None)
        if not call.template and call.template_ref is None and call.inline is None:
            raise Problem(where, f"'{call.name}' needs a template")
        if is_parameter(call.template):
            return None
        supplied = {p.name for p in parameters(call.arguments)}
        return self._use(base, call.template, call.template_ref, call.inline, where, supplied)

    def _hooks(self, raw: Any, base: Base, where: Where) -> None:
        for name, hook in (raw or {}).items():
            if name != "exit" and not (hook or {}).get("expression"):
                raise Problem((*where, name), f"hook '{name}' needs an expression")
            self._expression((hook or {}).get("expression"), (*where, name, "expression"))
            self._use(base, (hook or {}).get("template") or "", (hook or {}).get("templateRef"), None, (*where, name), None)

    def _loops(self, call: Call, where: Where) -> None:
        raw = call.raw
        kinds = [kind for kind in ("withItems", "withParam", "withSequence") if raw.get(kind)]
        if len(kinds) > 1:
            raise Problem((*where, kinds[1]), "only one of withItems, withParam, withSequence can be specified")
        sequence = raw.get("withSequence")
        if raw.get("withItems") is not None and not isinstance(raw["withItems"], list):
            raise Problem((*where, "withItems"), "must be a list (withParam takes JSON text)")
        if sequence is not None:
            if sequence.get("count") is not None and sequence.get("end") is not None:
                raise Problem((*where, "withSequence"), "only one of count or end can be defined in withSequence")
            if sequence.get("count") is None and sequence.get("end") is None:
                raise Problem((*where, "withSequence"), "must have one of count or end defined in withSequence")
            for name in ("count", "start", "end"):
                if sequence.get(name) is not None:
                    self._whole(sequence[name], (*where, "withSequence", name), negative=True)

    def _items(self, call: Call, where: Where) -> set[str]:
        raw = call.raw
        if raw.get("withParam"):
            return {"item", "item.*"}
        if raw.get("withSequence") is not None:
            return {"item"}
        names: set[str] = set()
        for item in raw.get("withItems") or ():
            names |= {f"item.{key}" for key in item} if isinstance(item, dict) else {"item"}
        return names | ({"item"} if names else set())

    def _inline_inputs(self, call: Call) -> set[str]:
        return {f"inputs.parameters.{p.name}" for p in parameters((call.inline or {}).get("inputs"))} if call.inline else set()

    def _results(self, call: Call, template: Template | None, *, aggregate: bool) -> set[str]:
        prefix = f"{call.kind}.{call.name}"
        names = {f"{prefix}.{name}" for name in ("id", "startedAt", "finishedAt", "hostNodeName")}
        if template is None:
            return names
        if template.is_pod:
            names |= {f"{prefix}.outputs.result", f"{prefix}.exitCode"}
        for parameter in template.outputs:
            names.add(f"{prefix}.outputs.parameters.{parameter.name}")
            if parameter.global_name:
                self.globals.add("workflow.outputs.parameters." + ("*" if is_parameter(parameter.global_name) else parameter.global_name))
        return names | ({f"{prefix}.outputs.parameters", f"{prefix}.outputs.result", f"{prefix}.exitCode"} if aggregate else set())

    # --- small values --------------------------------------------------------------------------------------------

    def _tags(self, raw: Any, scope: set[str], what: str, where: Where, own: set[str] | frozenset[str] = frozenset()) -> None:
        for tag in tags_of(raw):
            if tag.startswith("="):
                if error := expression_error(tag[1:]):
                    raise Problem(where, f"{what}: expression '{tag[1:].strip()}' is not valid: {error}")
                continue
            if not tag.startswith(_CHECKED) or tag in scope or tag in own or tag in self.globals or tag.startswith(_ALWAYS) or "{{" in tag:
                continue
            if tag.startswith("item.") and ("item.*" in scope or "item.*" in own):
                continue
            if tag.startswith("workflow.outputs.parameters.") and "workflow.outputs.parameters.*" in self.globals:
                continue
            raise Problem(where, f"{what}: failed to resolve {{{{{tag}}}}}")

    def _expression(self, text: str | None, where: Where) -> None:
        if text and "{{" not in text and (error := expression_error(text)):
            raise Problem(where, f"expression '{text.strip()}' is not valid: {error}")

    def _whole(self, value: Any, where: Where, *, positive: bool = False, negative: bool = False) -> None:
        text = any_string(value)
        if "{{" in text:
            return
        if not re.fullmatch(r"-?\d+" if negative else r"\d+", text) or (positive and int(text) == 0):
            raise Problem(where, f"'{text}' must be a whole number{' greater than 0' if positive else ''} or a parameter")

    def _duration(self, text: str, where: Where, *, go: bool = False) -> None:
        if "{{" in text:
            return
        try:
            if go:
                go_duration(text)
            else:
                duration(text)
        except ValueError as error:
            raise Problem(where, str(error)) from None
