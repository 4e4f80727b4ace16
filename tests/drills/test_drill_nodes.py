"""Two nodes on one machine: either is lost, the one that hosts the rendezvous included; a world that shrinks and grows."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from whole_run import Trainer, Training

TWO: dict[str, object] = {"nodes": 2, "gpus_per_node": 1}


@pytest.mark.parametrize("recovery", ["none", "in-process", "in-job", "combined"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_replaced(trainer: Trainer, clean: Training, tmp_path: Path, recovery: str, lost: int) -> None:
    training = trainer.run(
        tmp_path, **TWO, recovery=recovery, deadline=300, fault_count=1, fault_kinds="node", fault_ranks=str(lost)
    )
    training.check_against(clean, faults=1)
    assert training.injected()[0].recovered_by == "pod"


@pytest.mark.parametrize("recovery", ["none", "in-process", "in-job", "combined"])
def test_ranks_on_two_nodes_are_killed_and_err(trainer: Trainer, clean: Training, tmp_path: Path, recovery: str) -> None:
    training = trainer.run(
        tmp_path, **TWO, recovery=recovery, deadline=400, fault_count=5, fault_kinds="sigkill,exception,hang,sigkill,exception",
        fault_ranks="0,1,1,1,0",
    )  # fmt: skip
    training.check_against(clean, faults=5)


@pytest.mark.parametrize("recovery", ["in-job", "combined"])
def test_a_replica_on_the_other_node_saves_a_lost_nodes_steps(
    trainer: Trainer, clean: Training, tmp_path: Path, recovery: str
) -> None:
    training = trainer.run(
        tmp_path, **TWO, recovery=recovery, deadline=300, snapshot_replicas=1, checkpoint_interval_steps=24,
        fault_count=2, fault_kinds="node", fault_ranks="1,0",
    )  # fmt: skip
    training.check_against(clean, faults=2)
    assert all(fault.lost_steps <= 2 for fault in training.injected()), training.analysis.faults


def test_a_world_that_shrinks_goes_on_and_grows_again(trainer: Trainer, tmp_path: Path) -> None:
    training = trainer.run(
        tmp_path, **TWO, recovery="in-job", deadline=600, min_nodes=1, node_lost_seconds=25, max_steps=400, checkpoint_interval_steps=5,
        sequence_length=256, fault_count=1, fault_kinds="node", fault_ranks="1", fault_steps="40",
    )  # fmt: skip
    training.check_samples()
    sizes = [event.world_size for event in training.events("step_start")]
    assert sizes[0] == 2 and 1 in sizes
    if sizes[-1] == 1:
        pytest.fail("it ended before the replacement came: make it longer")
    assert training.analysis.committed_steps_lost == 0


def test_a_run_goes_on_at_another_world_size(trainer: Trainer, tmp_path: Path) -> None:
    first = trainer.start(tmp_path, gpus_per_node=2)
    first.until(lambda: first.step() >= 8, "eight steps are done")
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(60) == 75
    second = trainer.start(tmp_path, gpus_per_node=4)
    second.until(lambda: second.step() >= 14, "six more steps are done")
    second.process.send_signal(signal.SIGTERM)
    assert second.wait(60) == 75
    third = trainer.run(tmp_path, gpus_per_node=1)
    third.check_samples()
    assert {event.world_size for event in third.events("step_end")} == {2, 4, 1}
    assert third.analysis.committed_steps_lost == 0
