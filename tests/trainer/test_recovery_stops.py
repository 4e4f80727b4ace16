"""How a run ends before its end, and goes on: stops, loss that is not finite, no progress, and what is refused at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from stop_drill import stop_and_go_on, strike_for_ever
from test_writer_faults import mounted, root_only
from whole_run import Trainer, Training

from steps import train
from steps.cluster import SAVED_BYTES_PER_PARAMETER
from trainer.config import build
from trainer.errors import ConfigurationError, DeniedError
from trainer.model import model_config, parameter_count
from trainer.paths import RunPaths

pytestmark = pytest.mark.timeout(1800)


def test_a_stopped_run_goes_on_where_it_stopped(
    trainer: Trainer, clean: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = stop_and_go_on(trainer, clean, tmp_path, "combined")
    assert train.main(trainer.arguments(tmp_path, **ended.config.model_dump(include={"recovery"}))) == 0
    assert "is complete: all 24 steps are done" in capsys.readouterr().out


def test_steps_that_are_not_finite_are_never_committed(trainer: Trainer, tmp_path: Path) -> None:
    training = trainer.run(
        tmp_path, code=70, learning_rate=1e30, warmup_steps=0, checkpoint_interval_steps=1, checkpoint_mode="sync"
    )
    bad = sorted({int(str(event.data["step"])) for event in training.events("non_finite")})
    assert len(bad) == 3 and bad == list(range(bad[0], bad[0] + 3))
    assert all(int(str(event.data["step"])) < bad[0] for event in training.events("commit"))
    assert f"last at step {bad[-1]}" in training.output and "--learning-rate" in training.output
    assert len(training.events("process_start")) == 2, "no restart can help"


def test_a_start_anew_keeps_nothing_of_a_snapshot_that_one_rank_could_not_read(
    trainer: Trainer, clean: Training, tmp_path: Path
) -> None:
    """Rank 0 has its moments back from memory by the time that rank 1 finds its own damaged."""
    values = {"checkpoint_mode": "off", "recovery": "in-job"}
    first = trainer.start(tmp_path, **values)
    first.until(lambda: first.step() >= 4, "four steps are done")
    first.process.terminate()
    assert first.wait(40) == 75, first.describe()
    damaged = list(first.paths.snapshots(tmp_path / "memory", 0).glob("rank-1-*"))
    assert len(damaged) == 2
    for path in damaged:
        with path.open("r+b") as file:
            file.seek(8192)
            file.write(b"\x01" * 64)
    second = trainer.run(tmp_path, **values)
    assert {event.data["step"] for event in second.events("loaded") if event.attempt == 2} == {0}
    assert second.last() == clean.last()


def test_a_fault_that_comes_again_for_ever_ends_the_run(trainer: Trainer, tmp_path: Path) -> None:
    strike_for_ever(trainer, tmp_path, "in-process", "exception", "iteration")


@root_only
def test_memory_that_is_too_small_is_refused_before_the_run(trainer: Trainer, tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "small", "size=1m"),
        pytest.raises(ConfigurationError, match=r"the snapshots of this model take .* make it larger or set"),
    ):
        train.main(trainer.arguments(tmp_path, snapshot_root=tmp_path / "small"))
    assert not (tmp_path / "runs").exists()


VOCABULARY = 257
STATE = SAVED_BYTES_PER_PARAMETER * parameter_count(model_config("tiny", VOCABULARY))


@root_only
@pytest.mark.parametrize(
    ("values", "copies"),
    [({}, 2), ({"nodes": 2}, 2), ({"nodes": 2, "snapshot_replicas": 1}, 5), ({"snapshot_replicas": 1}, 2)],
    ids=["one node", "nodes that share the memory", "replicas", "no peer for a replica"],
)
def test_all_snapshots_of_all_local_nodes_must_fit(tmp_path: Path, values: dict[str, int], copies: int) -> None:
    config = build({"root": tmp_path, "run_id": "a", "snapshot_root": tmp_path / "small", "micro_batch_size": 2, **values})
    with mounted(config.snapshot_root, f"size={copies * STATE + (64 << 10)}"):
        train.check_snapshots(config, VOCABULARY)
    with (
        mounted(config.snapshot_root, f"size={copies * STATE - (64 << 10)}"),
        pytest.raises(ConfigurationError, match="the snapshots of this model"),
    ):
        train.check_snapshots(config, VOCABULARY)


@root_only
def test_the_runs_own_snapshots_of_before_are_no_obstacle(tmp_path: Path) -> None:
    config = build({"root": tmp_path, "run_id": "a", "snapshot_root": tmp_path / "small"})
    with mounted(config.snapshot_root, f"size={2 * STATE + (64 << 10)}"):
        for generation in range(2):
            path = RunPaths(tmp_path, "a").snapshots(config.snapshot_root, 0) / f"rank-0-{generation}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\1" * STATE)
        train.check_snapshots(config, VOCABULARY)
        with pytest.raises(ConfigurationError, match=r"has 0\.00 GiB for this run"):
            train.check_snapshots(config.model_copy(update={"run_id": "another"}), VOCABULARY)


def test_memory_that_is_not_there_is_refused_before_the_run(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--snapshot-root /nowhere: No such file"):
        train.main(trainer.arguments(tmp_path, snapshot_root="/nowhere"))


@root_only
def test_a_root_that_cannot_be_written_is_refused_before_the_run(trainer: Trainer, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m"):
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True, timeout=10)
        with pytest.raises(DeniedError, match=r"--root .* cannot be written: Read-only file system"):
            train.main(trainer.arguments(tmp_path, root=tmp_path / "disk"))


@root_only
def test_a_supervisor_on_a_full_disk_is_tried_again_and_goes_on_once_there_is_room(trainer: Trainer, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    values = {"root": root, "gpus_per_node": 1, "max_steps": 2, "warmup_steps": 1, "fault_first_step": 1, "snapshot_interval_steps": 0}
    with mounted(root, "size=64m"):
        room = os.statvfs(root)
        (root / "ballast").write_bytes(b"\1" * (room.f_bavail * room.f_frsize))
        refused = trainer.run(tmp_path, code=69, **values)
        assert f"error: {refused.paths.record}: No space left on device; make room" in refused.output
        (root / "ballast").unlink()
        trainer.run(tmp_path, **values)
