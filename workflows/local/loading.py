"""From a file to a plan: find the workflow in it and the templates it refers to, set parameters, check everything."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.errors import ConfigurationError
from workflows.local import schema
from workflows.local.document import Problem, Where, line_of, parse, path_text, read_text, siblings
from workflows.local.merging import join_spec
from workflows.local.plan import Plan, Raw
from workflows.local.validate import Validation

_KINDS = {"WorkflowTemplate": "namespaced", "ClusterWorkflowTemplate": "cluster"}


def load(path: Path, parameters: dict[str, str] | None = None) -> Plan:
    """Read and check the first Workflow of ``path``, or its only WorkflowTemplate, as ``argo submit`` would take it.

    ``parameters`` replace the workflow's own. ``ConfigurationError`` names the file, the line and the field.
    """
    text = read_text(path)
    documents = parse(text, str(path))
    number = _choose(documents, path)
    try:
        return _plan(path, documents, number, parameters or {})
    except Problem as problem:
        line = line_of(text, number, problem.where)
        where = f"{path_text(problem.where)}: " if problem.where else ""
        raise ConfigurationError(f"{path}:{line}: {where}{problem.message}") from None


def _choose(documents: list[Any], path: Path) -> int:
    kinds = [document.get("kind") if isinstance(document, dict) else None for document in documents]
    for wanted in ("Workflow", *_KINDS):
        if wanted in kinds:
            return kinds.index(wanted)
    raise ConfigurationError(
        f"{path} has no Workflow (kinds: {', '.join(str(kind) for kind in kinds if kind) or 'none'})"
    )


def _plan(path: Path, documents: list[Any], number: int, parameters: dict[str, str]) -> Plan:
    document = documents[number]
    findings = schema.check(document, "Workflow")
    if not str(document.get("apiVersion") or "").startswith("argoproj.io/"):
        raise Problem(("apiVersion",), f"'{document.get('apiVersion')}' is not argoproj.io/v1alpha1")
    spec: Raw = document.get("spec") or {}
    metadata: Raw = dict(document.get("metadata") or {})
    if document["kind"] != "Workflow":
        metadata = _from_template(metadata)
    library = _library(path, documents, spec)
    spec = _set_parameters(_joined(spec, library), parameters)
    plan = Plan(
        file=str(path),
        metadata=metadata,
        spec=spec,
        original_spec=document.get("spec") or {},
        library=library,
        ignored=tuple(path_text(where) for where in findings.cluster),
    )
    validation = Validation(plan)
    try:
        validation.run()
    except Problem:
        if findings.refused:
            raise _refusal(findings.refused[0]) from None
        raise
    _refuse(findings.refused, validation)
    return replace(plan, reached=tuple((raw, where) for _, raw, where in validation.reached.values()))


def _from_template(metadata: Raw) -> Raw:
    """Submitting a template makes a workflow named after it."""
    name = metadata.pop("name", None) or "workflow"
    return metadata | {"generateName": f"{name}-"}


def _joined(spec: Raw, library: dict[str, Raw]) -> Raw:
    ref = spec.get("workflowTemplateRef")
    if ref is None:
        return spec
    if spec.get("templates"):
        raise Problem(("spec", "templates"), "templates cannot be given together with workflowTemplateRef")
    key = f"{'cluster' if ref.get('clusterScope') else 'namespaced'}/{ref.get('name') or ''}"
    if key not in library:
        raise Problem(
            ("spec", "workflowTemplateRef"),
            f"workflow template '{ref.get('name')}' not found in this file or its directory",
        )
    return {name: value for name, value in join_spec(spec, library[key]).items() if name != "workflowTemplateRef"}


def _library(path: Path, documents: list[Any], spec: Raw) -> dict[str, Raw]:
    """The workflow templates that ``spec`` and they themselves name, from this file, else from the others of its directory."""
    found: dict[str, Raw] = {}
    _collect(documents, found)
    library: dict[str, Raw] = {}
    pending, others = _references(spec), siblings(path)
    while pending:
        key = pending.pop()
        while key not in found and (other := next(others, None)) is not None:
            with contextlib.suppress(ConfigurationError, UnicodeDecodeError, OSError):
                _collect(parse(other.read_text(encoding="utf-8"), str(other)), found)
        if key not in found or key in library:
            continue
        library[key] = found[key]
        findings = schema.check(found[key], "Spec")
        if findings.refused:
            raise Problem(
                (),
                f"workflow template {key.partition('/')[2]}: {path_text(findings.refused[0])} is not implemented here; run it on a cluster",
            )
        pending |= _references(found[key])
    return library


def _collect(documents: list[Any], found: dict[str, Raw]) -> None:
    for document in documents:
        kind = document.get("kind") if isinstance(document, dict) else None
        if isinstance(kind, str) and kind in _KINDS and isinstance(document.get("metadata"), dict):
            found.setdefault(f"{_KINDS[kind]}/{document['metadata'].get('name') or ''}", document.get("spec") or {})


def _references(value: Any) -> set[str]:
    found: set[str] = set()
    if isinstance(value, dict):
        for name, inside in value.items():
            if name in ("templateRef", "workflowTemplateRef") and isinstance(inside, dict):
                found.add(f"{'cluster' if inside.get('clusterScope') else 'namespaced'}/{inside.get('name') or ''}")
            else:
                found |= _references(inside)
    elif isinstance(value, list):
        for inside in value:
            found |= _references(inside)
    return found


def _set_parameters(spec: Raw, parameters: dict[str, str]) -> Raw:
    arguments = spec.get("arguments") or {}
    own = list(arguments.get("parameters") or ())
    names = {parameter.get("name") for parameter in own}
    for name in parameters:
        if name not in names:
            known = ", ".join(sorted(str(n) for n in names)) or "none"
            raise Problem(("spec", "arguments"), f"-p {name}: the workflow has no such parameter (it has: {known})")
    changed = [
        {key: value for key, value in parameter.items() if key != "valueFrom"}
        | {"value": parameters[parameter["name"]]}
        if parameter.get("name") in parameters
        else parameter
        for parameter in own
    ]
    return spec | {"arguments": arguments | {"parameters": changed}} if parameters else spec


def _refuse(refused: list[Where], validation: Validation) -> None:
    """Refuse what is not implemented, unless it stands in a template that nothing reaches."""
    reached = {where for _, _, where in validation.reached.values()}
    for where in refused:
        template = where[:3]
        if template[:2] == ("spec", "templates") and template not in reached:
            continue
        raise _refusal(where)


def _refusal(where: Where) -> Problem:
    return Problem(where, f"'{where[-1]}' is not implemented here and would change the outcome; run it on a cluster")
