"""JSONPath as far as workflows use it: ``$.a.b``, ``['a']``, ``[0]``, ``[-1:]``, ``[*]``, ``..a``, ``[0,2]``, ``[?(@.a > 1 && @.b)]``."""

from __future__ import annotations

import json
import re
from typing import Any

from workflows.local.language.exprlang import evaluate
from workflows.local.language.exprsyntax import ExpressionError

_STEP = re.compile(
    r"""\.\.(?P<deep>[A-Za-z_][\w-]*|\*)|\.(?P<name>[A-Za-z_][\w-]*|\*)|\[(?P<inside>(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^\]'"\[])+)\]""",
    re.VERBOSE,
)
_AT = re.compile(r"""@((?:\.[A-Za-z_][\w-]*|\[(?:\d+|'[^']*'|"[^"]*")\])*)""")


def parse_document(text: str) -> Any:
    """JSON with all numbers as floats, as Go reads it."""
    return json.loads(text, parse_int=float)


def query(path: str, document: Any) -> Any:
    """What ``path`` selects: one value, or a list where the path can select several. ``ValueError`` if there is nothing."""
    if not path.startswith("$"):
        raise ValueError(f"invalid JSONPath '{path}': it must start with $")
    found, position, several = [document], 1, False
    while position < len(path):
        match = _STEP.match(path, position)
        if match is None:
            raise ValueError(f"invalid JSONPath '{path}' at {path[position:]!r}")
        found, many = _step(found, match)
        several = several or many
        if not found and not several:
            raise ValueError(f"key: invalid token key '{match.group()}' not found")
        position = match.end()
    return found if several else found[0]


def _step(found: list[Any], match: re.Match[str]) -> tuple[list[Any], bool]:
    if match.group("deep") is not None:
        everything = [value for item in found for value in _descendants(item)]
        return _named(everything, match.group("deep")), True
    if match.group("name") is not None:
        return _named(found, match.group("name")), match.group("name") == "*"
    inside = match.group("inside").strip()
    if inside == "*":
        return _named(found, "*"), True
    if inside.startswith("?"):
        return [value for item in found for value in _children(item) if _holds(inside, value)], True
    if re.fullmatch(r"-?\d*:-?\d*(:-?\d+)?", inside):
        bounds = [int(part) if part else None for part in inside.split(":")]
        return [value for item in found if isinstance(item, list) for value in item[slice(*bounds)]], True
    keys = [_key(part) for part in re.findall(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?\d+""", inside)]
    return [item[key] for item in found for key in keys if _has(item, key)], len(keys) > 1


def _key(text: str) -> str | int:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text[0] in "'\"" else int(text)


def _has(item: Any, key: str | int) -> bool:
    if isinstance(key, int):
        return isinstance(item, list) and -len(item) <= key < len(item)
    return isinstance(item, dict) and key in item


def _children(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [item[key] for key in sorted(item)]
    return list(item) if isinstance(item, list) else []


def _named(found: list[Any], name: str) -> list[Any]:
    if name == "*":
        return [value for item in found for value in _children(item)]
    return [item[name] for item in found if isinstance(item, dict) and name in item]


def _descendants(item: Any) -> list[Any]:
    return [item] + [value for child in _children(item) for value in _descendants(child)]


def _holds(condition: str, item: Any) -> bool:
    """Whether ``?(...)`` holds: comparisons of ``@`` paths with ``&&``, ``||``, ``!`` and parentheses; a bare path must exist."""

    def at(path: str) -> Any:
        try:
            return query("$" + path, item)
        except ValueError:
            return None

    text = condition.removeprefix("?").strip().removeprefix("(").removesuffix(")")
    text = re.sub(r"=~\s*/((?:[^/\\]|\\.)*)/", lambda match: f"matches {json.dumps(match.group(1))}", text)
    text = _AT.sub(lambda match: f"at({json.dumps(match.group(1))})", text)
    try:
        value = evaluate(text, {"at": at})
    except ExpressionError:
        return False
    return value is not None and value is not False
