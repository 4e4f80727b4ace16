"""Two nodes on one machine, in short: the one that hosts the rendezvous is lost, and a world shrinks (long: tests/drills)."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from whole_run import REPOSITORY, Trainer, Training

from trainer.config import build
from trainer.paths import RunPaths
from trainer.records import Outcome, RunRecord

pytestmark = pytest.mark.timeout(1800)

TWO: dict[str, object] = {"nodes": 2, "gpus_per_node": 1, "fault_count": 1, "fault_kinds": "node"}


def test_the_node_of_the_rendezvous_is_replaced_and_a_replica_saves_its_steps(
    trainer: Trainer, clean: Training, tmp_path: Path
) -> None:
    training = trainer.run(
        tmp_path, **TWO, deadline=300, fault_ranks="0", snapshot_replicas=1, checkpoint_interval_steps=24
    )
    training.check_against(clean, faults=1)
    (fault,) = training.injected()
    assert fault.recovered_by == "pod"
    assert fault.lost_steps <= 2, fault
    assert any(event.data["tier"] == "snapshot" for event in training.events("loaded")), "no checkpoint was there"


def test_a_run_goes_on_without_a_node_that_is_not_replaced(trainer: Trainer, tmp_path: Path) -> None:
    training = trainer.run(
        tmp_path, **TWO, deadline=300, fault_ranks="1", min_nodes=1, node_lost_seconds=3600, recovery="in-job"
    )
    training.check_samples()
    sizes = [event.world_size for event in training.events("step_end")]
    assert sizes[0] == 2 and sizes[-1] == 1
    assert training.analysis.committed_steps_lost == 0


def test_a_hang_beside_the_rendezvous_is_told_to_its_node(trainer: Trainer, clean: Training, tmp_path: Path) -> None:
    """Without watchdogs: the other node ends when a collective's time is up, and is turned away by torchrun's rendezvous,
    whose own node sees nothing but a worker that is alive."""
    training = trainer.run(
        tmp_path, **TWO | {"fault_kinds": "hang"}, deadline=300, fault_ranks="0", recovery="none", max_restarts=3
    )
    training.check_against(clean, faults=1)


@pytest.mark.parametrize("delay", [0, 6])
def test_a_node_that_comes_back_when_all_is_done_is_done_too(tmp_path: Path, delay: float) -> None:
    """The others finished without it, before it came or while it waits for them, and the rendezvous is gone with them."""
    config = build({"root": tmp_path, "run_id": "drill", "nodes": 2, "min_nodes": 1, "gpus_per_node": 1, "recovery": "in-job"})
    paths = RunPaths(tmp_path, "drill")
    RunRecord(
        config=config, config_digest="c", dataset="d", dataset_digest="d", versions={}, hardware={}, created=1.0
    ).write(paths.record)
    command = [sys.executable, "-m", "steps.node", "--run-directory", str(paths.run), "--attempt=1", "--node=1", "--pod=1"]
    done = Outcome(exit_code=0, message="finished step 24", step=24, rank=0)
    if not delay:
        done.write(paths.outcome(1, 0, 1, 0))
    with subprocess.Popen([*command, "--rendezvous-port=1"], cwd=REPOSITORY) as node:
        try:
            if delay:
                time.sleep(delay)
                assert node.poll() is None
                done.write(paths.outcome(1, 0, 1, 0))
            assert node.wait(60) == 0
        finally:
            node.kill()
