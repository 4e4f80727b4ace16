"""Configuration -> Argo parameters -> argv. Pure: no Hera, no files.

A field of ``RunConfig`` is one word everywhere: the workflow parameter ``max-steps`` is handed to a step as
``--max-steps={{workflow.parameters.max-steps}}``. One item per flag, so that an empty value or one that begins with
a dash stays what it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from trainer.config import RunConfig, flag, parameter, to_text

RUN_FIELDS: tuple[str, ...] = tuple(RunConfig.model_fields)
DOWNLOAD_FIELDS = ("root", "run_id", "dataset_uri", "tokenizer", "sequence_length")
RECORD_FIELDS = ("root", "run_id")
"""What a step needs that reads everything else from the run's own records."""

CLUSTER_DEFAULTS: dict[str, Any] = {"root": Path("/fsx"), "launcher": "kubernetes"}
"""Where the committed workflows differ from the defaults of a laptop. Everything else is ``RunConfig``'s own."""

PLACEMENT = {
    "image": ("holdfast:0.1.0", "container image of all steps and of the training pods"),
    "queue": ("", "Kueue's local queue that admits all training pods or none (empty: no Kueue)"),
    "node-cpus": ("", "CPUs that a training pod asks for (empty: the profile's)"),
    "node-memory-gib": ("0", "memory limit of a training pod, /dev/shm included, GiB (0: the profile's)"),
    "node-shm-gib": ("0", "size of a training pod's /dev/shm, GiB (0: the profile's)"),
}
"""What a cluster decides, not the run: parameter -> default and description. The train step has flags of these names."""


class ParameterSpec(NamedTuple):
    """A workflow parameter, as Argo's user interface shows it."""

    name: str
    value: str
    description: str
    enum: tuple[str, ...] = ()


def workflow_parameters() -> list[ParameterSpec]:
    """Every parameter of the pipelines with its default: the fields of ``RunConfig`` in their order, then placement."""
    defaults = cluster_config()
    specs = []
    for name, field in RunConfig.model_fields.items():
        enum = tuple(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else ()
        text = to_text(getattr(defaults, name))
        specs.append(ParameterSpec(parameter(name), text, field.description or "", enum))
    return specs + [ParameterSpec(name, value, text) for name, (value, text) in PLACEMENT.items()]


def workflow_defaults() -> dict[str, str]:
    """The parameters of the training pipeline with their defaults."""
    return {spec.name: spec.value for spec in workflow_parameters()}


def cluster_config(**changes: Any) -> RunConfig:
    """The configuration that the committed workflows have by default, with ``changes``."""
    return RunConfig.model_validate(CLUSTER_DEFAULTS | changes)


def reference(name: str) -> str:
    """The tag that stands for a workflow parameter in a template."""
    return "{{workflow.parameters.%s}}" % name  # noqa: UP031 -- braces


def input_reference(name: str) -> str:
    """The tag that stands for an input parameter of the template it is in."""
    return "{{inputs.parameters.%s}}" % name  # noqa: UP031 -- braces


def flags(names: Iterable[str], inputs: Collection[str] = ()) -> list[str]:
    """The arguments of a step: ``--max-steps={{workflow.parameters.max-steps}}`` for each field or parameter.

    Those in ``inputs`` are parameters of the template instead of the workflow's.
    """
    return [f"{flag(name)}={(input_reference if name in inputs else reference)(parameter(name))}" for name in names]


def arguments(config: RunConfig) -> dict[str, str]:
    """The workflow's arguments that make ``config``, every field spelt out."""
    return {parameter(name): to_text(getattr(config, name)) for name in RUN_FIELDS}
