"""The typed plan: what a workflow's objects are once they are read, and where its templates are found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from workflows.local.document import Where
from workflows.local.language.exprsyntax import ExpressionError, parse
from workflows.local.language.values import any_string

Raw = dict[str, Any]
TemplateType = Literal["container", "script", "steps", "dag", "suspend", ""]
TYPES: tuple[TemplateType, ...] = ("container", "steps", "dag", "script", "suspend")


@dataclass(frozen=True)
class Parameter:
    """A parameter of inputs, outputs or arguments; values are strings, whatever the YAML had."""

    name: str
    value: str | None = None
    default: str | None = None
    value_from: Raw | None = None
    global_name: str = ""
    enum: tuple[str, ...] = ()
    description: str | None = None

    @staticmethod
    def read(raw: Raw) -> Parameter:
        return Parameter(
            name=raw.get("name") or "",
            value=_scalar(raw.get("value")),
            default=_scalar(raw.get("default")),
            value_from=raw.get("valueFrom"),
            global_name=raw.get("globalName") or "",
            enum=tuple(any_string(item) for item in raw.get("enum") or ()),
            description=_scalar(raw.get("description")),
        )

    def write(self) -> Raw:
        """Argo's JSON of it, in Argo's order, without what is not set."""
        every = {
            "name": self.name,
            "default": self.default,
            "value": self.value,
            "valueFrom": self.value_from,
            "globalName": self.global_name or None,
            "enum": list(self.enum) or None,
            "description": self.description,
        }
        return {key: value for key, value in every.items() if value is not None}


def _scalar(value: Any) -> str | None:
    return None if value is None else any_string(value)


def parameters(raw: Any) -> tuple[Parameter, ...]:
    """The parameters of an inputs, outputs or arguments object, or of None."""
    return tuple(Parameter.read(item) for item in (raw or {}).get("parameters") or ())


@dataclass(frozen=True)
class Hook:
    """A lifecycle hook; ``exit`` hooks and ``onExit`` included."""

    template: str
    template_ref: Raw | None
    arguments: Raw
    expression: str

    @staticmethod
    def read(raw: Raw) -> Hook:
        return Hook(
            raw.get("template") or "", raw.get("templateRef"), raw.get("arguments") or {}, raw.get("expression") or ""
        )

    def with_arguments(self, arguments: Raw) -> Hook:
        """A hook without arguments of its own gets the workflow's."""
        return (
            self
            if self.arguments.get("parameters")
            else Hook(self.template, self.template_ref, arguments, self.expression)
        )


@dataclass(frozen=True)
class Call:
    """A step or a task: the use of a template. ``raw`` is what substitution works on."""

    kind: Literal["steps", "tasks"]
    raw: Raw

    @property
    def name(self) -> str:
        return str(self.raw.get("name") or "")

    @property
    def template(self) -> str:
        return self.raw.get("template") or ""

    @property
    def template_ref(self) -> Raw | None:
        return self.raw.get("templateRef")

    @property
    def inline(self) -> Raw | None:
        return self.raw.get("inline")

    @property
    def when(self) -> str:
        return self.raw.get("when") or ""

    @property
    def arguments(self) -> Raw:
        return self.raw.get("arguments") or {}

    @property
    def expands(self) -> bool:
        return (
            bool(self.raw.get("withItems"))
            or bool(self.raw.get("withParam"))
            or self.raw.get("withSequence") is not None
        )

    @cached_property
    def hooks(self) -> Mapping[str, Hook]:
        return {name: Hook.read(hook or {}) for name, hook in (self.raw.get("hooks") or {}).items()}

    @cached_property
    def running_hooks(self) -> Mapping[str, Hook]:
        """The hooks with a condition, all but ``exit``."""
        return {name: hook for name, hook in self.hooks.items() if name != "exit"}

    def exit_hook(self, workflow_arguments: Raw) -> Hook | None:
        if self.raw.get("onExit"):
            return Hook(self.raw["onExit"], None, workflow_arguments, "")
        return self.hooks["exit"].with_arguments(workflow_arguments) if "exit" in self.hooks else None

    def continues_on(self, phase: str) -> bool:
        allowed = self.raw.get("continueOn") or {}
        return bool((phase == "Error" and allowed.get("error")) or (phase == "Failed" and allowed.get("failed")))


@dataclass(frozen=True)
class Depends:
    """What a task waits for: the names it mentions, and the condition over their results (empty: it has none)."""

    names: tuple[str, ...]
    items: frozenset[str]
    """Of the names, those whose items are counted (AnySucceeded, AllFailed)."""
    logic: str


_NAME = re.compile(r"([a-zA-Z0-9][-a-zA-Z0-9]*?\.[A-Z][a-zA-Z]+)|([a-zA-Z0-9][-a-zA-Z0-9]*)")
RESULTS = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned", "AnySucceeded", "AllFailed")


def depends_of(task: Call, tasks: Mapping[str, Call]) -> Depends:
    """Argo's reading of ``depends`` (or ``dependencies``): a bare name means succeeded, skipped or daemoned, and what
    that task's ``continueOn`` adds."""
    text = task.raw.get("depends") or ""
    if not text:
        text = " && ".join(_expanded(name, tasks.get(name)) for name in task.raw.get("dependencies") or ())
    names: dict[str, None] = {}
    items: set[str] = set()

    def replace(match: re.Match[str]) -> str:
        if match.group(1):
            name, _, result = match.group(1).partition(".")
            names[name] = None
            if result in ("AnySucceeded", "AllFailed"):
                items.add(name)
            return match.group(1)
        names[match.group(2)] = None
        return _expanded(match.group(2), tasks.get(match.group(2)))

    logic = _NAME.sub(replace, text)
    return Depends(tuple(names), frozenset(items), logic.replace("-", "_"))


