"""YAML files as plain JSON-like data, with the line of every value for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import ConfigurationError

Where = tuple[str | int, ...]
"""The path of a value in a document: keys and indexes from the root."""


class Problem(Exception):
    """Something wrong at a place of a document; ``load`` turns it into one line with a file and a line number."""

    def __init__(self, where: Where, message: str) -> None:
        super().__init__(message)
        self.where = where
        self.message = message


class _Loader(yaml.CSafeLoader):
    """YAML scalars as Kubernetes reads them: no dates, no base-60 numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|[1-9][0-9_]*|0)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def _construct_int(loader: Any, node: Any) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.lstrip("+"))
    if re.fullmatch(r"0[0-7]+", digits):
        return sign * int(digits, 8)
    return sign * int(digits, 0)


def _construct_map(loader: Any, node: Any) -> dict[str, Any]:
    """A map with text for keys, each there once; keys that ``<<`` merges in give way to the map's own."""
    seen: set[str] = set()
    for key_node, _ in node.value:
        if (key := _key(loader, key_node)) in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is there twice", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return {_key(loader, key): loader.construct_object(value, deep=True) for key, value in node.value}


def _key(loader: Any, node: Any) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, "a key must be a string", node.start_mark)
    if node.tag == "tag:yaml.org,2002:merge":
        return "<<"
    key = loader.construct_object(node)
    return key if isinstance(key, str) else {True: "true", False: "false", None: "null"}.get(key, str(key))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_map)


def read_text(path: Path) -> str:
    """The file's text. ``ConfigurationError`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8 text; give a workflow in YAML or JSON") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None


def parse(text: str, name: str) -> list[Any]:
    """The documents of ``text``. ``ConfigurationError`` names the line of a syntax error."""
    try:
        return [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise ConfigurationError(f"{name}:{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None


def line_of(text: str, number: int, where: Where) -> int:
    """The line (from 1) of the value at ``where`` in document ``number``, or of the nearest one above it that exists."""
    nodes = [node for node in yaml.compose_all(text, yaml.CSafeLoader) if _is_something(node)]
    node, line = nodes[number], nodes[number].start_mark.line + 1
    for part in where:
        below = _child(node, part)
        if below is None:
            break
        node, line = below
    return line


def _is_something(node: Any) -> bool:
    return not (isinstance(node, yaml.ScalarNode) and node.value in ("", "null", "~"))


def _child(node: Any, part: str | int) -> tuple[Any, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                return value, key.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line + 1
    return None


def path_text(where: Where) -> str:
    """``spec.templates[0].name`` for a path."""
    out = ""
    for part in where:
        out += f"[{part}]" if isinstance(part, int) else ("." if out else "") + str(part)
    return out


def siblings(path: Path) -> Iterator[Path]:
    """Other YAML files of the same directory, in order of their names."""
    for other in sorted(path.parent.iterdir()):
        if other.suffix in (".yaml", ".yml") and other.is_file() and other.resolve() != path.resolve():
            yield other
