"""The configuration of a run: one definition from which flags, Argo parameters and record fields are made.

A field ``max_steps`` is the flag ``--max-steps``, the workflow parameter ``max-steps`` and the key ``max_steps`` of
run.json. The description of a field is the help text of its flag and says its unit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trainer.errors import ConfigurationError

FAULT_KINDS = ("exception", "hang", "sigkill", "oom", "node")
RUN_ID = re.compile(r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")

TRAJECTORY_FIELDS = (
    "model", "seed", "global_batch_size", "sequence_length", "max_steps", "learning_rate", "warmup_steps",
    "weight_decay", "gradient_clip", "init_from",
)  # fmt: skip
"""The fields that decide the sequence of weights; with the dataset's digest they make the config digest."""


class RunConfig(BaseModel):
    """One training run. Frozen; validated where it is built; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    run_id: str = Field("run", description="name of the run: lower-case letters, digits and dashes, at most 40")
    root: Path = Field(Path("fsx"), description="directory shared by all nodes; stands for the FSx mount")
    profile: Literal["p5", "p4de", "g5", "cpu"] = Field("cpu", description="what a node is")
    nodes: int = Field(1, ge=1, description="number of nodes")
    min_nodes: int = Field(0, ge=0, description="go on with as few nodes as this (0: all of them)")
    gpus_per_node: int = Field(2, ge=1, le=16, description="GPUs per node; processes per node on a CPU")
    launcher: Literal["auto", "kubernetes", "local"] = Field("auto", description="what starts the nodes")

    model: Literal["tiny", "160m", "1b", "llama-3.1-8b"] = Field("tiny", description="model preset")
    init_from: str = Field("", description="directory with Hugging Face LLaMA weights to start from (empty: random)")
    dataset_uri: str = Field("builtin:", description="builtin:, file://, s3:// or hf:// source of the text")
    tokenizer: str = Field("byte", description="byte, or the path of a Hugging Face tokenizer.json")
    sequence_length: int = Field(128, ge=8, description="tokens per sequence")
    global_batch_size: int = Field(8, ge=1, description="sequences per optimizer step, over all ranks")
    micro_batch_size: int = Field(4, ge=1, description="sequences per rank and forward pass; accumulation follows")
    max_steps: int = Field(100, ge=1, description="optimizer steps in total; the schedule depends on it")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    warmup_steps: int = Field(10, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(0.1, ge=0, description="AdamW's decoupled weight decay")
    gradient_clip: float = Field(1.0, gt=0, description="largest global gradient norm")
    seed: int = Field(42, ge=0, description="seed of weights and sample order")
    compile: bool = Field(False, description="torch.compile each transformer block")
    activation_checkpointing: bool = Field(False, description="compute activations again in the backward pass: less memory")

    checkpoint_mode: Literal["async", "sync", "off"] = Field("async", description="how the durable tier saves")
    checkpoint_interval_steps: int = Field(10, ge=1, description="steps between durable checkpoints")
    storage_bytes_per_second: float = Field(
        0.0, ge=0, description="emulate shared storage that all ranks save to and load from at this rate (0: as it is)"
    )
    keep_checkpoints: int = Field(3, ge=1, description="durable checkpoints kept")
    snapshot_interval_steps: int = Field(5, ge=0, description="steps between node-local snapshots (0: off)")
    snapshot_root: Path = Field(Path("/dev/shm"), description="memory-backed directory of the node-local tier")
    snapshot_replicas: int = Field(0, ge=0, le=1, description="copies of a node's snapshot kept on a peer node")

    recovery: Literal["none", "in-process", "in-job", "combined"] = Field(
        "combined", description="which layers restart training before the Job does"
    )
    max_restarts: int = Field(10, ge=0, description="restarts allowed per layer and node")
    heartbeat_timeout_seconds: float = Field(10.0, gt=0, description="seconds without a step before a rank is hung")
    no_progress_restarts: int = Field(5, ge=1, description="restarts in a row without progress before giving up")
    startup_timeout_seconds: float = Field(300.0, gt=0, description="seconds to start, compile or load in")
    save_timeout_seconds: float = Field(120.0, gt=0, description="seconds to save in; a writer that takes longer is given up")
    grace_seconds: float = Field(25.0, gt=0, description="seconds to save and stop in once asked to")
    node_lost_seconds: float = Field(60.0, gt=0, description="seconds a node may be NotReady before it is given up")

    fault_count: int = Field(0, ge=0, description="faults to inject")
    fault_kinds: str = Field("exception,hang,sigkill", description=f"kinds dealt in order, of {','.join(FAULT_KINDS)}")
    fault_ranks: str = Field("", description="ranks to hit, dealt in order (empty: the schedule's; all: rank 0 too)")
    fault_seed: int = Field(42, ge=0, description="seed of the fault schedule")
    fault_steps: str = Field("", description="steps to strike in, one for each fault (empty: drawn by the seed)")
    fault_first_step: int = Field(10, ge=0, description="no fault up to this step")

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def fewest_nodes(self) -> int:
        """How many nodes the run may have to do with: they hold what all nodes did."""
        return self.min_nodes or self.nodes

    @field_validator("run_id")
    @classmethod
    def _run_id(cls, value: str) -> str:
        if not RUN_ID.match(value):
            raise ValueError("use lower-case letters, digits and dashes, at most 40, beginning and ending with no dash")
        return value

    @field_validator("fault_kinds")
    @classmethod
    def _fault_kinds(cls, value: str) -> str:
        for kind in value.split(","):
            if kind not in FAULT_KINDS:
                raise ValueError(f"'{kind}' is not a kind of fault; use some of {', '.join(FAULT_KINDS)}")
        return value

    @field_validator("fault_ranks")
    @classmethod
    def _fault_ranks(cls, value: str) -> str:
        if value not in ("", "all") and not all(part.isdigit() for part in value.split(",")):
            raise ValueError("use a comma list of ranks, 'all', or nothing")
        return value

    @field_validator("fault_steps")
    @classmethod
    def _fault_steps(cls, value: str) -> str:
        steps = value.split(",") if value else []
        if not all(step.isdigit() for step in steps) or list(map(int, steps)) != sorted(set(map(int, steps))):
            raise ValueError("use a comma list of rising step numbers, or nothing")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        per_pass = self.world_size * self.micro_batch_size
        if self.global_batch_size % per_pass:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not divisible by world size {self.world_size} x "
                f"micro_batch_size {self.micro_batch_size} = {per_pass}; "
                f"the nearest that is: {max(1, round(self.global_batch_size / per_pass)) * per_pass}"
            )
        if self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than nodes {self.nodes}")
        for nodes in range(self.fewest_nodes, self.nodes):
            if self.global_batch_size % (nodes * self.gpus_per_node):
                raise ValueError(
                    f"min_nodes {self.min_nodes} allows {nodes} nodes, but global_batch_size {self.global_batch_size} is "
                    f"not divisible by their {nodes * self.gpus_per_node} ranks"
                )
        if self.warmup_steps > self.max_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than max_steps {self.max_steps}")
        if self.fault_count > max(0, self.max_steps - self.fault_first_step):
            raise ValueError(
                f"fault_count {self.fault_count} does not fit in the steps after fault_first_step "
                f"{self.fault_first_step} up to max_steps {self.max_steps}"
            )
        if self.fault_steps:
            steps = [int(step) for step in self.fault_steps.split(",")]
            if len(steps) != self.fault_count:
                raise ValueError(f"fault_steps names {len(steps)} steps, but fault_count is {self.fault_count}")
            if not 1 <= steps[0] <= steps[-1] <= self.max_steps:
                raise ValueError(f"fault_steps must lie between 1 and max_steps {self.max_steps}")
        if self.fault_ranks not in ("", "all"):
            too_big = [rank for rank in map(int, self.fault_ranks.split(",")) if rank >= self.world_size]
            if too_big:
                raise ValueError(f"fault_ranks names rank {too_big[0]}, but the world has {self.world_size} ranks")
        return self

    def digest(self, dataset_digest: str) -> str:
        """SHA-256 (hex) over what decides the trajectory. Two runs with one digest pass through the same weights."""
        content = {name: getattr(self, name) for name in TRAJECTORY_FIELDS} | {"dataset": dataset_digest}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def build(values: dict[str, Any]) -> RunConfig:
    """A ``RunConfig`` from field values; what is wrong becomes one line naming the flag (``ConfigurationError``)."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = flag(str(first["loc"][0])) if first["loc"] else "configuration"
        raise ConfigurationError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def parameter(field: str) -> str:
    return field.replace("_", "-")


