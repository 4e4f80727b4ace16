"""What steps and tasks see of those before them: ``steps.X.outputs...``, ``tasks.X.status`` and the like."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from typing import Any

from workflows.local.execution import TemplateError
from workflows.local.language.exprlang import evaluate
from workflows.local.language.exprsyntax import ExpressionError
from workflows.local.language.tags import environment
from workflows.local.language.values import go_print, parse_json, timestamp, to_json
from workflows.local.nodes import Node, Nodes
from workflows.local.plan import Parameter, Raw, Template

HOST = socket.gethostname()


def last_attempt(node: Node, nodes: Nodes) -> Node | None:
    """The newest attempt of a Retry node, None for any other or before the first."""
    if node.type != "Retry" or (node.memoization or {}).get("hit"):
        return None
    return next((child for child in (nodes.by_id[i] for i in reversed(node.children)) if not child.hooked), None)


def add_node(scope: dict[str, str], prefix: str, node: Node, nodes: Nodes) -> None:
    """What is known of a node, under ``prefix``; of a retried one, of its newest attempt."""
    node = last_attempt(node, nodes) or node
    scope[f"{prefix}.id"] = node.id
    if node.started:
        scope[f"{prefix}.startedAt"] = timestamp(node.started)
    if node.finished:
        scope[f"{prefix}.finishedAt"] = timestamp(node.finished)
    scope[f"{prefix}.status"] = node.phase
    if node.type == "Pod":
        scope[f"{prefix}.hostNodeName"] = HOST
    if node.outputs is None:
        return
    if node.outputs.result is not None:
        scope[f"{prefix}.outputs.result"] = node.outputs.result
    if node.outputs.exit_code is not None:
        scope[f"{prefix}.exitCode"] = node.outputs.exit_code
    for parameter in node.outputs.parameters:
        if parameter.get("value") is not None:
            scope[f"{prefix}.outputs.parameters.{parameter['name']}"] = parameter["value"]


def add_aggregate(scope: dict[str, str], prefix: str, children: Iterable[Node]) -> None:
    """The outputs of a loop as JSON lists, in the order of its items. ``TemplateError`` for a result that is no JSON."""
    listed = list(children)
    if not listed:
        return
    items = sorted((node for node in listed if not (node.hooked or node.retried)), key=_loop_index)
    results: list[Any] = []
    together: list[dict[str, str]] = []
    values: dict[str, list[str]] = {}
    for node in items:
        if node.outputs is None or node.phase != "Succeeded":
            continue
        if node.outputs.parameters:
            own = {raw["name"]: raw.get("value") or "" for raw in node.outputs.parameters}
            together.append(own)
            for name, value in own.items():
                values.setdefault(name, []).append(value)
        if node.outputs.result is not None:
            results.append(_parsed(node.outputs.result))
    scope[f"{prefix}.outputs.result"] = to_json(results)
    scope[f"{prefix}.outputs.parameters"] = to_json([dict(sorted(own.items())) for own in together])
    for name, texts in values.items():
        scope[f"{prefix}.outputs.parameters.{name}"] = _value_list(texts)


def _loop_index(node: Node) -> int:
    match = re.search(r"\((\d+)[^(]*$", node.name)
    return int(match.group(1)) if match else 0


def _parsed(text: str) -> Any:
    try:
        return parse_json(text, raw_numbers=True)
    except ValueError as error:
        position = getattr(error, "pos", len(text))
        if position >= len(text):
            raise TemplateError("unexpected end of JSON input") from None
        where = "looking for beginning of value" if not text[:position].strip() else "after top-level value"
        raise TemplateError(f"invalid character '{text[position]}' {where}") from None


def _value_list(texts: list[str]) -> str:
    """A JSON list of the texts, or of what they hold if every one is a JSON list or map."""
    parsed = []
    for text in texts:
        try:
            value = parse_json(text)
        except ValueError:
            return to_json(texts)
        if not isinstance(value, (list, dict)):
            return to_json(texts)
        parsed.append(value)
    return to_json(parsed, sort_keys=True)


def template_outputs(template: Template, outputs: tuple[Parameter, ...], scope: dict[str, str]) -> list[Raw]:
    """The output parameters of a steps or dag template. ``TemplateError`` for one that cannot be resolved and has no default."""
    out = []
    for parameter in outputs:
        source = parameter.value_from
        if source is None:
            raise TemplateError("output parameters must have a valueFrom specified")
        try:
            value = _resolved(source, scope)
        except ValueError as error:
            if source.get("default") is None:
                raise TemplateError(str(error)) from None
            value = go_print(source["default"])
        raw = parameter.write()
        raw.pop("valueFrom", None)
        out.append(raw | {"value": go_print(value)})
    return out


def _resolved(source: Raw, scope: dict[str, str]) -> Any:
    if source.get("expression"):
        return evaluate(source["expression"], environment(scope))
    tag = (source.get("parameter") or "").removeprefix("{{").removesuffix("}}").strip()
    if not tag:
        return ""
    if tag.startswith("="):
        value = evaluate(tag[1:], environment(scope))
        if value is None:
            raise ExpressionError(f'Unable to resolve: "{tag}"')
        return value
    if tag not in scope:
        raise ExpressionError(f'Unable to resolve: "{tag}"')
    return scope[tag]
