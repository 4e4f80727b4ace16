"""The sprig functions that expressions may call as ``sprig.name(...)``: strings, lists, maps, numbers, encodings, dates."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import math
import random
import re
import string
import textwrap
import time
import uuid
from collections.abc import Callable
from typing import Any

from workflows.local.language.exprsyntax import ExpressionError
from workflows.local.language.values import duration_text, go_duration, go_print, to_json


def _empty(value: Any) -> bool:
    return value is None or value is False or value == 0 or value in ("", [], {})


def _int(value: Any) -> int:
    try:
        return int(float(value)) if not isinstance(value, bool) else int(value)
    except (TypeError, ValueError):
        return 0


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _fail(message: str) -> Any:
    raise ExpressionError(message)


def _trunc(length: int, text: str) -> str:
    return (
        text[length:] if length < 0 and len(text) + length > 0 else (text[:length] if 0 <= length < len(text) else text)
    )


def _abbrev(width: int, text: str) -> str:
    return text if len(text) <= width or width < 4 else text[: width - 3] + "..."


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|\d+", re.sub(r"[^A-Za-z0-9]+", " ", text))


def _indent(spaces: int, text: str) -> str:
    return " " * spaces + text.replace("\n", "\n" + " " * spaces)


def _until_step(start: int, stop: int, step: int) -> list[int]:
    return list(range(start, stop, step)) if step and (stop > start) == (step > 0) else []


def _seq(*bounds: int) -> str:
    if not bounds:
        return ""
    start, step, stop = (1, 1, bounds[0]) if len(bounds) == 1 else (bounds[0], 1, bounds[1])
    if len(bounds) == 3:
        start, step, stop = bounds
    elif stop < start:
        step = -1
    return " ".join(str(n) for n in range(start, stop + (1 if step > 0 else -1), step))


def _strings(values: Any) -> list[str]:
    return [go_print(value) for value in values] if isinstance(values, list) else [go_print(values)]


def _dict(*pairs: Any) -> dict[str, Any]:
    return {str(pairs[i]): pairs[i + 1] if i + 1 < len(pairs) else "" for i in range(0, len(pairs), 2)}


def _merge(first: dict[str, Any], *rest: dict[str, Any]) -> dict[str, Any]:
    out = dict(first)
    for other in rest:
        for key, value in other.items():
            if key in out and isinstance(out[key], dict) and isinstance(value, dict):
                out[key] = _merge(out[key], value)
            elif key not in out or _empty(out[key]):
                out[key] = value
    return out


def _dig(*arguments: Any) -> Any:
    *keys, default, inside = arguments
    for key in keys:
        if not isinstance(inside, dict) or key not in inside:
            return default
        inside = inside[key]
    return inside


def _set(inside: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return inside | {key: value}


def _unset(inside: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in inside.items() if k != key}


def _uniq(values: list[Any]) -> list[Any]:
    out: list[Any] = []
    for value in values:
        if value not in out:
            out.append(value)
    return out


def _split_map(separator: str, text: str) -> dict[str, str]:
    return {f"_{index}": part for index, part in enumerate(text.split(separator))}


def _replacement(text: str) -> str:
    return re.sub(r"\$\{?(\w+)\}?", r"\\g<\1>", text.replace("\\", "\\\\"))


_GO_DATE = (
    ("2006", "%Y"), ("January", "%B"), ("Jan", "%b"), ("Monday", "%A"), ("Mon", "%a"), ("01", "%m"), ("02", "%d"),
    ("15", "%H"), ("03", "%I"), ("04", "%M"), ("05", "%S"), ("06", "%y"), ("PM", "%p"), ("Z07:00", "Z"), ("MST", "UTC"), ("-0700", "+0000"),
)  # fmt: skip


def _format_date(layout: str, when: Any) -> str:
    """A whole number is seconds since the epoch; anything else means now."""
    for go, form in _GO_DATE:
        layout = layout.replace(go, form)
    seconds = when if isinstance(when, int) and not isinstance(when, bool) else time.time()
    return time.strftime(layout, time.gmtime(seconds))


def _seconds(when: Any) -> float:
    if isinstance(when, str):
        return datetime.datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()
    return float(when)


def _hash(name: str) -> Callable[[str], str]:
    return lambda text: hashlib.new(name, text.encode()).hexdigest()


def _random(characters: str) -> Callable[[int], str]:
    return lambda count: "".join(random.choice(characters) for _ in range(count))


def _snake(text: str) -> str:
    return "_".join(_words(text)).lower()


_STRINGS: dict[str, Callable[..., Any]] = {
    "trim": lambda text: text.strip(),
    "trimAll": lambda characters, text: text.strip(characters),
    "trimPrefix": lambda prefix, text: text.removeprefix(prefix),
    "trimSuffix": lambda suffix, text: text.removesuffix(suffix),
    "upper": lambda text: text.upper(),
    "lower": lambda text: text.lower(),
    "title": lambda text: re.sub(r"\b[a-z]", lambda m: m.group().upper(), text),
    "untitle": lambda text: re.sub(r"\b[A-Z]", lambda m: m.group().lower(), text),
    "repeat": lambda count, text: text * count,
    "substr": lambda start, end, text: text[max(start, 0) : None if end < 0 or end > len(text) else end],
    "nospace": lambda text: re.sub(r"\s", "", text),
    "trunc": _trunc,
    "abbrev": _abbrev,
    "initials": lambda text: "".join(word[0] for word in text.split()),
    "contains": lambda part, text: part in text,
    "hasPrefix": lambda prefix, text: text.startswith(prefix),
    "hasSuffix": lambda suffix, text: text.endswith(suffix),
    "quote": lambda *values: " ".join(json.dumps(go_print(v), ensure_ascii=False) for v in values if v is not None),
    "squote": lambda *values: " ".join(f"'{go_print(v)}'" for v in values if v is not None),
    "cat": lambda *values: " ".join(go_print(v) for v in values if v is not None),
    "indent": _indent,
    "nindent": lambda spaces, text: "\n" + _indent(spaces, text),
    "replace": lambda old, new, text: text.replace(old, new),
    "plural": lambda one, many, count: one if count == 1 else many,
    "snakecase": _snake,
    "camelcase": lambda text: "".join(word.capitalize() for word in _words(text)),
    "kebabcase": lambda text: _snake(text).replace("_", "-"),
    "swapcase": lambda text: text.swapcase(),
    "wrap": lambda width, text: textwrap.fill(text, width),
    "join": lambda separator, values: separator.join(_strings(values)),
    "split": _split_map,
    "splitList": lambda separator, text: text.split(separator),
    "splitn": lambda separator, count, text: {f"_{i}": part for i, part in enumerate(text.split(separator, count - 1))},
    "sortAlpha": lambda values: sorted(_strings(values)),
    "toString": go_print,
    "toStrings": _strings,
    "regexMatch": lambda pattern, text: re.search(pattern, text) is not None,
    "regexFind": lambda pattern, text: m.group() if (m := re.search(pattern, text)) else "",
    "regexFindAll": lambda pattern, text, count: [m.group() for m in re.finditer(pattern, text)][
        : None if count < 0 else count
    ],
    "regexReplaceAll": lambda pattern, text, new: re.sub(pattern, _replacement(new), text),
    "regexReplaceAllLiteral": lambda pattern, text, new: re.sub(pattern, lambda _: new, text),
    "regexSplit": lambda pattern, text, count: re.split(pattern, text, maxsplit=0 if count < 0 else max(count - 1, 0)),
    "regexQuoteMeta": re.escape,
}

_NUMBERS: dict[str, Callable[..., Any]] = {
    "int": _int,
    "int64": _int,
    "float64": _float,
    "atoi": _int,
    "toDecimal": lambda value: int(str(value), 8),
    "add": lambda *values: sum(_int(v) for v in values),
    "add1": lambda value: _int(value) + 1,
    "sub": lambda a, b: _int(a) - _int(b),
    "mul": lambda *values: math.prod(_int(v) for v in values),
    "div": lambda a, b: int(_int(a) / _int(b)) if _int(b) else _fail("integer divide by zero"),
    "mod": lambda a, b: int(math.fmod(_int(a), _int(b))) if _int(b) else _fail("integer divide by zero"),
    "addf": lambda *values: math.fsum(_float(v) for v in values),
    "subf": lambda first, *rest: _float(first) - math.fsum(_float(v) for v in rest),
    "mulf": lambda *values: math.prod(_float(v) for v in values),
    "divf": lambda first, *rest: _float(first) / math.prod(_float(v) for v in rest),
    "max": lambda *values: max(_int(v) for v in values),
    "min": lambda *values: min(_int(v) for v in values),
    "maxf": lambda *values: max(_float(v) for v in values),
    "minf": lambda *values: min(_float(v) for v in values),
    "floor": lambda value: float(math.floor(_float(value))),
    "ceil": lambda value: float(math.ceil(_float(value))),
    "round": lambda value, places: math.floor(_float(value) * 10**places + 0.5) / 10**places,
    "until": lambda count: list(range(count)) if count >= 0 else list(range(0, count, -1)),
    "untilStep": _until_step,
    "seq": _seq,
    "randInt": lambda low, high: random.randrange(low, high),
}

_COLLECTIONS: dict[str, Callable[..., Any]] = {
    "default": lambda default, *value: default if not value or _empty(value[0]) else value[0],
    "empty": _empty,
    "coalesce": lambda *values: next((v for v in values if not _empty(v)), None),
    "all": lambda *values: not any(_empty(v) for v in values),
    "any": lambda *values: any(not _empty(v) for v in values),
    "ternary": lambda yes, no, condition: yes if condition else no,
    "fail": _fail,
    "list": lambda *values: list(values),
    "tuple": lambda *values: list(values),
    "first": lambda values: values[0] if values else None,
    "last": lambda values: values[-1] if values else None,
    "rest": lambda values: values[1:],
    "initial": lambda values: values[:-1],
    "append": lambda values, value: [*values, value],
    "push": lambda values, value: [*values, value],
    "prepend": lambda values, value: [value, *values],
    "concat": lambda *lists: [item for values in lists for item in values],
    "reverse": lambda values: values[::-1],
    "uniq": _uniq,
    "without": lambda values, *out: [v for v in values if v not in out],
    "has": lambda value, values: value in (values or []),
    "compact": lambda values: [v for v in values if not _empty(v)],
    "slice": lambda values, *bounds: values[
        slice(*bounds) if len(bounds) > 1 else slice(bounds[0] if bounds else 0, None)
    ],
    "chunk": lambda size, values: [values[i : i + size] for i in range(0, len(values), size)],
    "dict": _dict,
    "get": lambda inside, key: inside.get(key, ""),
    "set": _set,
    "unset": _unset,
    "hasKey": lambda inside, key: key in inside,
    "pluck": lambda key, *maps: [m[key] for m in maps if key in m],
    "keys": lambda *maps: [key for m in maps for key in m],
    "values": lambda inside: list(inside.values()),
    "pick": lambda inside, *keys: {k: inside[k] for k in keys if k in inside},
    "omit": lambda inside, *keys: {k: v for k, v in inside.items() if k not in keys},
    "merge": _merge,
    "mergeOverwrite": lambda first, *rest: _merge(rest[-1], *rest[-2::-1], first) if rest else first,
    "dig": _dig,
    "deepEqual": lambda a, b: a == b,
    "kindOf": lambda value: {bool: "bool", int: "int", float: "float64", str: "string", list: "slice", dict: "map"}.get(
        type(value), "invalid"
    ),
    "typeOf": lambda value: {bool: "bool", int: "int", float: "float64", str: "string"}.get(
        type(value),
        "<nil>" if value is None else "[]interface {}" if isinstance(value, list) else "map[string]interface {}",
    ),
}

_ENCODINGS: dict[str, Callable[..., Any]] = {
    "b64enc": lambda text: base64.b64encode(text.encode()).decode(),
    "b64dec": lambda text: base64.b64decode(text).decode(),
    "b32enc": lambda text: base64.b32encode(text.encode()).decode(),
    "b32dec": lambda text: base64.b32decode(text).decode(),
    "sha1sum": _hash("sha1"),
    "sha256sum": _hash("sha256"),
    "sha512sum": _hash("sha512"),
    "md5sum": _hash("md5"),
    "adler32sum": lambda text: str(__import__("zlib").adler32(text.encode())),
    "toJson": lambda value: to_json(value, sort_keys=True),
    "toRawJson": lambda value: to_json(value, sort_keys=True, escape_html=False),
    "toPrettyJson": lambda value: json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False),
    "fromJson": lambda text: json.loads(text, parse_int=float),
    "uuidv4": lambda: str(uuid.uuid4()),
    "randAlphaNum": _random(string.ascii_letters + string.digits),
    "randAlpha": _random(string.ascii_letters),
    "randNumeric": _random(string.digits),
    "randAscii": _random(string.printable[:94]),
    "now": lambda: datetime.datetime.now(datetime.UTC).isoformat(),
    "date": _format_date,
    "dateInZone": lambda layout, when, zone: _format_date(layout, when),
    "unixEpoch": lambda when: str(int(_seconds(when))),
    "duration": lambda seconds: duration_text(float(seconds)),
    "durationRound": lambda text: f"{int(go_duration(str(text)))}s",
    "base": lambda path: path.rstrip("/").rpartition("/")[2] or ("/" if path.startswith("/") else "."),
    "dir": lambda path: path.rpartition("/")[0] or ("/" if path.startswith("/") else "."),
    "ext": lambda path: "." + path.rpartition(".")[2] if "." in path.rpartition("/")[2] else "",
    "clean": lambda path: __import__("os").path.normpath(path),
    "isAbs": lambda path: path.startswith("/"),
}

FUNCTIONS: dict[str, Callable[..., Any]] = _STRINGS | _NUMBERS | _COLLECTIONS | _ENCODINGS
"""Name -> function. What is missing here (templates' time zones, semver, certificates) is an unknown member of ``sprig``."""
