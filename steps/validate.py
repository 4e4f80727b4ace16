"""Validate the checkpoints of a run: ``validation.json``, a verdict for each, newest first.

    python -m steps.validate --root DIR --run-id ID

A checkpoint is valid when all of this holds: its manifest is readable and of this run and step; the directory holds the
files of the manifest and no others, with their sizes and SHA-256; DCP's metadata can be read and names the tensors of the
model and its optimizer, in their shapes; every tensor loads and is finite; the loaded model has a finite loss on held-out
data. Nothing is unpickled before its hash has been checked.

What lies beside the checkpoints is reported too: saves that were never finished, and what was quarantined. The step ends
with 65 when the run should have a valid checkpoint and has none, with 64 when there is no such run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steps.runs import read_run
from trainer import environment
from trainer.config import OneLineParser, add_flags, from_namespace
from trainer.errors import DataError, ExitCode, exit_with, says_nothing_of_data
from trainer.paths import CHECKPOINT_NAME, MANIFEST, RunPaths
from trainer.progress import read_now
from trainer.records import CheckpointManifest, CheckpointVerdict, RunRecord, ValidationReport, file_sha256

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    from trainer.data import TokenDataset
    from trainer.model import ModelConfig

METADATA = ".metadata"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
LOAD_BYTES = 1 << 30
"""Bytes of tensors that are in memory at a time besides the model."""
HELD_OUT_FLOPS = 2e13
"""Work of a forward pass over held-out samples: all of them for a small model, one for a large one."""
HELD_OUT_SAMPLES = 64
FORWARD_TOKENS = 8192
"""Tokens of one forward pass: the logits of a large vocabulary take half a megabyte each."""


class Invalid(Exception):
    """Why a checkpoint is not valid."""


@dataclass
class Examination:
    """One checkpoint under examination: what held so far."""

    path: Path
    record: RunRecord
    dataset: TokenDataset
    checks: list[str] = field(default_factory=list)
    bytes: int = 0

    def held(self, what: str) -> None:
        self.checks.append(what)


def main(argv: list[str] | None = None) -> int:
    """Entry of the step."""
    parser = OneLineParser(prog="python -m steps.validate", description="validate the checkpoints of a run")
    add_flags(parser, ("root", "run_id"))
    config = from_namespace(parser.parse_args(argv))
    paths = RunPaths(config.root, config.run_id)
    record = read_run(paths)
    report = validate(paths, record)
    report.write(paths.validation)
    for verdict in report.verdicts:
        print(line(verdict), flush=True)
    if report.newest_valid_step is None:
        if expected(paths, record):
            raise DataError(
                f"run {config.run_id} has no valid checkpoint in {paths.checkpoints}; {paths.validation} says why. "
                "Give another --run-id to train it again"
            )
        print("there is no checkpoint to validate, and there need not be one", flush=True)
    return int(ExitCode.DONE)


def line(verdict: CheckpointVerdict) -> str:
    """A verdict for the log."""
    name = Path(verdict.path).name
    if verdict.valid:
        return f"{name}: valid{f', loss on held-out data {verdict.loss:.4f}' if verdict.loss is not None else ''}"
    return f"{name}: {verdict.reason}"


def expected(paths: RunPaths, record: RunRecord) -> bool:
    """Whether a run that is as far as this one should have a checkpoint."""
    if record.config.checkpoint_mode == "off":
        return False
    saved = any(CHECKPOINT_NAME.match(path.name) for path in _entries(paths.checkpoints)) or any(_entries(paths.quarantine))
    return saved or paths.finished.exists() or read_now(paths).furthest >= record.config.checkpoint_interval_steps


def validate(paths: RunPaths, record: RunRecord) -> ValidationReport:
    """Examine everything that is, or could be taken for, a checkpoint of the run.

    ``DataError`` when the run's dataset is gone: the model's vocabulary and the held-out samples are its.
    """
    from trainer.data import TokenDataset

    dataset = TokenDataset(Path(record.dataset), record.config.sequence_length)
    verdicts: list[CheckpointVerdict] = []
    strays: list[CheckpointVerdict] = []
    for path in sorted(_entries(paths.checkpoints), key=lambda path: path.name, reverse=True):
        if CHECKPOINT_NAME.match(path.name):
            verdict = examine(path, record, dataset)
            if verdict.valid or path.exists():  # (one that retention has removed meanwhile is none)
                verdicts.append(verdict)
        elif path.name.startswith(".old-"):
            strays.append(_stray(path, "it was being removed to keep the newest ones"))
        elif path.name.startswith(".tmp-"):
            strays.append(_stray(path, "it was never finished: its save was interrupted, or still goes on"))
        else:
            strays.append(_stray(path, "it is no checkpoint and nothing of this project"))
    for path in _entries(paths.quarantine):
        strays.append(_quarantined(path))
    valid = [verdict.step for verdict in verdicts if verdict.valid]
    return ValidationReport(
        run_id=record.config.run_id, verdicts=(*verdicts, *strays), newest_valid_step=max(valid, default=None)
    )


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _stray(path: Path, reason: str) -> CheckpointVerdict:
    return CheckpointVerdict(step=-1, path=str(path), valid=False, checks=(), reason=reason, kind="stray")


def _quarantined(path: Path) -> CheckpointVerdict:
    match = CHECKPOINT_NAME.match(path.name.rpartition("-")[0])
    step = int(match[1]) if match else -1
    reason = "it was quarantined when training tried to resume from it; the events say why"
    return CheckpointVerdict(step=step, path=str(path), valid=False, checks=(), reason=reason, kind="quarantined")


def examine(path: Path, record: RunRecord, dataset: TokenDataset) -> CheckpointVerdict:
    """The verdict on the checkpoint directory ``path``."""
    match = CHECKPOINT_NAME.match(path.name)
    assert match is not None, path
    subject = Examination(path, record, dataset)
    loss: float | None = None
    reason = ""
    try:
        manifest = check_manifest(subject, int(match[1]))
        check_files(subject, manifest)
        loss = check_tensors(subject)
    except Invalid as error:
        reason = str(error)
    except Exception as error:
        if says_nothing_of_data(error) and getattr(error, "errno", None) != errno.EIO:  # (a bad block says something)
            raise
        # Whatever torch makes of bytes that are not what they should be: one checkpoint's trouble is a verdict, not an end.
        reason = f"it cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return CheckpointVerdict(
        step=int(match[1]), path=str(path), valid=not reason, checks=tuple(subject.checks), reason=reason,
        bytes=subject.bytes, loss=loss,
    )  # fmt: skip


def check_manifest(subject: Examination, step: int) -> CheckpointManifest:
    """The manifest is whole, and of this run, this configuration and this step."""
    config = subject.record.config
    try:
        manifest = CheckpointManifest.read(subject.path / MANIFEST)
    except FileNotFoundError:
        raise Invalid("it has no manifest") from None
    except DataError as error:
        raise Invalid(str(error)) from None
    subject.held("manifest")
    if manifest.run_id != config.run_id:
        raise Invalid(f"it belongs to run {manifest.run_id}")
    if manifest.config_digest != subject.record.config_digest:
        raise Invalid("it was made with another configuration or dataset than run.json says")
    if manifest.step != step:
        raise Invalid(f"its manifest says step {manifest.step}")
    if manifest.next_sample != step * config.global_batch_size:
        raise Invalid(f"its data position {manifest.next_sample} is not step {step} x {config.global_batch_size} samples")
    subject.held("run")
    return manifest


def check_files(subject: Examination, manifest: CheckpointManifest) -> None:
    """The directory holds exactly the manifest's files, with their sizes and hashes."""
    names = [file.name for file in manifest.files]
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts or not name:
            raise Invalid(f"its manifest names a foreign path {name!r}")
    present = {str(path.relative_to(subject.path)) for path in _files_below(subject.path)} - {MANIFEST}
    if missing := sorted(set(names) - present):
        raise Invalid(f"{missing[0]} is missing" + _more(missing))
    if extra := sorted(present - set(names)):
        raise Invalid(f"{extra[0]} is not in its manifest" + _more(extra))
    subject.held("files")
    for file in manifest.files:
        size = (subject.path / file.name).stat().st_size
        if size != file.size:
            raise Invalid(f"{file.name} has {size} bytes, its manifest says {file.size}")
    subject.bytes = sum(file.size for file in manifest.files)
    subject.held("sizes")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(file_sha256, [subject.path / file.name for file in manifest.files])
        for file, digest in zip(manifest.files, digests, strict=True):
            if digest != file.sha256:
                raise Invalid(f"{file.name} does not have the SHA-256 of its manifest")
    subject.held("sha256")