class OneLineParser(argparse.ArgumentParser):
    """argparse that ends a wrong command line with one line and the contract's code, 64."""

    def error(self, message: str) -> Any:
        raise ConfigurationError(f"{message} (see {self.prog} --help)")


def add_flags(parser: argparse.ArgumentParser, fields: Iterable[str] | None = None, *, required: bool = False) -> None:
    """Give ``parser`` a flag for each of ``fields`` (default: all of ``RunConfig``).

    A flag that is not on the command line leaves nothing in the namespace, so that the defaults stay in one place.
    """
    for name in fields if fields is not None else RunConfig.model_fields:
        field = RunConfig.model_fields[name]
        annotation: Any = field.annotation
        if get_origin(annotation) in (Union, UnionType):
            annotation = next(part for part in get_args(annotation) if part is not type(None))
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": f"{field.description} [{field.default}]"}
        if annotation is bool:
            options |= {"nargs": "?", "const": "true", "metavar": "BOOL"}
        elif get_origin(annotation) is Literal:
            options |= {"choices": get_args(annotation)}
        else:
            options |= {"metavar": getattr(annotation, "__name__", "VALUE").upper()}
        parser.add_argument(flag(name), required=required, **options)


def from_namespace(namespace: argparse.Namespace) -> RunConfig:
    """The configuration given on a command line parsed with ``add_flags``; values are still strings here."""
    return build({k: v for k, v in vars(namespace).items() if k in RunConfig.model_fields})


def to_argv(config: RunConfig, fields: Iterable[str] | None = None) -> list[str]:
    """The flags that make ``config`` again: ``['--run-id', 'run', ...]``, every field spelt out."""
    argv: list[str] = []
    for name in fields if fields is not None else RunConfig.model_fields:
        argv += [flag(name), to_text(getattr(config, name))]
    return argv


def to_text(value: object) -> str:
    """A field's value as a flag or an Argo parameter spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
