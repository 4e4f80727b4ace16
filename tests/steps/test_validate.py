"""Validation of checkpoints: real DCP checkpoints of the tiny model, made whole and then damaged in one way each."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import save

from steps import validate
from trainer.config import RunConfig
from trainer.errors import ConfigurationError, DataError
from trainer.model import build, init_weights, model_config
from trainer.paths import RunPaths
from trainer.records import (
    CheckpointManifest,
    CheckpointVerdict,
    DatasetManifest,
    FileRecord,
    RunRecord,
    ValidationReport,
)

DIGEST = "c" * 64
VOCABULARY = 257
TOKENS = 128 * 300 + 1
HELD_OUT = 3

Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    """The state of a fresh tiny model and its optimizer, named as the trainer names it."""
    model = build(model_config("tiny", VOCABULARY), "cpu")
    init_weights(model, 42)
    state: Tensors = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer.{name}.{moment}"] = torch.zeros_like(parameter)
        state[f"optimizer.{name}.step"] = torch.zeros(())
    return state


def write_checkpoint(path: Path, step: int, state: dict[str, Any], **changes: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is the point
        save(state, checkpoint_id=path, no_dist=True)
    seal(path, step, **changes)


def seal(path: Path, step: int, **changes: object) -> None:
    """Write the manifest of what is in ``path``."""
    files = [
        FileRecord(name=file.name, size=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
        for file in sorted(path.iterdir())
        if file.name != "manifest.json"
    ]
    values: dict[str, object] = {
        "run_id": "run", "step": step, "world_size": 1, "config_digest": DIGEST, "next_sample": step * 8, "attempt": 1,
        "files": files, "created": 0.0,
    }  # fmt: skip
    CheckpointManifest.model_validate(values | changes).write(path / "manifest.json")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "step-00000010"
    write_checkpoint(path, 10, tensors())
    return path


@pytest.fixture
def paths(tmp_path: Path, original: Path) -> RunPaths:
    """A run with a dataset and one whole checkpoint, of step 10."""
    dataset = tmp_path / "datasets" / "text"
    dataset.mkdir(parents=True)
    content = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS, dtype=np.uint16).tobytes()
    (dataset / "shard").write_bytes(content)
    DatasetManifest(
        source="", revision="", tokenizer="byte", vocabulary_size=VOCABULARY, dtype="uint16", documents=1, tokens=TOKENS,
        shards=(FileRecord(name="shard", size=len(content), sha256=hashlib.sha256(content).hexdigest()),), digest="",
    ).write(dataset / "manifest.json")  # fmt: skip
    paths = RunPaths(tmp_path, "run")
    record(RunConfig(), dataset).write(paths.record)
    shutil.copytree(original, paths.checkpoint(10))
    return paths


def record(config: RunConfig, dataset: Path) -> RunRecord:
    return RunRecord(
        config=config, config_digest=DIGEST, dataset=str(dataset), dataset_digest="", versions={}, hardware={}, created=0.0
    )


def run(paths: RunPaths) -> ValidationReport:
    assert validate.main(["--root", str(paths.root), "--run-id", "run"]) == 0
    return ValidationReport.read(paths.validation)


def verdict(paths: RunPaths) -> CheckpointVerdict:
    """Of a run whose only checkpoint is damaged: the step must end with 65, and still say why."""
    with pytest.raises(DataError, match="no valid checkpoint"):
        validate.main(["--root", str(paths.root), "--run-id", "run"])
    (only,) = ValidationReport.read(paths.validation).verdicts
    assert not only.valid and only.reason
    return only


def test_a_whole_checkpoint_is_valid(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(paths)
    (only,) = report.verdicts
    assert only.valid and only.reason == "" and only.step == report.newest_valid_step == 10
    assert only.checks == ("manifest", "run", "files", "sizes", "sha256", "metadata", "shapes", "tensors", "finite", "loss")
    assert only.bytes > 1_000_000
    # Weights that have learnt nothing: about as good as guessing among all tokens.
    assert only.loss == pytest.approx(math.log(VOCABULARY), abs=0.5)
    assert "step-00000010: valid, loss on held-out data 5." in capsys.readouterr().out


def test_the_loss_is_that_of_the_weights_in_the_checkpoint(paths: RunPaths) -> None:
    """A model whose output projection is zero gives all tokens the same probability."""
    state = tensors()
    state["model.output.weight"].zero_()
    write_checkpoint(paths.checkpoint(20), 20, state)
    assert next(v.loss for v in run(paths).verdicts) == pytest.approx(math.log(VOCABULARY), abs=1e-5)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path, **changes: object) -> None:
    manifest = CheckpointManifest.read(path / "manifest.json")
    manifest.model_copy(update=changes).write(path / "manifest.json")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "it has no manifest"),
    "torn manifest": (lambda p: truncate_half(p / "manifest.json"), "not a valid CheckpointManifest"),
    "another run's": (lambda p: edit(p, run_id="other"), "belongs to run other"),
    "another configuration": (lambda p: edit(p, config_digest="x"), "another configuration"),
    "another step's": (lambda p: edit(p, step=11), "says step 11"),
    "another position": (lambda p: edit(p, next_sample=79), "data position 79"),
    "a file missing": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a file too many": (lambda p: (p / "extra").touch(), "extra is not in its manifest"),
    "a file in a folder": (lambda p: ((p / "more").mkdir(), (p / "more" / "x").touch()), "more/x is not in its manifest"),
    "a file cut": (lambda p: truncate(p / "__0_0.distcp"), "__0_0.distcp has"),
    "a bit flipped": (lambda p: flip(p / "__0_0.distcp"), "SHA-256"),
    "a link": (lambda p: (p / "link").symlink_to("/etc/hostname"), "link is not a plain file"),
    "a foreign path": (
        lambda p: edit(p, files=(FileRecord(name="../step-00000020/x", size=0, sha256=""),)), "foreign path"
    ),
    "an absolute path": (lambda p: edit(p, files=(FileRecord(name="/etc/passwd", size=0, sha256=""),)), "foreign path"),
    "metadata that is none": (lambda p: ((p / ".metadata").write_bytes(b"x"), seal(p, 10)), "it cannot be read"),
    "no metadata": (lambda p: ((p / ".metadata").unlink(), seal(p, 10)), "it cannot be read"),
    "empty": (lambda p: [file.unlink() for file in p.iterdir()], "it has no manifest"),
}  # fmt: skip


def truncate_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_named(paths: RunPaths, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    harm(paths.checkpoint(10))
    assert reason in verdict(paths).reason


CONTENTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a weight that is not finite": (
        lambda s: s["model.output.weight"][3, 5].fill_(math.nan), "model.output.weight has 1 values that are not finite"
    ),
    "a moment that is not finite": (
        lambda s: s["optimizer.norm.weight.exp_avg"].fill_(math.inf), "optimizer.norm.weight.exp_avg has 128 values"
    ),
    "a tensor missing": (lambda s: s.pop("model.norm.weight"), "lacks the tensor model.norm.weight"),
    "a tensor too many": (lambda s: s.update({"model.more": torch.zeros(1)}), "a tensor model.more that the model has not"),
    "another shape": (lambda s: s.update({"model.norm.weight": torch.ones(64)}), "model.norm.weight has the shape [64]"),
    "no tensor": (lambda s: s.update({"model.norm.weight": "text"}), "model.norm.weight is not a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS)
def test_wrong_content_behind_right_hashes_is_found(paths: RunPaths, content: str) -> None:
    change, reason = CONTENTS[content]
    state = tensors()
    change(state)
    shutil.rmtree(paths.checkpoint(10))
    write_checkpoint(paths.checkpoint(10), 10, state)
    assert reason in verdict(paths).reason


class Trap:
    """Unpickling this leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_what_has_another_hash_is_never_unpickled(paths: RunPaths) -> None:
    trap = paths.root / "sprung"
    metadata = paths.checkpoint(10) / ".metadata"
    content = pickle.dumps(Trap(trap))
    metadata.write_bytes(content + bytes(metadata.stat().st_size - len(content)))  # of the right size
    assert ".metadata does not have the SHA-256" in verdict(paths).reason
    assert not trap.exists()


