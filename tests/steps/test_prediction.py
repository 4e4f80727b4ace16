"""The walk over a run that has not run yet: what it spends, commits and loses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.prediction import INTO_STEP, Costs, breakdown, is_bare, recovering_layer, walk
from trainer.config import RunConfig

COSTS = Costs(
    step=1.0, startup=5.0, save=6.0, save_stall=0.1, write=6.0, load=4.0, snapshot_stall=0.01,
    restart={"in_process": 0.5, "in_job": 2.0, "pod": 7.0}, detection={"exception": 0.0, "hang": 3.0},
)  # fmt: skip


def config(**values: object) -> RunConfig:
    settled: dict[str, object] = {"max_steps": 20, "warmup_steps": 1, "checkpoint_interval_steps": 5, "snapshot_interval_steps": 0}
    return RunConfig.model_validate(settled | {"checkpoint_mode": "sync", "recovery": "in-process"} | values)


def test_a_bare_run_is_its_start_and_its_steps() -> None:
    bare = config(checkpoint_mode="off", recovery="none")
    assert is_bare(bare)
    assert walk(bare, COSTS).now == pytest.approx(25.0)


def test_synchronous_saves_are_waited_for() -> None:
    run = walk(config(), COSTS)
    assert run.now == pytest.approx(5 + 20 + 4 * 6) and run.commits == 4


def test_asynchronous_saves_are_skipped_while_one_is_written() -> None:
    """A save takes six steps: of those due at 5, 10, 15 and 20 the second is skipped; the last one is always made."""
    run = walk(config(checkpoint_mode="async"), COSTS)
    assert (run.commits, run.skipped) == (3, 1)
    # That of step 15 is durable 15 + 6 - 20 = 1 after step 20; then the last one's 6.
    assert run.now == pytest.approx(5 + 20 + 0.1 + 1 + 6)


def test_a_fault_costs_what_was_not_saved() -> None:
    """A SIGKILL in step 9, with no layer but the pod's: back to step 5, with a load."""
    run = walk(config(fault_count=1, fault_steps="9", fault_kinds="sigkill", recovery="none"), COSTS)
    parts = breakdown(run)
    assert parts.replay == pytest.approx(3 + INTO_STEP)
    assert parts.recovery == pytest.approx(7 + 4)
    assert parts.productive == pytest.approx(20)


def test_a_snapshot_is_resumed_from_without_a_load() -> None:
    run = walk(config(fault_count=1, fault_steps="9", fault_kinds="exception", snapshot_interval_steps=2), COSTS)
    assert breakdown(run).recovery == pytest.approx(0.5)
    assert breakdown(run).replay == pytest.approx(INTO_STEP)


def test_a_lost_node_takes_its_snapshots() -> None:
    run = walk(config(fault_count=1, fault_steps="9", fault_kinds="node", snapshot_interval_steps=2, recovery="combined"), COSTS)
    assert breakdown(run).replay == pytest.approx(3 + INTO_STEP)
    assert breakdown(run).recovery == pytest.approx(7 + 4)


def test_a_save_in_flight_dies_with_its_process_and_survives_a_restart_in_it() -> None:
    early = config(fault_count=1, fault_steps="14", checkpoint_mode="async", checkpoint_interval_steps=10, save_timeout_seconds=60)
    slow = replace(COSTS, write=3.9)
    killed = walk(early.model_copy(update={"fault_kinds": "sigkill"}), slow)
    raised = walk(early.model_copy(update={"fault_kinds": "exception"}), replace(slow, write=3.0))
    assert breakdown(killed).replay == pytest.approx(13 + INTO_STEP)
    assert breakdown(raised).replay == pytest.approx(3 + INTO_STEP)


@pytest.mark.parametrize(
    ("recovery", "layers"),
    [
        ("none", ("pod", "pod", "pod", "pod")),
        ("in-process", ("in_process", "in_process", "pod", "pod")),
        ("in-job", ("in_job", "in_job", "in_job", "pod")),
        ("combined", ("in_process", "in_process", "in_job", "pod")),
    ],
)
def test_who_recovers_what(recovery: str, layers: tuple[str, ...]) -> None:
    kinds = (("exception", ""), ("hang", "loop"), ("hang", "stop"), ("node", ""))
    assert tuple(recovering_layer(recovery, *kind) for kind in kinds) == layers


@given(
    mode=st.sampled_from(["sync", "async", "off"]),
    recovery=st.sampled_from(["none", "in-process", "in-job", "combined"]),
    interval=st.integers(1, 30),
    snapshots=st.integers(0, 5),
    faults=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_the_intervals_sum_to_the_wall(mode: str, recovery: str, interval: int, snapshots: int, faults: int, seed: int) -> None:
    """And every step stands once, whatever is skipped, struck or rolled back."""
    made = config(
        max_steps=40, checkpoint_mode=mode, recovery=recovery, checkpoint_interval_steps=interval,
        snapshot_interval_steps=snapshots, fault_count=faults, fault_seed=seed, fault_first_step=0,
    )  # fmt: skip
    run = walk(made, COSTS)
    parts = breakdown(run).model_dump()
    assert sum(parts.values()) == pytest.approx(run.now)
    assert parts["productive"] == pytest.approx(40)
    assert min(parts.values()) >= 0
    assert run.committed == (0 if mode == "off" else 40)
