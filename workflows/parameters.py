"""Configuration -> Argo parameters -> argv. Pure: no Hera, no files.

A field of ``RunConfig`` is one word everywhere: the workflow parameter ``max-steps`` is handed to a step as
``--max-steps={{workflow.parameters.max-steps}}``. One item per flag, so that an empty value or one that begins with
a dash stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from trainer.config import RunConfig, flag, parameter, to_text

RUN_FIELDS: tuple[str, ...] = tuple(RunConfig.model_fields)
DOWNLOAD_FIELDS = ("root", "run_id", "dataset_uri", "tokenizer", "sequence_length")
RECORD_FIELDS = ("root", "run_id")
"""What a step needs that reads everything else from the run's own records."""

CLUSTER_DEFAULTS: dict[str, Any] = {"root": Path("/fsx"), "launcher": "kubernetes"}
"""Where the committed workflows differ from the defaults of a laptop. Everything else is ``RunConfig``'s own."""

IMAGE = "image"
DEFAULT_IMAGE = "holdfast:0.1.0"


class ParameterSpec(NamedTuple):
    """A workflow parameter, as Argo's user interface shows it."""

    name: str
    value: str
    description: str
    enum: tuple[str, ...] = ()


def workflow_parameters() -> list[ParameterSpec]:
    """Every parameter of the pipelines with its default: the image, then the fields of ``RunConfig`` in their order."""
    defaults = cluster_config()
    specs = [ParameterSpec(IMAGE, DEFAULT_IMAGE, "container image of all steps and of the training pods")]
    for name, field in RunConfig.model_fields.items():
        enum = tuple(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else ()
        text = to_text(getattr(defaults, name))
        specs.append(ParameterSpec(parameter(name), text, field.description or "", enum))
    return specs


def cluster_config(**changes: Any) -> RunConfig:
    """The configuration that the committed workflows have by default, with ``changes``."""
    return RunConfig.model_validate(CLUSTER_DEFAULTS | changes)


def reference(name: str) -> str:
    """The tag that stands for a workflow parameter in a template."""
    return "{{workflow.parameters.%s}}" % name  # noqa: UP031 -- braces


def flags(fields: Iterable[str]) -> list[str]:
    """The arguments of a step: ``--max-steps={{workflow.parameters.max-steps}}`` for each of ``fields``."""
    return [f"{flag(name)}={reference(parameter(name))}" for name in fields]


def arguments(config: RunConfig) -> dict[str, str]:
    """The workflow's arguments that make ``config``, every field spelt out."""
    return {parameter(name): to_text(getattr(config, name)) for name in RUN_FIELDS}
