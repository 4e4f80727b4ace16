"""How a run ends before its end, and goes on: stops, loss that is not finite, no progress, and what is refused at once."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from test_writer_faults import mounted, root_only
from whole_run import Trainer, Training

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("recovery", ["combined", "none"])
def test_a_stopped_run_goes_on_where_it_stopped(trainer: Trainer, clean: Training, tmp_path: Path, recovery: str) -> None:
    values = {"recovery": recovery, "max_steps": 24, "checkpoint_interval_steps": 1000, "snapshot_interval_steps": 0}
    first = trainer.start(tmp_path, **values)
    first.until(lambda: first.step() >= 4, "four steps are done")
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(40) == 75, first.describe()
    stopped = first.step()
    assert stopped < 24
    assert [path.name for path in first.paths.checkpoints.iterdir()] == [f"step-{stopped:08d}"]
    assert {event.data["step"] for event in first.events("commit")} == {stopped}
    assert len(first.events("process_start")) == 2, "the launcher started workers again that had stopped as asked"
    second = trainer.run(tmp_path, **values)
    assert {event.data["step"] for event in second.events("loaded") if event.attempt == 2} == {stopped}
    assert second.digest() == clean.digest()
    second.check_samples()
    assert second.analysis.restarts.workflow == 1
    third = trainer.run(tmp_path, **values)  # there is nothing left to do
    assert "is complete" in third.output


def test_steps_that_are_not_finite_are_never_committed(trainer: Trainer, tmp_path: Path) -> None:
    training = trainer.run(
        tmp_path, code=70, learning_rate=1e30, warmup_steps=0, checkpoint_interval_steps=1, checkpoint_mode="sync"
    )
    bad = sorted({int(str(event.data["step"])) for event in training.events("non_finite")})
    assert len(bad) == 3 and bad == list(range(bad[0], bad[0] + 3))
    assert all(int(str(event.data["step"])) < bad[0] for event in training.events("commit"))
    assert f"last at step {bad[-1]}" in training.output and "--learning-rate" in training.output
    assert len(training.events("process_start")) == 2, "no restart can help"


@contextmanager
def recurring(training: Training) -> Iterator[None]:
    """Let every fault that was fired be due again: it strikes at the same step for ever."""
    ended = threading.Event()

    def forget() -> None:
        while not ended.wait(0.02):
            with suppress(FileNotFoundError):
                (training.paths.faults_fired / "0").unlink()

    thread = threading.Thread(target=forget)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("recovery", "kind", "layer"),
    [("in-process", "exception", "iteration"), ("in-job", "sigkill", "cycle"), ("none", "sigkill", "pod")],
)
def test_a_fault_that_comes_again_for_ever_ends_the_run(
    trainer: Trainer, tmp_path: Path, recovery: str, kind: str, layer: str
) -> None:
    training = trainer.start(
        tmp_path, recovery=recovery, fault_count=1, fault_kinds=kind, fault_ranks="0", no_progress_restarts=2
    )
    with recurring(training):
        assert training.wait() == 76, training.describe()
    assert "2 restarts in a row got no further" in training.output
    entries = list(training.events("fault_injected"))
    assert len(entries) == 3, "the first, one restart that counts as progress, and two that do not, the last of which ends it"
    assert [getattr(event, layer) for event in entries] == [0, 1, 2]


@root_only
def test_memory_that_is_too_small_is_refused_before_the_run(trainer: Trainer, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=1m"):
        training = trainer.run(tmp_path / "root", code=64, snapshot_root=tmp_path / "small")
    assert "two snapshots of this model take" in training.output and training.output.count("\n") == 1
    assert training.events() == []


def test_memory_that_is_not_there_is_refused_before_the_run(trainer: Trainer, tmp_path: Path) -> None:
    training = trainer.run(tmp_path, code=64, snapshot_root="/nowhere")
    assert "--snapshot-root /nowhere" in training.output and training.output.count("\n") == 1


@root_only
def test_a_root_that_cannot_be_written_is_refused_before_the_run(trainer: Trainer, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m"):
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True, timeout=10)
        training = trainer.start(tmp_path, root=tmp_path / "disk")
        assert training.wait() == 77, training.output
    assert training.output.startswith("error: --root") and "Read-only file system" in training.output
    assert training.output.count("\n") == 1
