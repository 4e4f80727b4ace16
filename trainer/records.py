"""The records of a run: frozen models with a schema version that refuse unknown fields, written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.config import RunConfig
from trainer.errors import DataError


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's content, as the records of files hold it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Record(BaseModel):
    """Base of all records."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    schema_version: Literal[1] = 1

    def write(self, path: Path) -> None:
        """Write to ``path`` so that a reader sees the old content or the new, never a part (temporary, fsync, rename)."""
        write_whole(path, self.model_dump_json(indent=2).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and validate; ``DataError`` says which file and what is wrong with it. A missing file raises ``FileNotFoundError``."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "content"
            raise DataError(f"{path} is not a valid {cls.__name__}: {where}: {first['msg']}") from None


def write_whole(path: Path, content: bytes) -> None:
    """Atomically replace ``path``: temporary file in the same directory, fsync, rename, fsync of the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # (of a mount that is away: what went wrong first is to be said)
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # (a write names no file)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class FileRecord(BaseModel):
    """A file under the directory of the manifest that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="path relative to the manifest, with no '..' and not absolute")
    size: int = Field(description="bytes")
    sha256: str


class DatasetManifest(Record):
    """``datasets/<name>-<digest>/manifest.json``: token shards, each a flat little-endian array of ``dtype``."""

    source: str = Field(description="the dataset URI")
    revision: str = Field(description="what identifies the source's content: ETags, sizes, a commit")
    tokenizer: str
    tokenizer_sha256: str = Field("", description="of the tokenizer file; empty for byte")
    vocabulary_size: int
    end_of_document: int = Field(-1, description="the token that ends each document")
    dtype: Literal["uint8", "uint16", "uint32"]
    documents: int
    tokens: int
    shards: tuple[FileRecord, ...]
    digest: str = Field(description="SHA-256 over tokenizer, dtype and the shards' hashes: equal digest, equal tokens")


class RunRecord(Record):
    """``run.json``: what a run is. The first attempt writes it; a later one must agree with its config digest."""

    config: RunConfig
    config_digest: str
    dataset: str = Field(description="directory of the dataset")
    dataset_digest: str
    versions: dict[str, str]
    hardware: dict[str, Any]
    created: float


class CheckpointManifest(Record):
    """``checkpoints/step-<step>/manifest.json``, written last into a directory that is then renamed."""

    run_id: str
    step: int = Field(description="completed optimizer steps")
    world_size: int = Field(description="ranks that wrote it; any number may read it")
    config_digest: str
    next_sample: int = Field(description="position in the sample order: step x global batch size")
    attempt: int
    files: tuple[FileRecord, ...]
    created: float
    format: Literal["dcp"] = "dcp"


class Outcome(Record):
    """What a worker, or a node's launcher on its behalf, says of its own end."""

    exit_code: int
    message: str
    step: int = Field(-1, description="last completed step, -1 if unknown")
    rank: int = -1


class CheckpointVerdict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    path: str
    valid: bool
    checks: tuple[str, ...] = Field(description="what was checked and held")
    reason: str = Field("", description="why it is not valid")
    bytes: int = 0
    loss: float | None = Field(None, description="loss on held data of the loaded model, nats per token")
    kind: Literal["checkpoint", "quarantined", "stray"] = Field(
        "checkpoint", description="stray: never finished, or being removed; it was never taken for a checkpoint"
    )


class ValidationReport(Record):
    """``validation.json``."""

    run_id: str
    verdicts: tuple[CheckpointVerdict, ...]
    newest_valid_step: int | None


class FaultReport(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(description="the step that was interrupted, -1 if unknown")
    rank: int
    kind: str
    injected: bool
    message: str
    recovered_by: Literal["in_process", "in_job", "pod", "workflow", "none"]
    time: float = Field(description="wall clock of the fault")
    elapsed: float = Field(0.0, description="seconds of the run at the fault, on the timeline's axis")
    detection_seconds: float
    recovery_seconds: float = Field(description="from detection to the start of the next step")
    phases: dict[str, float] = Field(description="teardown, rendezvous, import, process_group, build, load; seconds")
    lost_steps: int
    resumed_step: int = -1
    resumed_from: str = Field("", description="tier: durable, snapshot, none")


class Breakdown(BaseModel):
    """Exclusive intervals of the wall time, seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    startup: float
    productive: float
    replay: float
    checkpoint_stall: float
    detection: float
    recovery: float
    other: float


class Restarts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    in_process: int = 0
    in_job: int = 0
    pod: int = 0
    workflow: int = 0


class TierReport(BaseModel):
    """Saves of one tier."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    committed: int = 0
    skipped: int = 0
    failed: int = 0
    refused: int = 0
    mean_stall_seconds: float = 0.0
    mean_durable_seconds: float = 0.0
    bytes: int = Field(0, description="of the newest one")


class ValidationCounts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    valid: int = 0
    invalid: int = 0


class Throughput(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens_per_second: float = Field(description="while productive")
    tokens_per_second_per_gpu: float
    mfu: float | None = Field(description="model FLOP/s over the hardware's peak; none on a CPU")
    median_step_seconds: float


class DataContinuity(BaseModel):
    """Samples of the committed trajectory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repeated: int
    skipped: int


class Straggler(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    ratio: float = Field(description="its median step time over the median of all ranks")


class Interval(BaseModel):
    """A piece of the timeline; times are seconds from the run's first launcher start, gaps of user stops cut out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    category: Literal["startup", "productive", "replay", "checkpoint_stall", "detection", "recovery", "other"]
    start: float
    end: float
    step: int = -1


class LossPoint(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    loss: float
    time: float
    replay: bool = Field(False, description="an execution that was rolled back later")


class CommitPoint(BaseModel):
    """A checkpoint came to be, or a snapshot was whole on every rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    time: float = Field(description="seconds of the run, on the timeline's axis")
    tier: Literal["durable", "snapshot"]


class RunReport(Record):
    """``report.json``."""

    run_id: str
    config: RunConfig
    versions: dict[str, str]
    hardware: dict[str, Any] = {}
    complete: bool
    incomplete_reason: str = Field("", description="why the run is not complete, in a sentence")
    started: float = Field(0.0, description="wall clock of the first launcher start")
    steps_completed: int
    replayed_steps: int = Field(0, description="executions of steps that were rolled back, interrupted ones included")
    wall_seconds: float
    breakdown_seconds: Breakdown
    training_goodput: float
    infrastructure_goodput: float
    effective_goodput: float | None
    faults: tuple[FaultReport, ...]
    lost_steps: int = Field(description="over all faults")
    committed_steps_lost: int = Field(description="steps that were committed and yet had to be run again; 0 is the promise")
    restarts: Restarts
    checkpoints: TierReport
    snapshots: TierReport
    validation: ValidationCounts
    throughput: Throughput
    final_loss: float | None
    data_continuity: DataContinuity
    stragglers: tuple[Straggler, ...] = ()
    timeline: tuple[Interval, ...] = ()
    losses: tuple[LossPoint, ...] = ()
    commits: tuple[CommitPoint, ...] = ()
