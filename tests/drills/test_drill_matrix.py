"""Every recovery mode with every checkpoint mode, with and without snapshots, through every kind of fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_run import Trainer, Training, heartbeat

SNAPSHOTTED = ("exception", "sigkill", "oom")
BASELINE = "exception,sigkill,oom,node"
"""Nobody watches the baseline: a hang lasts until a collective's time is up, and has a drill of its own."""


@pytest.mark.parametrize("snapshots", [0, 1])
@pytest.mark.parametrize("mode", ["off", "sync", "async"])
@pytest.mark.parametrize("recovery", ["none", "in-process", "in-job", "combined"])
def test_every_composition_ends_with_the_same_weights(
    trainer: Trainer, clean: Training, tmp_path: Path, recovery: str, mode: str, snapshots: int
) -> None:
    kinds = BASELINE if recovery == "none" else "exception,hang,sigkill,node"
    training = trainer.run(
        tmp_path, recovery=recovery, checkpoint_mode=mode, snapshot_interval_steps=snapshots, deadline=300, max_restarts=20,
        fault_count=4, fault_kinds=kinds, fault_ranks="0,1,1,0",
    )  # fmt: skip
    training.check_against(clean, faults=4)
    if snapshots:
        for fault in training.injected():
            if fault.kind in SNAPSHOTTED:
                assert fault.lost_steps <= snapshots, fault


@pytest.mark.parametrize("seed", [42, 43])
def test_a_hang_that_nobody_watches_ends_with_a_collectives_time(
    trainer: Trainer, clean: Training, tmp_path: Path, seed: int
) -> None:
    training = trainer.run(
        tmp_path, recovery="none", deadline=400, startup_timeout_seconds=60 + heartbeat(), fault_count=1,
        fault_kinds="hang", fault_ranks="1", fault_seed=seed,
    )  # fmt: skip
    training.check_against(clean, faults=1)