def _files_below(directory: Path) -> Iterator[Path]:
    """All files; what is neither a plain file nor a directory of them is refused."""
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise Invalid(f"{path.name} is not a plain file")
        if path.is_dir():
            yield from _files_below(path)
        else:
            yield path


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def check_tensors(subject: Examination) -> float | None:
    """The tensors are those of the model and its optimizer, and finite; returns the loss of the loaded model."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from trainer.model import build, model_config

    reader = FileSystemReader(subject.path)
    metadata = reader.read_metadata()
    subject.held("metadata")
    config = model_config(subject.record.config.model, subject.dataset.manifest.vocabulary_size)
    check_shapes(subject, metadata, config)
    model = build(config, "meta")
    weights: dict[str, Tensor] = {}
    keep = _fits(metadata)
    for names in _groups(metadata):
        for name, tensor in load(reader, metadata, names).items():
            check_finite(name, tensor)
            if keep and name.startswith("model."):
                weights[name.removeprefix("model.")] = tensor
    subject.held("tensors")
    subject.held("finite")
    if not keep:
        return None
    # Assigned rather than copied, so that the weights are in memory once.
    model.load_state_dict(weights, assign=True)
    loss = held_out_loss(subject.dataset, model, config)
    if loss is not None:
        subject.held("loss")
    return loss


def check_shapes(subject: Examination, metadata: Metadata, config: ModelConfig) -> None:
    """DCP's metadata names each parameter and its moments, in the model's shapes, and nothing else."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from trainer.model import build

    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in build(config, "meta").named_parameters():
        wanted[f"model.{name}"] = tuple(parameter.shape)
        for moment in MOMENTS:
            wanted[f"optimizer.{name}.{moment}"] = () if moment == "step" else tuple(parameter.shape)
    found: dict[str, tuple[int, ...]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise Invalid(f"{name} is not a tensor")
        found[name] = tuple(entry.size)
    if missing := sorted(wanted.keys() - found.keys()):
        raise Invalid(f"it lacks the tensor {missing[0]}" + _more(missing))
    if extra := sorted(found.keys() - wanted.keys()):
        raise Invalid(f"it has a tensor {extra[0]} that the model has not" + _more(extra))
    for name, shape in wanted.items():
        if found[name] != shape:
            raise Invalid(f"{name} has the shape {list(found[name])}, the model's is {list(shape)}")
    subject.held("shapes")


def _tensor_bytes(metadata: Metadata, name: str) -> int:
    entry: Any = metadata.state_dict_metadata[name]
    return int(entry.size.numel()) * int(entry.properties.dtype.itemsize)


def _groups(metadata: Metadata) -> Iterator[list[str]]:
    """The tensors in groups that are read at a time."""
    group: list[str] = []
    size = 0
    for name in metadata.state_dict_metadata:
        group.append(name)
        size += _tensor_bytes(metadata, name)
        if size >= LOAD_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _fits(metadata: Metadata) -> bool:
    """Whether the model's weights, and what is read at a time, fit in the memory that is free."""
    import psutil

    weights = sum(_tensor_bytes(metadata, n) for n in metadata.state_dict_metadata if n.startswith("model."))
    return weights + 2 * LOAD_BYTES < psutil.virtual_memory().available


def load(reader: FileSystemReader, metadata: Metadata, names: list[str]) -> dict[str, Tensor]:
    """The tensors ``names``, whole, on the CPU; no process group is needed."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    entries: dict[str, Any] = metadata.state_dict_metadata
    tensors: dict[str, Any] = {n: torch.empty(entries[n].size, dtype=entries[n].properties.dtype) for n in names}
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return tensors


def check_finite(name: str, tensor: Tensor) -> None:
    import torch

    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise Invalid(f"{name} has {bad} values that are not finite")


def held_out_loss(dataset: TokenDataset, model: Any, config: ModelConfig) -> float | None:
    """Mean loss over held-out samples, nats per token; None if the dataset is too small to hold any out."""
    import torch

    from trainer.model import parameter_count, token_loss

    affordable = int(HELD_OUT_FLOPS / (2.0 * parameter_count(config) * dataset.sequence_length))
    samples = list(dataset.held_out)[: max(1, min(HELD_OUT_SAMPLES, affordable))]
    if not samples:
        return None
    device = torch.device("cuda" if environment.has_gpu() else "cpu")
    model.to(device)
    total = 0.0
    at_once = max(1, FORWARD_TOKENS // dataset.sequence_length)
    with torch.inference_mode():
        for start in range(0, len(samples), at_once):
            tokens_BT = dataset.batch(samples[start : start + at_once]).to(device)
            total += float(token_loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])) * len(tokens_BT)
    loss = total / len(samples)
    if not torch.isfinite(torch.tensor(loss)):
        raise Invalid(f"the loss of the model on held-out data is {loss}")
    return loss


if __name__ == "__main__":
    exit_with(main)
