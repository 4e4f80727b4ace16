"""Stops, restarts without progress, and killed supervisors under every recovery mode."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from stop_drill import stop_and_go_on, strike_for_ever
from whole_run import Trainer, Training


@pytest.mark.parametrize("recovery", ["none", "in-process", "in-job"])
def test_a_stopped_run_goes_on_where_it_stopped(
    trainer: Trainer, clean: Training, tmp_path: Path, recovery: str
) -> None:
    stop_and_go_on(trainer, clean, tmp_path, recovery)


@pytest.mark.parametrize(
    ("recovery", "kind", "layer"),
    [
        ("in-job", "sigkill", "cycle"), ("in-job", "exception", "cycle"), ("none", "sigkill", "pod"),
        ("in-process", "sigkill", "pod"), ("combined", "exception", "iteration"), ("combined", "sigkill", "cycle"),
    ],
)  # fmt: skip
def test_a_fault_that_comes_again_for_ever_ends_the_run(
    trainer: Trainer, tmp_path: Path, recovery: str, kind: str, layer: str
) -> None:
    strike_for_ever(trainer, tmp_path, recovery, kind, layer)


@pytest.mark.parametrize("recovery", ["in-job", "none"])
def test_workers_that_are_killed_at_every_start_end_the_run(trainer: Trainer, tmp_path: Path, recovery: str) -> None:
    """Nobody gets as far as a step: the starts are counted, not the steps."""
    training = trainer.start(tmp_path, recovery=recovery, no_progress_restarts=3, max_restarts=30)
    killed: set[int] = set()

    def kill_new_ones() -> bool:
        for event in training.events("process_start"):
            if event.pid not in killed:
                killed.add(event.pid)
                if psutil.pid_exists(event.pid):
                    os.kill(event.pid, signal.SIGKILL)
        return training.process.poll() is not None

    training.until(kill_new_ones, "it has ended", ends=True)
    assert training.process.returncode == 76, training.describe()
    assert not training.events("step_end")


@pytest.mark.parametrize("recovery", ["combined", "none"])
def test_a_killed_supervisor_is_followed_by_another(
    trainer: Trainer, clean: Training, tmp_path: Path, recovery: str
) -> None:
    """Its nodes stop by themselves, and the next attempt, begun at once, is never disturbed by them."""
    first = trainer.start(tmp_path, recovery=recovery, checkpoint_interval_steps=2)
    first.until(lambda: first.step() >= 6, "six steps are done")
    first.process.kill()
    first.process.wait()
    second = trainer.run(tmp_path, recovery=recovery, checkpoint_interval_steps=2)
    assert second.digest() == clean.digest()
    second.check_samples()
    assert second.analysis.committed_steps_lost == 0
