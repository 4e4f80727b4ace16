"""One use of a template: what ``executeTemplate`` of Argo's controller works on, kept between passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from workflows.local.language.tags import Substitution
from workflows.local.language.values import to_json
from workflows.local.nodes import Node
from workflows.local.plan import Base, Parameter, Raw, Template


class Blocked(Exception):
    """A limit on parallelism is reached: come again when something has ended."""


class TemplateError(Exception):
    """A template cannot be executed; its node becomes an Error with this message."""


class DepthExceeded(TemplateError):
    """Too many templates within templates."""


class TimedOut(TemplateError):
    """A node waited longer than its template's timeout allows."""


@dataclass(frozen=True)
class Holder:
    """What names a template: a step, a task, a hook, or the workflow itself."""

    template: str
    ref: Raw | None = None
    inline: Raw | None = None
    name: str = ""
    kind: str = "steps"


class Body(Protocol):
    """The inside of an execution that has children."""

    def changed(self, key: str) -> None:
        """The child known as ``key`` has something new."""


@dataclass(eq=False)
class Execution:
    """A node's template, arguments and place. ``dirty``: something under it changed since it was last visited."""

    name: str
    base: Base
    holder: Holder
    arguments: Raw
    boundary_id: str = ""
    on_exit: bool = False
    hooked: bool = False
    parent: Execution | None = None
    key: str = ""
    attempt_of: Execution | None = None
    body: Body | None = None
    dirty: bool = True
    template: Template | None = None
    inner: Base | None = None
    """Where the templates that this one names are looked up."""
    inputs: tuple[Parameter, ...] = ()
    passes: list[dict[str, str]] = field(default_factory=list)
    """Scopes, besides the global one, that its strings are substituted with, one after the other."""
    deadline: float = 0.0
    """From a retry strategy's maxDuration; 0 if there is none."""

    def touch(self) -> None:
        """Make every execution above this one visit it again."""
        current: Execution | None = self
        while current is not None:
            current.dirty = True
            above = current.parent
            if above is not None and above.body is not None:
                above.body.changed(current.key)
            current = above

    def substitute(self, piece: Any, variables: Mapping[str, str]) -> Any:
        """``piece`` of the template with everything replaced that is known outside of its steps or tasks."""
        for scope in self.passes:
            piece = Substitution({**variables, **scope}).apply(piece)
        return piece

    def scope_of_inputs(self) -> dict[str, str]:
        return {f"inputs.parameters.{p.name}": p.value for p in self.inputs if p.value is not None}


def supply(template: Template, arguments: Raw) -> tuple[Parameter, ...]:
    """The inputs with the values that arguments or defaults give them. ``TemplateError`` for one that has none."""
    given = {raw.get("name"): Parameter.read(raw) for raw in arguments.get("parameters") or ()}
    out = []
    for parameter in template.inputs:
        value, source = parameter.value if parameter.value is not None else parameter.default, parameter.value_from
        if parameter.name in given:
            value, source = given[parameter.name].value, given[parameter.name].value_from
            source = None if value is not None else source
        if value is None:
            raise TemplateError(f"inputs.parameters.{parameter.name} was not supplied")
        out.append(
            Parameter(
                parameter.name,
                value,
                parameter.default,
                source,
                parameter.global_name,
                parameter.enum,
                parameter.description,
            )
        )
    return tuple(out)


def prepare(execution: Execution, variables: Mapping[str, str], local: dict[str, str]) -> None:
    """Set inputs and scopes: first globals and locals, then with the inputs that result (they may name globals)."""
    assert execution.template is not None
    supplied = supply(execution.template, execution.arguments)
    execution.inputs, execution.passes = _passes(execution.template, supplied, variables, local)


def prepare_attempt(attempt: Execution, retry: Execution, variables: Mapping[str, str], local: dict[str, str]) -> None:
    """The same for one attempt of a retried template, whose strings may name the attempt and the one before."""
    assert retry.template is not None
    inputs, passes = _passes(retry.template, retry.inputs, variables, local)
    attempt.inputs, attempt.passes = inputs, [*retry.passes, *passes]


def _passes(
    template: Template, supplied: tuple[Parameter, ...], variables: Mapping[str, str], local: dict[str, str]
) -> tuple[tuple[Parameter, ...], list[dict[str, str]]]:
    first = Substitution({**variables, **local})
    inputs = [first.apply(parameter.write()) for parameter in supplied]
    scope = dict(local)
    for raw in inputs:
        if raw.get("value") is not None:
            scope[f"inputs.parameters.{raw['name']}"] = raw["value"]
    scope["inputs.parameters"] = to_json(inputs)
    for output in template.outputs:
        if (output.value_from or {}).get("path"):
            scope[f"outputs.parameters.{output.name}.path"] = first.apply(output.value_from)["path"]
    second = Substitution({**variables, **scope})
    return tuple(Parameter.read(second.apply(raw)) for raw in inputs), [local, scope]


@dataclass(frozen=True)
class PodRequest:
    """Run the container or script of ``node``."""

    node: Node
    template: Raw
    """With everything substituted."""
    capture: bool
    """Whether its standard output becomes ``outputs.result``."""
    active_seconds: float | None
    """How long it may run, from its start."""
    deadline: float
    """When it must end, seconds since the epoch; 0 if there is none."""
    on_exit: bool


class Pods(Protocol):
    """What runs pods. It reports back through ``Operator.started`` and ``Operator.ended``."""

    def submit(self, request: PodRequest) -> None: ...

    def terminate(self, node: Node) -> None: ...