def test_older_damage_is_only_reported(paths: RunPaths, original: Path) -> None:
    shutil.copytree(original, paths.checkpoint(20))
    edit(paths.checkpoint(20), step=20, next_sample=160)
    flip(paths.checkpoint(10) / "__0_0.distcp")
    report = run(paths)
    assert [(v.step, v.valid) for v in report.verdicts] == [(20, True), (10, False)]
    assert report.newest_valid_step == 20


def test_a_damaged_newest_one_leaves_the_older(paths: RunPaths, original: Path) -> None:
    shutil.copytree(original, paths.checkpoint(20))  # says step 10
    report = run(paths)
    assert [(v.step, v.valid) for v in report.verdicts] == [(20, False), (10, True)]
    assert report.newest_valid_step == 10


def test_strays_and_quarantine_are_reported_and_are_no_checkpoints(paths: RunPaths) -> None:
    for name in (".tmp-00000020-1-ab", ".old-step-00000005", "notes"):
        (paths.checkpoints / name).mkdir()
    (paths.quarantine / "step-00000008-123").mkdir(parents=True)
    report = run(paths)
    found = {Path(v.path).name: (v.kind, v.step) for v in report.verdicts}
    assert found == {
        "step-00000010": ("checkpoint", 10),
        ".tmp-00000020-1-ab": ("stray", -1),
        ".old-step-00000005": ("stray", -1),
        "notes": ("stray", -1),
        "step-00000008-123": ("quarantined", 8),
    }
    assert report.newest_valid_step == 10
    assert all(v.reason for v in report.verdicts if not v.valid)


