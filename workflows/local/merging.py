"""Merging one object over another, as Argo merges a workflow over its template and a template over the defaults."""

from __future__ import annotations

from typing import Any

from workflows.local.plan import TYPES, Raw

_MERGE_KEYS = {
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "tasks": "name",
    "templates": "name",
    "parameters": "name",
    "ports": "containerPort",
}
"""Lists that merge by a key of their elements; every other list is replaced as a whole."""


def merge(over: Any, under: Any, name: str = "") -> Any:
    """``over`` completed by ``under``."""
    if isinstance(over, dict) and isinstance(under, dict):
        out = {
            key: merge(over[key], under[key], key) if key in over and over[key] is not None else under[key]
            for key in under
        }
        return out | {key: value for key, value in over.items() if key not in under}
    if isinstance(over, list) and isinstance(under, list) and name in _MERGE_KEYS:
        return _merge_lists(over, under, _MERGE_KEYS[name])
    return over


def _merge_lists(over: list[Any], under: list[Any], key: str) -> list[Any]:
    below = {item.get(key): item for item in under if isinstance(item, dict)}
    out = [
        merge(item, below[item.get(key)]) if isinstance(item, dict) and item.get(key) in below else item
        for item in over
    ]
    above = {item.get(key) for item in over if isinstance(item, dict)}
    return out + [item for item in under if not isinstance(item, dict) or item.get(key) not in above]


def with_defaults(template: Raw, defaults: Raw | None) -> Raw:
    """A template completed by ``spec.templateDefaults``, of which only the parts for its own type apply."""
    if not defaults:
        return template
    own = next((kind for kind in TYPES if template.get(kind) is not None), "")
    applicable = {key: value for key, value in defaults.items() if key == own or key not in TYPES}
    merged: Raw = merge(template, applicable)
    return merged


def join_spec(spec: Raw, template_spec: Raw) -> Raw:
    """A workflow's spec over that of the workflow template it refers to; a parameter comes whole from the first that has a value."""
    merged: Raw = merge(spec, template_spec)
    own = {p.get("name"): p for p in (spec.get("arguments") or {}).get("parameters") or () if _has_value(p)}
    theirs = {p.get("name"): p for p in (template_spec.get("arguments") or {}).get("parameters") or () if _has_value(p)}
    arguments = merged.get("arguments")
    if arguments and arguments.get("parameters"):
        chosen = [own.get(p.get("name")) or theirs.get(p.get("name")) or p for p in arguments["parameters"]]
        merged["arguments"] = arguments | {"parameters": chosen}
    return merged


def _has_value(parameter: Raw) -> bool:
    return any(parameter.get(key) is not None for key in ("value", "default", "valueFrom"))
