"""Checks of small things: names, numbers, durations, tags, expressions, arguments, retry strategies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from workflows.local.document import Problem, Where
from workflows.local.language.tags import tags_of
from workflows.local.language.values import any_string, duration, go_duration
from workflows.local.plan import Parameter, Raw, expression_error, parameters

FIELD_NAME = re.compile(r"^[a-zA-Z0-9][-a-zA-Z0-9]*$")
PARAMETER_NAME = re.compile(r"^[-a-zA-Z0-9_]+$")
_CHECKED = ("item.", "steps.", "inputs.", "outputs.", "pod.", "workflow.", "tasks.")
"""Tags with these prefixes must be known; others may mean something to the program that reads them."""
_ALWAYS = (
    "outputs.",
    "workflow.creationTimestamp",
    "workflow.scheduledTime",
    "workflow.duration",
    "tasks.name",
    "steps.name",
    "node.name",
)
_POLICIES = ("Always", "OnFailure", "OnError", "OnTransientError")


class Checks:
    """What every check needs: the variables that are known everywhere."""

    def __init__(self) -> None:
        self.globals: set[str] = set()

    def names(self, items: Iterable[Raw], where: Where, pattern: re.Pattern[str]) -> None:
        """Every item has a name, a valid one, and no two the same."""
        seen: set[str] = set()
        for index, item in enumerate(items):
            name = item.get("name") or ""
            here = (*where, index)
            if not name:
                raise Problem(here, "name is required")
            if not pattern.match(name) or len(name) > 128:
                raise Problem(
                    (*here, "name"),
                    f"name '{name}' is invalid: letters, digits and '-', starting with a letter or digit",
                )
            if name in seen:
                raise Problem((*here, "name"), f"name '{name}' is not unique")
            seen.add(name)

    def arguments(self, raw: Any, where: Where, *, allow_empty: bool) -> None:
        """Every argument has a value, from its list of values if it has one."""
        items = (raw or {}).get("parameters") or ()
        self.names(items, (*where, "parameters"), PARAMETER_NAME)
        for index, parameter in enumerate(parameters(raw)):
            here = (*where, "parameters", index)
            if parameter.value is None and parameter.value_from is None and not allow_empty:
                raise Problem(
                    here, f"parameter '{parameter.name}' has no value; give it one (-p {parameter.name}=VALUE)"
                )
            if parameter.value_from is not None and (parameter.value_from or {}).get("supplied") is None:
                raise Problem((*here, "valueFrom"), "valueFrom only allows: default, configMapKeyRef and supplied")
            if items[index].get("enum") is not None:
                self.enum(parameter, here)

    def enum(self, parameter: Parameter, where: Where) -> None:
        """A value is one of those listed."""
        if not parameter.enum:
            raise Problem((*where, "enum"), "enum should contain at least one value")
        if parameter.value is None or parameter.value not in parameter.enum:
            raise Problem(
                where, f"'{parameter.value}' is not one of {parameter.name}'s values: {', '.join(parameter.enum)}"
            )

    def retry(self, raw: Any, where: Where) -> None:
        """A retry strategy has sound numbers, durations and expression."""
        if not raw:
            return
        if raw.get("retryPolicy") and raw["retryPolicy"] not in _POLICIES:
            raise Problem((*where, "retryPolicy"), f"'{raw['retryPolicy']}' is not one of {', '.join(_POLICIES)}")
        if raw.get("limit") is not None:
            self.whole(raw["limit"], (*where, "limit"))
        self.expression(raw.get("expression"), (*where, "expression"))
        backoff = raw.get("backoff") or {}
        if raw.get("backoff") is not None and not backoff.get("duration"):
            raise Problem((*where, "backoff"), "no base duration specified for retryStrategy")
        for name in ("duration", "maxDuration", "cap"):
            if backoff.get(name):
                self.duration(backoff[name], (*where, "backoff", name))
        if backoff.get("factor") is not None:
            self.whole(backoff["factor"], (*where, "backoff", "factor"))

    def tags(
        self, raw: Any, scope: set[str], what: str, where: Where, own: set[str] | frozenset[str] = frozenset()
    ) -> None:
        """Every tag that must be known here is; every expression can be read."""
        for tag in tags_of(raw):
            if tag.startswith("="):
                if error := expression_error(tag[1:]):
                    raise Problem(where, f"{what}: expression '{tag[1:].strip()}' is not valid: {error}")
                continue
            if (
                not tag.startswith(_CHECKED)
                or tag in scope
                or tag in own
                or tag in self.globals
                or tag.startswith(_ALWAYS)
                or "{{" in tag
            ):
                continue
            if tag.startswith("item.") and ("item.*" in scope or "item.*" in own):
                continue
            if tag.startswith("workflow.outputs.parameters.") and "workflow.outputs.parameters.*" in self.globals:
                continue
            raise Problem(where, f"{what}: failed to resolve {{{{{tag}}}}}")

    def expression(self, text: str | None, where: Where) -> None:
        """An expression can be read (one with tags is read when they are replaced)."""
        if text and "{{" not in text and (error := expression_error(text)):
            raise Problem(where, f"expression '{text.strip()}' is not valid: {error}")

    def whole(self, value: Any, where: Where, *, positive: bool = False, negative: bool = False) -> None:
        """A whole number, or a parameter."""
        text = any_string(value)
        if "{{" in text:
            return
        if not re.fullmatch(r"-?\d+" if negative else r"\d+", text) or (positive and int(text) == 0):
            raise Problem(
                where, f"'{text}' must be a whole number{' greater than 0' if positive else ''} or a parameter"
            )

    def duration(self, text: str, where: Where, *, go: bool = False) -> None:
        """A duration, or a parameter; ``go``: without units it is none."""
        if "{{" in text:
            return
        try:
            if go:
                go_duration(text)
            else:
                duration(text)
        except ValueError as error:
            raise Problem(where, str(error)) from None
