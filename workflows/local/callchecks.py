"""Checks of steps and tasks: what they use, when they run, what they refer to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workflows.local.checks import FIELD_NAME, Checks
from workflows.local.document import Problem, Where
from workflows.local.language.govaluate import WhenError, should_execute
from workflows.local.language.tags import is_parameter, tags_of
from workflows.local.plan import RESULTS, Base, Call, Raw, Template, expression_error, parameters


class CallChecks(Checks):
    """Checks of the templates that use others."""

    def use(
        self, base: Base, name: str, ref: Raw | None, inline: Raw | None, where: Where, supplied: set[str] | None
    ) -> Template | None:
        """Check the template that a call means; given by ``Validation``."""
        raise NotImplementedError

    def steps(self, base: Base, template: Template, scope: set[str], where: Where) -> None:
        """The steps of a template, group by group."""
        seen: set[str] = set()
        for number, group in enumerate(template.steps):
            for index, step in enumerate(group):
                here = (*where, "steps", number, index)
                self.names([step.raw], here[:-1], FIELD_NAME)
                if step.name in seen:
                    raise Problem((*here, "name"), f"name '{step.name}' is not unique")
                seen.add(step.name)
                scope.add(f"steps.{step.name}.status")
                used = self.call(base, step, here)
                own = scope | self._items(step, here) | self._inline_inputs(step)
                if step.exit_hook({}) is not None or step.hooks:
                    own |= self._results(step, used, aggregate=False)
                self.tags(step.raw, own, f"{template.label}.steps", here)
                scope |= self._results(step, used, aggregate=step.expands)

    def dag(self, base: Base, template: Template, scope: set[str], where: Where) -> None:
        """The tasks of a template: dependencies, cycles, targets, references."""
        tasks = (template.raw.get("dag") or {}).get("tasks") or ()
        here = (*where, "dag", "tasks")
        if not tasks:
            raise Problem((*where, "dag"), f"{template.label} must have at least one task")
        self.names(tasks, here, FIELD_NAME)
        uses_depends = any(task.get("depends") for task in tasks)
        places = {task["name"]: (*here, index) for index, task in enumerate(tasks)}
        used: dict[str, Template | None] = {}
        for task in template.tasks.values():
            self._task_rules(template, task, uses_depends, places[task.name])
            used[task.name] = self.call(base, task, places[task.name])
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
            raise Problem(
                (*where, "name"), f"name '{task.name}' cannot begin with a digit when using 'depends' or 'dependencies'"
            )
        if uses_depends and raw.get("dependencies"):
            raise Problem(
                (*where, "dependencies"), "cannot use both 'depends' and 'dependencies' in the same DAG template"
            )
        if uses_depends and raw.get("continueOn") is not None:
            raise Problem(
                (*where, "continueOn"), "cannot use 'continueOn' when using 'depends'; use TASK.Failed or TASK.Errored"
            )
        for match in re.finditer(r"([a-zA-Z0-9][-a-zA-Z0-9]*)\.([a-zA-Z]+)", raw.get("depends") or ""):
            if match.group(2) not in RESULTS:
                raise Problem(
                    (*where, "depends"),
                    f"task result '{match.group(2)}' for task '{match.group(1)}' is invalid; use one of {', '.join(RESULTS)}",
                )
        for name in depends.names:
            dependency = template.tasks.get(name)
            if dependency is None:
                raise Problem(
                    (*where, "depends" if raw.get("depends") else "dependencies"),
                    f"task '{task.name}' depends on '{name}', which is not defined",
                )
            if name in depends.items and not dependency.expands:
                raise Problem(
                    (*where, "depends"), f"'{name}' has no items, so .AnySucceeded and .AllFailed say nothing about it"
                )
        if depends.logic and (error := expression_error(depends.logic)):
            raise Problem((*where, "depends"), f"depends '{raw.get('depends')}' is not valid: {error}")

    def _task_tags(
        self,
        template: Template,
        task: Call,
        scope: set[str],
        used: Mapping[str, Any],
        bits: Mapping[str, int],
        mask: int,
        where: Where,
    ) -> None:
        own = self._items(task, where) | self._inline_inputs(task)
        if task.hooks:
            own.add(f"tasks.{task.name}.status")
        tags = tags_of(task.raw)
        referenced = {tag.split(".")[1] for tag in tags if tag.startswith("tasks.") and tag.count(".") >= 1}
        for name in referenced & bits.keys():
            if mask & bits[name]:
                own |= self._results(template.tasks[name], used[name], aggregate=template.tasks[name].expands) | {
                    f"tasks.{name}.status"
                }
        self.tags(task.raw, scope, f"{template.label}.tasks.{task.name}", where, own)
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
                    raise Problem(
                        (*where, "dag", "tasks"),
                        f"{template.label}.tasks dependency cycle detected: {'->'.join(cycle)}",
                    )
                elif following not in state:
                    state[following] = 1
                    stack.append((following, iter(template.depends[following].names)))
        return order

    def _target(self, template: Template, scope: set[str], where: Where) -> None:
        target = (template.raw.get("dag") or {}).get("target") or ""
        self.tags(target, scope, f"{template.label}.target", where)
        for name in target.split(" ") if target else ():
            if not is_parameter(name) and name not in template.tasks:
                raise Problem(where, f"target '{name}' is not defined")

    def call(self, base: Base, call: Call, where: Where) -> Template | None:
        """A step or task: arguments, loop, condition, hooks, template."""
        self.arguments(call.raw.get("arguments"), (*where, "arguments"), allow_empty=False)
        self.loops(call, where)
        if call.when and "{{" not in call.when:
            try:
                should_execute(call.when)
            except WhenError as error:
                raise Problem((*where, "when"), str(error)) from None
        self.hooks(call.raw.get("hooks"), base, (*where, "hooks"))
        if call.raw.get("onExit"):
            self.use(base, call.raw["onExit"], None, None, (*where, "onExit"), None)
        if not call.template and call.template_ref is None and call.inline is None:
            raise Problem(where, f"'{call.name}' needs a template")
        if is_parameter(call.template):
            return None
        supplied = {p.name for p in parameters(call.arguments)}
        return self.use(base, call.template, call.template_ref, call.inline, where, supplied)

    def hooks(self, raw: Any, base: Base, where: Where) -> None:
        """Hooks have conditions and templates."""
        for name, hook in (raw or {}).items():
            if name != "exit" and not (hook or {}).get("expression"):
                raise Problem((*where, name), f"hook '{name}' needs an expression")
            self.expression((hook or {}).get("expression"), (*where, name, "expression"))
            self.use(
                base, (hook or {}).get("template") or "", (hook or {}).get("templateRef"), None, (*where, name), None
            )

    def loops(self, call: Call, where: Where) -> None:
        """At most one loop, over something that can be one."""
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
                    self.whole(sequence[name], (*where, "withSequence", name), negative=True)

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
        return (
            {f"inputs.parameters.{p.name}" for p in parameters((call.inline or {}).get("inputs"))}
            if call.inline
            else set()
        )

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
                self.globals.add(
                    "workflow.outputs.parameters."
                    + ("*" if is_parameter(parameter.global_name) else parameter.global_name)
                )
        return names | (
            {f"{prefix}.outputs.parameters", f"{prefix}.outputs.result", f"{prefix}.exitCode"} if aggregate else set()
        )
