"""What a layer cannot mend is the next one's, and in time: before the run is given up."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest
from whole_run import Trainer

pytestmark = pytest.mark.timeout(1800)


def test_what_only_a_new_process_is_without_costs_few_restarts_within_it(trainer: Trainer, tmp_path: Path) -> None:
    """A process that can open nothing any more fails at every restart; one that the launcher starts can."""
    training = trainer.start(
        tmp_path, recovery="combined", gpus_per_node=1, max_steps=80, fault_count=1, fault_kinds="exception", fault_first_step=60,
        checkpoint_mode="off", snapshot_interval_steps=0,
    )  # fmt: skip
    training.until(lambda: training.step() >= 2, "training has begun")
    worker = psutil.Process(training.pids()[0])
    worker.rlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    assert training.wait() == 0, training.describe()
    told = [event.event for event in training.events("entry", "worker_exit")]
    assert told.index("worker_exit") <= 4, "it was entered again and again"
    assert [fault.recovered_by for fault in training.analysis.faults] == ["in_job", "in_process"]
