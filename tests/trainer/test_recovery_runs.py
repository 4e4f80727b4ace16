"""Whole runs through faults: every layer brings them back, and they end with the very weights of a run without faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_run import Trainer, Training

pytestmark = pytest.mark.timeout(1800)


def test_combined_survives_every_kind_of_fault_on_every_rank(trainer: Trainer, clean: Training, tmp_path: Path) -> None:
    kinds = "exception,hang,sigkill,oom,node,hang"
    training = trainer.run(tmp_path, recovery="combined", fault_count=6, fault_kinds=kinds, fault_ranks="0,1,0,1,0,0")
    training.check_against(clean, faults=6)
    by_kind = {fault.kind: fault for fault in training.injected()}
    assert by_kind["exception"].recovered_by == "in_process"
    assert by_kind["oom"].recovered_by == "in_process"
    assert by_kind["sigkill"].recovered_by == "in_job"
    assert by_kind["node"].recovered_by == "pod"
    for kind in ("exception", "sigkill", "oom"):
        assert by_kind[kind].lost_steps <= 1, by_kind[kind]  # the snapshot interval


def test_in_process_alone(trainer: Trainer, clean: Training, tmp_path: Path) -> None:
    training = trainer.run(
        tmp_path, recovery="in-process", checkpoint_mode="sync", snapshot_interval_steps=0, fault_count=3,
        fault_kinds="exception,sigkill,exception", fault_ranks="0,0,1",
    )  # fmt: skip
    training.check_against(clean, faults=3)
    assert [fault.recovered_by for fault in training.injected()] == ["in_process", "pod", "in_process"]


def test_in_process_with_a_stopped_rank_0(trainer: Trainer, clean: Training, tmp_path: Path) -> None:
    """It hosts the store that all monitors ask."""
    training = trainer.run(tmp_path, recovery="in-process", fault_count=2, fault_kinds="hang", fault_ranks="1,0")
    training.check_against(clean, faults=2)
    loop, stopped = training.injected()
    assert loop.recovered_by == "in_process" and stopped.recovered_by == "pod"
    assert stopped.detection_seconds < training.config.heartbeat_timeout_seconds + 4


def test_in_job_alone(trainer: Trainer, clean: Training, tmp_path: Path) -> None:
    training = trainer.run(
        tmp_path, recovery="in-job", snapshot_interval_steps=2, fault_count=4, fault_kinds="exception,sigkill", fault_ranks="0,1,1,0"
    )  # fmt: skip
    training.check_against(clean, faults=4)
    assert {fault.recovered_by for fault in training.injected()} == {"in_job"}
    assert all(fault.lost_steps <= 2 for fault in training.injected())
