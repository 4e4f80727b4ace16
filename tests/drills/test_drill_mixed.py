"""Long runs through two hundred faults of all kinds (with the matrix and the table more than four hundred): none hangs,
none loses or repeats a sample."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_run import Trainer, Training, heartbeat


@pytest.fixture(scope="module")
def long_clean(prepared: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Without faults, as long as those with."""
    return prepared.run(tmp_path_factory.mktemp("long"), max_steps=120, recovery="none", snapshot_interval_steps=0)


@pytest.mark.parametrize(
    ("recovery", "kinds", "faults"),
    [
        ("combined", "exception,sigkill,oom,hang,exception,sigkill,hang,exception", 80),
        ("in-job", "sigkill,exception,hang,sigkill", 40),
        ("in-process", "exception,oom,exception,exception,hang", 20),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_long_run_through_many_faults(
    trainer: Trainer, long_clean: Training, tmp_path: Path, recovery: str, kinds: str, faults: int, seed: int
) -> None:
    count = faults // 2 if seed == 2 else faults
    training = trainer.run(
        tmp_path, deadline=15 * 60, recovery=recovery, max_steps=120, max_restarts=1000, fault_count=count, fault_kinds=kinds,
        fault_ranks="all", fault_seed=seed, heartbeat_timeout_seconds=heartbeat(3),
    )  # fmt: skip
    training.check_against(long_clean, faults=count)
    if recovery == "combined":
        for fault in training.injected():
            assert fault.lost_steps <= 1 or fault.kind == "hang", fault
