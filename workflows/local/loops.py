"""``withItems``, ``withParam`` and ``withSequence``: one step or task into several, named as Argo names them."""

from __future__ import annotations

import re
from typing import Any

from workflows.local.language.govaluate import WhenError, should_execute
from workflows.local.language.tags import Scope, Substitution
from workflows.local.language.values import RawNumber, parse_json, to_json
from workflows.local.plan import Call


class LoopError(ValueError):
    """A loop that cannot be expanded."""


def expand(call: Call, scope: Scope) -> list[Call]:
    """The steps or tasks that ``call`` stands for; itself if it has no loop. ``LoopError`` or ``TagError`` otherwise."""
    if not call.expands:
        return [call]
    rest = {key: value for key, value in call.raw.items() if key not in ("withItems", "withParam", "withSequence")}
    skipped = _surely_skipped(call.when)
    expanded = []
    for index, item in enumerate(_items(call)):
        values = _item_scope(item)
        raw = Substitution({**scope, **values}, everything=not skipped).apply(rest)
        raw |= {"name": _name(call.name, index, item)}
        if call.template:
            raw["template"] = call.template
        expanded.append(Call(call.kind, raw))
    return expanded


def _surely_skipped(when: str) -> bool:
    try:
        return not should_execute(when)
    except WhenError:
        return False


def _items(call: Call) -> list[Any]:
    raw = call.raw
    if raw.get("withItems"):
        return list(raw["withItems"])
    try:
        return _from_text(raw["withParam"]) if raw.get("withParam") else _sequence(raw["withSequence"])
    except LoopError:
        if _surely_skipped(call.when):
            return []
        raise


def _from_text(text: str) -> list[Any]:
    try:
        items = parse_json(text, raw_numbers=True)
    except ValueError as error:
        raise LoopError(
            f"withParam value could not be parsed as a JSON list: {text.strip()}: {_go_error(text, error)}"
        ) from None
    if items is None:
        return []
    if not isinstance(items, list):
        kind = {str: "string", RawNumber: "number", dict: "object", bool: "bool"}.get(type(items), "value")
        raise LoopError(
            f"withParam value could not be parsed as a JSON list: {text.strip()}: json: cannot unmarshal {kind} into Go value of type []v1alpha1.Item"
        )
    return items


def _go_error(text: str, error: ValueError) -> str:
    position = getattr(error, "pos", None)
    if position is None or position >= len(text):
        return "unexpected end of JSON input"
    return f"invalid character '{text[position]}' looking for beginning of value"


def _sequence(raw: dict[str, Any]) -> list[str]:
    start = _whole(raw.get("start"), 0)
    if raw.get("end") is not None:
        end = _whole(raw["end"], 0)
    elif raw.get("count") is not None:
        count = _whole(raw["count"], 0)
        if count == 0:
            return []
        end = start + count - 1
    else:
        raise LoopError("neither end nor count was specified in withSequence")
    numbers = range(start, end + 1) if start <= end else range(start, end - 1, -1)
    return [_formatted(raw.get("format") or "%d", number) for number in numbers]


def _whole(value: Any, default: int) -> int:
    if value is None:
        return default
    text = str(value)
    if not re.fullmatch(r"[+-]?\d+", text):
        raise LoopError(f'strconv.Atoi: parsing "{text}": invalid syntax')
    return int(text)


def _formatted(form: str, number: int) -> str:
    """Go's Sprintf of one whole number."""
    used = False

    def replace(match: re.Match[str]) -> str:
        nonlocal used
        flags, verb = match.group(1), match.group(2)
        if verb == "%":
            return "%"
        if used:
            return f"%!{verb}(MISSING)"
        used = True
        if verb in "dxXoc":
            return f"%{flags}{verb}" % number
        if verb == "v":
            return f"%{flags}d" % number
        if verb == "b":
            width = flags.lstrip("-+ #")
            return format(number, f"{width}b") if not flags.startswith("-") else f"{number:b}".ljust(int(width or 0))
        return f"%!{verb}(int={number})"

    text = re.sub(r"%([-+ #0]*\d*(?:\.\d+)?)([a-zA-Z%])", replace, form)
    return text if used else f"{text}%!(EXTRA int={number})"


def _item_text(item: Any) -> str:
    """An item under Go's ``%v``: JSON without the quotes around text, escapes kept."""
    if isinstance(item, str) and not isinstance(item, RawNumber):
        return to_json(item, escape_html=False)[1:-1]
    return to_json(item, escape_html=False, sort_keys=isinstance(item, dict))


def _is_text(item: Any) -> bool:
    return isinstance(item, str) and not isinstance(item, RawNumber)


def _item_scope(item: Any) -> dict[str, str]:
    if isinstance(item, dict):
        return {
            "item": to_json(item, sort_keys=True),
            **{f"item.{key}": _item_text(value) for key, value in item.items()},
        }
    if isinstance(item, list):
        return {"item": to_json(item)}
    return {"item": item if _is_text(item) else _item_text(item)}


def _name(name: str, index: int, item: Any) -> str:
    if isinstance(item, dict):
        text = ",".join(sorted(f"{key}:{_item_text(value)}" for key, value in item.items()))
    elif isinstance(item, list):
        text = "[" + " ".join(_item_text(value) for value in item) + "]"
    else:
        text = _item_text(item)
    return f"{name}({index}:{text.replace('(', '').replace(')', '')})"
