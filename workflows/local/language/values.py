"""Values the way Go writes them: JSON text, numbers, durations, hashes. Argo's names and parameters depend on it."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

Json = Any
"""None, bool, int, float, str, list, dict with string keys; numbers read from JSON text may be ``RawNumber``."""


class RawNumber(str):
    """A JSON number that keeps the spelling it had (``1.0`` stays ``1.0``)."""


def parse_json(text: str, *, raw_numbers: bool = False) -> Json:
    """Parse strict JSON. ``ValueError`` says where it is wrong; NaN and Infinity are wrong."""
    if raw_numbers:
        return json.loads(text, parse_int=RawNumber, parse_float=RawNumber, parse_constant=_refuse_constant)
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"invalid character '{name[0]}' looking for beginning of value")


def to_json(value: Json, *, sort_keys: bool = False, escape_html: bool = True) -> str:
    """Compact JSON as Go's encoder writes it: HTML characters escaped, integral floats without a fraction."""
    text = "".join(_encode(value, sort_keys))
    return _html_escaped(text) if escape_html else text


def _encode(value: Json, sort_keys: bool) -> Iterator[str]:
    if isinstance(value, RawNumber):
        yield str(value)
    elif isinstance(value, str):
        yield json.dumps(value, ensure_ascii=False)
    elif value is None or isinstance(value, bool):
        yield {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, (int, float)):
        yield number_text(value)
    elif isinstance(value, dict):
        keys = sorted(value) if sort_keys else list(value)
        yield "{"
        for index, key in enumerate(keys):
            yield ("," if index else "") + json.dumps(str(key), ensure_ascii=False) + ":"
            yield from _encode(value[key], sort_keys)
        yield "}"
    elif isinstance(value, (list, tuple)):
        yield "["
        for index, item in enumerate(value):
            if index:
                yield ","
            yield from _encode(item, sort_keys)
        yield "]"
    else:
        raise ValueError(f"{type(value).__name__} cannot be written as JSON")


def _html_escaped(text: str) -> str:
    for character, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(character, escape)
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def number_text(value: int | float) -> str:
    """A number in JSON: floats as Go does, in plain notation between 1e-6 and 1e21."""
    if isinstance(value, int):
        return str(value)
    if math.isnan(value) or math.isinf(value):
        raise ValueError(f"{value} cannot be written as JSON")
    if value == 0 or 1e-6 <= abs(value) < 1e21:
        return _plain(value)
    mantissa, _, exponent = repr(value).partition("e")
    return (
        f"{mantissa.removesuffix('.0')}e{int(exponent):+03d}"
        if abs(value) < 1
        else f"{mantissa.removesuffix('.0')}e+{int(exponent)}"
    )


def _plain(value: float) -> str:
    """The shortest digits that mean ``value``, without an exponent."""
    text = repr(value)
    return (format(Decimal(text), "f") if "e" in text else text).removesuffix(".0")


def any_string(value: Json) -> str:
    """The string that Argo's AnyString fields make of a YAML scalar: numbers are floats, so 1.0 is ``1``; true is ``true``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) or (isinstance(value, int) and abs(value) > 2**53):
        return _plain(float(value))
    return str(value)


def go_print(value: Json) -> str:
    """A value under Go's ``%v``."""
    if value is None:
        return "<nil>"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not isinstance(value, RawNumber):
        return go_float(value)
    if isinstance(value, list):
        return "[" + " ".join(go_print(item) for item in value) + "]"
    if isinstance(value, dict):
        return "map[" + " ".join(f"{key}:{go_print(value[key])}" for key in sorted(value)) + "]"
    return str(value)


def go_float(value: float) -> str:
    """A float64 under Go's ``%v``: shortest digits, exponents from 1e+21 on."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    if value != 0 and (abs(value) < 1e-4 or abs(value) >= 1e21):
        digits, _, exponent = f"{value:e}".partition("e")
        digits = (
            repr(value).partition("e")[0].removesuffix(".0") if "e" in repr(value) else digits.rstrip("0").rstrip(".")
        )
        return f"{digits}e{int(exponent):+03d}"
    return _plain(value)


def go_quote(text: str) -> str:
    """``text`` inside double quotes with Go's escapes."""
    out = []
    for character in text:
        if character in '"\\':
            out.append("\\" + character)
        elif character in "\a\b\f\n\r\t\v":
            out.append(
                {"\a": r"\a", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v"}[character]
            )
        elif character.isprintable():
            out.append(character)
        elif ord(character) < 0x80:
            out.append(f"\\x{ord(character):02x}")
        else:
            out.append(f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}")
    return '"' + "".join(out) + '"'


def fnv32a(text: str) -> int:
    """The 32-bit FNV-1a hash that makes node ids."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


_DURATION_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def go_duration(text: str) -> float:
    """Seconds of a Go duration (``1h2m3.5s``). ``ValueError`` if it is none."""
    rest = text[1:] if text[:1] in ("+", "-") else text
    if rest == "0":
        return 0.0
    seconds, position = 0.0, 0
    while position < len(rest):
        match = _DURATION_PART.match(rest, position)
        if match is None:
            break
        seconds += float(match.group(1)) * _UNITS[match.group(2)]
        position = match.end()
    if not rest or position != len(rest):
        raise ValueError(f'time: invalid duration "{text}"')
    return -seconds if text.startswith("-") else seconds


def duration(text: str) -> float:
    """Seconds of an Argo duration: a whole number is seconds, else a Go duration. ``ValueError`` if it is neither."""
    if re.fullmatch(r"[+-]?\d+", text):
        return float(int(text))
    try:
        return go_duration(text)
    except ValueError as error:
        raise ValueError(f"unable to parse {text} as a duration: {error}") from None


def duration_text(seconds: float) -> str:
    """A duration as Go prints it: ``1h0m5s``, ``1.5s``, ``20ms``."""
    if seconds == 0:
        return "0s"
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 1:
        for unit, scale in (("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
            if seconds >= scale:
                return f"{sign}{_plain(round(seconds / scale, 6))}{unit}"
    whole = int(seconds)
    rest = _plain(round(whole % 60 + (seconds - whole), 9))
    if whole >= 3600:
        return f"{sign}{whole // 3600}h{whole % 3600 // 60}m{rest}s"
    return f"{sign}{whole // 60}m{rest}s" if whole >= 60 else f"{sign}{rest}s"


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC, whole seconds, as Kubernetes writes times."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def parse_timestamp(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time in UTC."""
    import calendar

    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
