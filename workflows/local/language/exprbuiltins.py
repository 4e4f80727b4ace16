"""The functions that expr-lang has built in, over plain values."""

from __future__ import annotations

import base64
import datetime
import json
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from workflows.local.language.exprsyntax import ExpressionError
from workflows.local.language.values import go_duration, go_print


def type_name(value: Any) -> str:
    """The name Go has for the type of a value."""
    if value is None:
        return "<nil>"
    if isinstance(value, bool):
        return "bool"
    for python, go in (
        (int, "int"),
        (float, "float64"),
        (str, "string"),
        (list, "[]interface {}"),
        (Mapping, "map[string]interface {}"),
    ):
        if isinstance(value, python):
            return go
    return "func" if callable(value) else type(value).__name__


def to_int(value: Any) -> int:
    """``int()``: numbers are cut, strings must be whole numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ExpressionError(f"invalid argument for int (type {type_name(value)})")
    try:
        return int(value) if not isinstance(value, str) else _atoi(value)
    except ValueError:
        raise ExpressionError(f"invalid operation: int({value})") from None


def _atoi(text: str) -> int:
    if text != text.strip() or "_" in text:
        raise ValueError(text)
    return int(text)


def to_float(value: Any) -> float:
    """``float()`` of a number or a string."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ExpressionError(f"invalid argument for float (type {type_name(value)})")
    try:
        return float(value)
    except ValueError:
        raise ExpressionError(f"invalid operation: float({value})") from None


def _kind(value: Any) -> str:
    if value is None:
        return "nil"
    name = type_name(value)
    return {"float64": "float", "[]interface {}": "array", "map[string]interface {}": "map"}.get(name, name)


def _length(value: Any) -> int:
    if isinstance(value, (str, list, Mapping)):
        return len(value)
    raise ExpressionError(f"invalid argument for len (type {type_name(value)})")


def _trim(text: str, characters: str | None = None) -> str:
    return text.strip(characters)


def _split(text: str, separator: str, limit: int = -1) -> list[str]:
    if limit == 0:
        return []
    if separator == "":
        parts = list(text)
        return parts if limit < 0 or len(parts) <= limit else [*parts[: limit - 1], "".join(parts[limit - 1 :])]
    return text.split(separator, limit - 1 if limit > 0 else -1)


def _split_after(text: str, separator: str, limit: int = -1) -> list[str]:
    parts = _split(text, separator, limit)
    return [part + separator for part in parts[:-1]] + parts[-1:]


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    return text.replace(old, new, count)


def _flat(values: tuple[Any, ...]) -> list[Any]:
    out: list[Any] = []
    for value in values:
        out += _flat(tuple(value)) if isinstance(value, list) else [value]
    return out


def _round(value: float) -> float:
    return float(math.floor(abs(value) + 0.5) * (1 if value >= 0 else -1))


def _get(inside: Any, key: Any) -> Any:
    if isinstance(inside, Mapping):
        return inside.get(key)
    if isinstance(inside, (list, str)) and isinstance(key, int) and -len(inside) <= key < len(inside):
        return inside[key]
    return None


def _first(values: list[Any]) -> Any:
    return values[0] if values else None


def _last(values: list[Any]) -> Any:
    return values[-1] if values else None


def _uniq(values: list[Any]) -> list[Any]:
    out: list[Any] = []
    for value in values:
        if value not in out:
            out.append(value)
    return out


def _sort(values: list[Any], order: str = "asc") -> list[Any]:
    return sorted(values, reverse=order == "desc")


def _date(text: str, *rest: str) -> str:
    """Dates stay text here: RFC 3339, a date, or a date and a time."""
    for form in ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%d", "%H:%M:%S", "%Y-%m-%d %H:%M:%S"):
        try:
            datetime.datetime.strptime(text, form)
        except ValueError:
            continue
        return text
    raise ExpressionError(f"invalid date {text}")


def _from_json(text: str) -> Any:
    try:
        return json.loads(text, parse_int=float)
    except ValueError as error:
        raise ExpressionError(f"{error}") from None


def _from_base64(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except ValueError as error:
        raise ExpressionError(f"illegal base64 data: {error}") from None


BUILTINS: dict[str, Callable[..., Any]] = {
    "len": _length,
    "type": _kind,
    "abs": abs,
    "ceil": lambda value: float(math.ceil(value)),
    "floor": lambda value: float(math.floor(value)),
    "round": _round,
    "int": to_int,
    "float": to_float,
    "string": go_print,
    "trim": _trim,
    "trimPrefix": lambda text, prefix=" ": text.removeprefix(prefix),
    "trimSuffix": lambda text, suffix=" ": text.removesuffix(suffix),
    "upper": lambda text: text.upper(),
    "lower": lambda text: text.lower(),
    "split": _split,
    "splitAfter": _split_after,
    "replace": _replace,
    "repeat": lambda text, count: text * count,
    "join": lambda values, separator="": separator.join(values),
    "indexOf": lambda text, part: text.find(part),
    "lastIndexOf": lambda text, part: text.rfind(part),
    "hasPrefix": lambda text, prefix: text.startswith(prefix),
    "hasSuffix": lambda text, suffix: text.endswith(suffix),
    "max": lambda *values: max(_flat(values)),
    "min": lambda *values: min(_flat(values)),
    "mean": lambda *values: float(statistics.fmean(_flat(values))) if _flat(values) else 0.0,
    "median": lambda *values: float(statistics.median(_flat(values))) if _flat(values) else 0.0,
    "toJSON": lambda value: json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True),
    "fromJSON": _from_json,
    "toBase64": lambda text: base64.b64encode(text.encode()).decode(),
    "fromBase64": _from_base64,
    "now": lambda: datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    "duration": go_duration,
    "date": _date,
    "first": _first,
    "last": _last,
    "get": _get,
    "take": lambda values, count: values[:count],
    "keys": lambda value: list(value),
    "values": lambda value: list(value.values()),
    "toPairs": lambda value: [[key, value[key]] for key in value],
    "fromPairs": lambda pairs: {pair[0]: pair[1] for pair in pairs},
    "reverse": lambda values: values[::-1],
    "uniq": _uniq,
    "concat": lambda *lists: [item for values in lists for item in values],
    "flatten": lambda values: _flat(tuple(values)),
    "sort": _sort,
    "bitand": lambda a, b: a & b,
    "bitor": lambda a, b: a | b,
    "bitxor": lambda a, b: a ^ b,
    "bitnand": lambda a, b: a & ~b,
    "bitnot": lambda a: ~a,
    "bitshl": lambda a, b: a << b,
    "bitshr": lambda a, b: a >> b,
    "bitushr": lambda a, b: (a & 0xFFFFFFFFFFFFFFFF) >> b,
}
"""Name -> function. ``groupBy``, ``filter`` and the like take a predicate and live in the evaluator."""
