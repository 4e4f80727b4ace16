"""``{{tags}}``: Argo's substitution of ``{{name}}`` and ``{{=expression}}`` in every string of a document.

Argo substitutes in the JSON text of a template; here the same is done string by string (values and keys), which spares
the escaping. A tag that nothing resolves stays as it is, unless the caller is strict about its prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from workflows.local.language import jsonpath
from workflows.local.language.exprbuiltins import BUILTINS, to_float, to_int
from workflows.local.language.exprlang import check_names, paths, run
from workflows.local.language.exprsyntax import ExpressionError, parse, token_texts
from workflows.local.language.sprig import FUNCTIONS
from workflows.local.language.values import to_json

Scope = Mapping[str, str]

_GUARDED = (
    "item", "retries", "lastRetry.exitCode", "lastRetry.status", "lastRetry.duration", "lastRetry.message",
    "workflow.status", "workflow.failures",
)  # fmt: skip
"""An expression that reads one of these is left for a later pass while the scope lacks it."""


class TagError(ValueError):
    """A tag that must be resolved here and is not, or whose expression fails. ``missing``: a variable is not there yet."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


@lru_cache(maxsize=65536)
def split(text: str) -> tuple[str, ...]:
    """Text and tags in turn: the even elements are text, the odd ones what stood between ``{{`` and ``}}``."""
    parts: list[str] = []
    position = 0
    while True:
        start = text.find("{{", position)
        end = text.find("}}", start + 2) if start >= 0 else -1
        if end < 0:
            return (*parts, text[position:])
        parts += [text[position:start], text[start + 2 : end]]
        position = end + 2


def tags_of(document: Any) -> list[str]:
    """Every tag in the strings of ``document``, trimmed; expressions keep their ``=``."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, str):
            if "{{" in value:
                found.extend(tag.strip() for tag in split(value)[1::2])
        elif isinstance(value, dict):
            for key, inside in value.items():
                walk(key)
                walk(inside)
        elif isinstance(value, list):
            for inside in value:
                walk(inside)

    walk(document)
    return found


class Substitution:
    """One pass over documents with one scope. ``strict`` are prefixes whose tags must resolve (``tasks``, ``steps``)."""

    def __init__(self, scope: Scope, strict: tuple[str, ...] = (), *, everything: bool = False) -> None:
        self.scope = scope
        self.strict = strict
        self.everything = everything
        self._environment: dict[str, Any] | None = None

    def apply(self, document: Any) -> Any:
        """A copy of ``document`` with its tags replaced. ``TagError`` where strictness forbids to leave one."""
        if isinstance(document, str):
            return self.text(document) if "{{" in document else document
        if isinstance(document, dict):
            return {self.apply(key): self.apply(value) for key, value in document.items()}
        if isinstance(document, list):
            return [self.apply(value) for value in document]
        return document

    def text(self, text: str) -> str:
        parts = list(split(text))
        for index in range(1, len(parts), 2):
            tag = parts[index]
            parts[index] = self.expression(tag[1:]) if tag.startswith("=") else self.simple(tag)
        return "".join(parts)

    def simple(self, tag: str) -> str:
        name = tag.strip()
        if (value := self.scope.get(name)) is not None:
            return value
        nested = tag.rfind("{{")
        if nested > 0 and (value := self.scope.get(tag[nested + 2 :])) is not None:
            return "{{" + tag[:nested] + value
        if self.is_strict(name) and not (".outputs.artifacts." in name and not self.everything):
            raise TagError(f"failed to resolve {{{{{tag}}}}}", missing=True)
        return "{{" + tag + "}}"

    def is_strict(self, name: str) -> bool:
        return self.everything or any(name == prefix or name.startswith(prefix + ".") for prefix in self.strict)

    @property
    def environment(self) -> dict[str, Any]:
        if self._environment is None:
            self._environment = environment(self.scope)
        return self._environment

    def expression(self, text: str) -> str:
        try:
            tree = parse(text)
        except ExpressionError as error:
            raise TagError(f"failed to evaluate expression: {error}") from None
        missing = [path for path in paths(tree) if not _has(self.environment, path) and path not in BUILTINS]
        for path in missing:
            if self.is_strict(path):
                raise TagError(f"failed to evaluate expression: {path} is missing", missing=True)
        may_stay = bool(missing) or not (self.strict or self.everything)
        if may_stay and any(_mentions(text, name) and not _has(self.environment, name) for name in _GUARDED):
            return "{{=" + text + "}}"
        try:
            check_names(tree, self.environment)
            result = run(tree, self.environment, text)
            if result is None:
                raise ExpressionError(f'failed to evaluate expression "{text}"')
            return result if isinstance(result, str) else to_json(result, sort_keys=True)
        except ValueError as error:
            if may_stay:
                return "{{=" + text + "}}"
            raise TagError(f"failed to evaluate expression: {error}") from None


def _mentions(expression: str, variable: str) -> bool:
    if variable not in expression:
        return False
    tokens, wanted = token_texts(expression), token_texts(variable)
    return any(tokens[i : i + len(wanted)] == wanted for i in range(len(tokens) - len(wanted) + 1))


def _has(environment: Mapping[str, Any], path: str) -> bool:
    if path in environment:
        return True
    current: Any = environment
    for part in path.split("."):
        if not isinstance(current, Mapping) or part not in current:
            return False
        current = current[part]
    return True


def environment(scope: Mapping[str, Any]) -> dict[str, Any]:
    """What expressions see of a flat scope: dotted names as nested maps, and Argo's own functions."""
    nested: dict[str, Any] = {}
    for name in scope:
        inside, parts = nested, name.split(".")
        for part in parts[:-1]:
            below = inside.get(part)
            if not isinstance(below, dict):
                below = inside[part] = {}
            inside = below
        if not isinstance(inside.get(parts[-1]), dict):
            inside[parts[-1]] = scope[name]
    return nested | _FUNCTIONS


def _json_path(text: str, path: str) -> Any:
    try:
        return jsonpath.query(path, jsonpath.parse_document(text))
    except ValueError as error:
        raise ExpressionError(str(error)) from None


_FUNCTIONS: dict[str, Callable[..., Any] | Mapping[str, Any]] = {
    "asInt": to_int,
    "asFloat": to_float,
    "jsonpath": _json_path,
    "toJson": lambda value: to_json(value, sort_keys=True),
    "sprig": FUNCTIONS,
}

_PARAMETER = re.compile(r"{{[-a-zA-Z0-9]+(\.[-a-zA-Z0-9_]+)*}}")


def is_parameter(text: str) -> bool:
    """Whether ``text`` contains a plain tag."""
    return _PARAMETER.search(text) is not None
