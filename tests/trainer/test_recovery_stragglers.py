"""A rank that is slow is named in the report, and those that wait for it are not."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from whole_run import Trainer

pytestmark = pytest.mark.timeout(1800)


def test_a_rank_that_is_stopped_again_and_again_is_the_straggler(trainer: Trainer, tmp_path: Path) -> None:
    training = trainer.start(
        tmp_path, recovery="in-job", checkpoint_mode="off", snapshot_interval_steps=0, max_steps=40, sequence_length=256, gpus_per_node=2
    )  # fmt: skip
    training.until(lambda: training.step() >= 2, "training has begun")
    slow = psutil.Process(training.pids()[1])
    ended = threading.Event()

    def pulses() -> None:
        while not ended.is_set():
            with suppress(psutil.Error):
                slow.suspend()
                time.sleep(0.035)
                slow.resume()
                time.sleep(0.005)  # (a step takes longer on any machine)

    thread = threading.Thread(target=pulses)
    thread.start()
    try:
        assert training.wait() == 0, training.describe()
    finally:
        ended.set()
        thread.join()
    (straggler,) = training.analysis.stragglers
    assert straggler.rank == 1 and straggler.ratio > 1.2
