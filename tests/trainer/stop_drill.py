"""Runs that stop before their end, and go on or do not. Not a test."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from whole_run import Trainer, Training


def stop_and_go_on(trainer: Trainer, clean: Training, folder: Path, recovery: str) -> Training:
    """Stop a run, see that it saved where it stopped, and go on from there to the very end of the clean run."""
    values = {"recovery": recovery, "checkpoint_interval_steps": 1000, "snapshot_interval_steps": 0}
    first = trainer.start(folder, **values)
    first.until(lambda: first.step() >= 4, "four steps are done")
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(40) == 75, first.describe()
    stopped = first.step()
    assert stopped < clean.config.max_steps
    assert [path.name for path in first.paths.checkpoints.iterdir()] == [f"step-{stopped:08d}"]
    assert {event.data["step"] for event in first.events("commit")} == {stopped}
    assert len(first.events("process_start")) == 2, "the launcher started workers again that had stopped as asked"
    second = trainer.run(folder, **values)
    assert {event.data["step"] for event in second.events("loaded") if event.attempt == 2} == {stopped}
    assert second.digest() == clean.digest()
    second.check_samples()
    assert second.analysis.restarts.workflow == 1
    return second


def strike_for_ever(trainer: Trainer, folder: Path, recovery: str, kind: str, layer: str) -> None:
    """A fault that strikes at the same step again and again ends the run: two restarts that got nowhere are allowed."""
    training = trainer.start(
        folder, recovery=recovery, fault_count=1, fault_kinds=kind, fault_ranks="0", no_progress_restarts=2
    )
    with recurring(training):
        assert training.wait() == 76, training.describe()
    assert "2 restarts in a row got no further" in training.output
    struck = training.events("fault_injected")
    # The first restart found a step more than the start before it; the third is the one that ends the run.
    assert [getattr(event, layer) for event in struck] == [0, 1, 2]


@contextmanager
def recurring(training: Training) -> Iterator[None]:
    """Let every fault that was fired be due again."""
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