def _expanded(name: str, task: Call | None) -> str:
    results = ["Succeeded", "Skipped", "Daemoned"]
    allowed = (task.raw.get("continueOn") if task is not None else None) or {}
    results += [result for key, result in (("error", "Errored"), ("failed", "Failed")) if allowed.get(key)]
    return "(" + " || ".join(f"{name}.{result}" for result in results) + ")"


@dataclass(frozen=True)
class Retry:
    """A retry strategy as it was written; numbers are read when it is applied, since they may be parameters."""

    limit: Any
    policy: str
    backoff: Raw | None
    expression: str

    @staticmethod
    def read(raw: Raw | None) -> Retry | None:
        if raw is None:
            return None
        expression = raw.get("expression") or ""
        policy = raw.get("retryPolicy") or ("Always" if expression else "OnFailure")
        return Retry(raw.get("limit"), policy, raw.get("backoff"), expression)


class Template:
    """A template. ``raw`` is what substitution works on; the properties read it."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw

    @property
    def name(self) -> str:
        return str(self.raw.get("name") or "")

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"templates.{self.name}" if self.name else "the inline template"

    @cached_property
    def type(self) -> TemplateType:
        return next((kind for kind in TYPES if self.raw.get(kind) is not None), "")

    @property
    def is_pod(self) -> bool:
        return self.type in ("container", "script")

    @cached_property
    def inputs(self) -> tuple[Parameter, ...]:
        return parameters(self.raw.get("inputs"))

    @cached_property
    def outputs(self) -> tuple[Parameter, ...]:
        return parameters(self.raw.get("outputs"))

    @cached_property
    def steps(self) -> list[list[Call]]:
        return [[Call("steps", step or {}) for step in group or ()] for group in self.raw.get("steps") or ()]

    @cached_property
    def tasks(self) -> dict[str, Call]:
        return {task.get("name") or "": Call("tasks", task) for task in (self.raw.get("dag") or {}).get("tasks") or ()}

    @property
    def calls(self) -> list[Call]:
        """Every step or task of it."""
        return list(self.tasks.values()) or [step for group in self.steps for step in group]

    @cached_property
    def depends(self) -> dict[str, Depends]:
        return {name: depends_of(task, self.tasks) for name, task in self.tasks.items()}

    @cached_property
    def retry(self) -> Retry | None:
        return Retry.read(self.raw.get("retryStrategy"))

    @property
    def container(self) -> Raw:
        return self.raw.get("container") or self.raw.get("script") or {}

    @property
    def fail_fast(self) -> bool:
        return bool(self.raw.get("failFast"))

    @property
    def parallelism(self) -> int | None:
        value = self.raw.get("parallelism")
        return value if value else None

    @property
    def dag_fail_fast(self) -> bool:
        value = (self.raw.get("dag") or {}).get("failFast")
        return value is None or bool(value)

    @property
    def mutexes(self) -> list[str]:
        """Names of the mutexes it holds while it runs."""
        sync = self.raw.get("synchronization") or {}
        locks = ([sync["mutex"]] if sync.get("mutex") else []) + list(sync.get("mutexes") or ())
        return [str(lock.get("name") or "") for lock in locks]


@dataclass(frozen=True)
class Base:
    """Where templates are looked up by name: the workflow itself, or a WorkflowTemplate that a ``templateRef`` names."""

    scope: str
    """As Argo writes it in a node: ``local/``, ``namespaced/NAME``, ``cluster/NAME``."""
    templates: Mapping[str, Raw]


@dataclass(frozen=True)
class Plan:
    """A workflow that was read and checked; everything the engine needs, and nothing that is not JSON."""

    file: str
    metadata: Raw
    spec: Raw
    """With the parameters set, and merged with the workflow template that it refers to."""
    original_spec: Raw
    library: Mapping[str, Raw] = field(default_factory=dict)
    """``namespaced/NAME`` or ``cluster/NAME`` -> the spec of a workflow template."""
    ignored: tuple[str, ...] = ()
    """Fields that concern only a cluster."""
    reached: tuple[tuple[Raw, Where], ...] = ()
    """The templates that the workflow can get to, and where they stand in the file."""

    @property
    def name(self) -> str | None:
        return self.metadata.get("name")

    @cached_property
    def local(self) -> Base:
        return Base(f"local/{self.metadata.get('name') or ''}", _by_name(self.spec))

    @cached_property
    def bases(self) -> dict[str, Base]:
        return {key: Base(key, _by_name(spec)) for key, spec in self.library.items()}

    def base_of(self, ref: Raw | None, base: Base) -> Base:
        """Where names inside the template that ``ref`` leads to are looked up."""
        return base if ref is None else self.bases[ref_key(ref)]

    def find(self, base: Base, name: str, ref: Raw | None, inline: Raw | None) -> Raw | None:
        """The raw template that a call means, or None."""
        if inline is not None:
            return inline
        if ref is not None:
            found = self.bases.get(ref_key(ref))
            return None if found is None else found.templates.get(ref.get("template") or "")
        return base.templates.get(name)


def ref_key(ref: Raw) -> str:
    return f"{'cluster' if ref.get('clusterScope') else 'namespaced'}/{ref.get('name') or ''}"


def _by_name(spec: Raw) -> dict[str, Raw]:
    return {template.get("name") or "": template for template in spec.get("templates") or ()}


def expression_error(text: str) -> str | None:
    """Why ``text`` is no expression, or None."""
    try:
        parse(text)
    except ExpressionError as error:
        return str(error)
    return None