def test_a_run_that_must_have_a_checkpoint_and_has_none(paths: RunPaths) -> None:
    shutil.rmtree(paths.checkpoints)
    assert run(paths).verdicts == ()  # it never said that it got as far as one
    paths.finished.write_text("100")
    with pytest.raises(DataError, match="no valid checkpoint"):
        validate.main(["--root", str(paths.root), "--run-id", "run"])


def test_a_run_without_checkpoints_by_configuration(paths: RunPaths) -> None:
    shutil.rmtree(paths.checkpoints)
    paths.finished.write_text("100")
    record(RunConfig(checkpoint_mode="off"), paths.root / "datasets" / "text").write(paths.record)
    assert run(paths).newest_valid_step is None


def test_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no run 'run'"):
        validate.main(["--root", str(tmp_path), "--run-id", "run"])


def test_without_its_dataset_a_run_cannot_be_validated(paths: RunPaths) -> None:
    shutil.rmtree(paths.root / "datasets")
    with pytest.raises(DataError, match="download"):
        validate.main(["--root", str(paths.root), "--run-id", "run"])
    assert not paths.validation.exists()


@contextlib.contextmanager
def away(path: Path) -> Iterator[None]:
    """``path`` is on a mount whose server is gone: what asks for it is told ENOTCONN."""
    libc = ctypes.CDLL(None, use_errno=True)
    connection = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={connection},rootmode=100644,user_id=0,group_id=0".encode()
    mounted = libc.mount(b"away", str(path).encode(), b"fuse", 0, options)
    os.close(connection)
    if mounted:
        pytest.skip(f"no mount of its own for a test: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(str(path).encode(), 2)


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="mounts what answers nothing: needs root and /dev/fuse")
def test_storage_that_is_away_is_no_verdict_on_a_checkpoint(paths: RunPaths) -> None:
    (file,) = paths.checkpoint(10).glob("*.distcp")
    command = [sys.executable, "-m", "steps.validate", "--root", str(paths.root), "--run-id", "run"]
    with away(file):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 69, done.stderr
    assert "see that its server answers" in done.stderr
    assert not paths.validation.exists()
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
