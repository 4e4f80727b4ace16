"""Fault injection: the schedule, and real faults in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import events
from trainer.config import RunConfig, build
from trainer.errors import ConfigurationError
from trainer.faults import InjectedFault, Injector, schedule
from trainer.paths import RunPaths

WORKER = Path(__file__).with_name("fault_worker.py")
DEADLINE = 60.0


def config(**values: object) -> RunConfig:
    return build({"gpus_per_node": 8, "global_batch_size": 32, "max_steps": 2000, "fault_count": 5, **values})


# -- the schedule --------------------------------------------------------------------------------------------------


def test_the_published_runs_steps() -> None:
    assert [fault.step for fault in schedule(config())] == [62, 239, 574, 1320, 1529]


def test_kinds_are_dealt_in_order_and_hangs_alternate() -> None:
    faults = schedule(config(fault_count=7, fault_kinds="hang,sigkill,hang"))
    dealt = [(fault.index, fault.kind, fault.variant) for fault in faults]
    assert dealt == [
        (0, "hang", "loop"), (1, "sigkill", ""), (2, "hang", "stop"), (3, "hang", "loop"), (4, "sigkill", ""),
        (5, "hang", "stop"), (6, "hang", "loop"),
    ]  # fmt: skip


def test_ranks_can_be_listed_or_include_rank_0() -> None:
    assert [fault.rank for fault in schedule(config(fault_ranks="3,0"))] == [3, 0, 3, 0, 3]
    assert {fault.rank for fault in schedule(config(fault_count=200, fault_ranks="all"))} == set(range(8))
    assert {fault.rank for fault in schedule(config(fault_count=200))} == set(range(1, 8))
    assert {fault.rank for fault in schedule(config(gpus_per_node=1))} == {0}
    # Where a fault strikes does not move when.
    assert [fault.step for fault in schedule(config(fault_ranks="all"))] == [62, 239, 574, 1320, 1529]


def test_steps_can_be_named() -> None:
    faults = schedule(config(fault_steps="1,7,8,1999,2000"))
    assert [fault.step for fault in faults] == [1, 7, 8, 1999, 2000]
    assert [fault.rank for fault in faults] == [fault.rank for fault in schedule(config())]


@pytest.mark.parametrize(
    ("steps", "reason"),
    [("1,2", "names 2 steps"), ("1,2,3,4,2001", "max_steps 2000"), ("0,2,3,4,5", "between 1"), ("5,4,3,2,1", "rising"),
     ("1,1,2,3,4", "rising"), ("1,2,3,4,x", "comma list")],
)  # fmt: skip
def test_named_steps_that_cannot_be_are_refused(steps: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        config(fault_steps=steps)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 300),
    first=st.integers(0, 100),
    count=st.integers(0, 300),
    world=st.sampled_from([1, 2, 4]),
)
def test_a_schedule_keeps_its_bounds(seed: int, steps: int, first: int, count: int, world: int) -> None:
    count = min(count, max(0, steps - first))
    made = config(
        fault_seed=seed, max_steps=steps, warmup_steps=0, fault_first_step=first, fault_count=count, gpus_per_node=world
    )
    faults = schedule(made)
    assert len(faults) == count and faults == schedule(made)
    struck = [fault.step for fault in faults]
    assert struck == sorted(set(struck)) and all(first < step <= steps for step in struck)
    assert all((1 if world > 1 else 0) <= fault.rank < world for fault in faults)


# -- the faults ----------------------------------------------------------------------------------------------------


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A run of 8 steps with one fault on rank 1, at step 5."""
    chosen: dict[str, Any] = {
        "root": str(tmp_path), "snapshot_root": str(tmp_path / "shm"), "run_id": "drill", "max_steps": 8, "warmup_steps": 0,
        "fault_count": 1, "fault_first_step": 2, "fault_seed": 7,
    }  # fmt: skip
    assert [(fault.step, fault.rank) for fault in schedule(build(chosen))] == [(5, 1)], "choose another fault_seed"
    return chosen


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts fault_worker.py with this folder's package; kills what is left at the end."""
    processes: list[subprocess.Popen[str]] = []

    def run(mode: str, values: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(WORKER), mode, json.dumps(values)]
        root = WORKER.parents[2]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)} | environment,
        )  # fmt: skip
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def paths(values: dict[str, Any]) -> RunPaths:
    return RunPaths(Path(values["root"]), values["run_id"])


def fired(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [event.data for event in events.read(paths(values).events) if event.event == "fault_injected"]


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE} s: {what}"
        time.sleep(0.05)


def steps(output: str) -> list[int]:
    return [int(line.removeprefix("step ")) for line in output.splitlines() if line.startswith("step ")]


def test_an_exception_is_raised_once_in_the_life_of_a_run(values: dict[str, Any], start: Any) -> None:
    values["fault_kinds"] = "exception"
    first, _ = start("train", values).communicate(timeout=DEADLINE)
    assert first.splitlines()[4] == "caught injected exception: fault 0 at step 5 on rank 1"
    again, _ = start("train", values).communicate(timeout=DEADLINE)
    assert "caught" not in again and steps(again) == list(range(1, 9))
    assert fired(values) == [{"index": 0, "step": 5, "rank": 1, "kind": "exception", "variant": ""}]


def test_other_ranks_are_left_alone(values: dict[str, Any], start: Any) -> None:
    output, _ = start("train", values | {"fault_kinds": "sigkill", "rank": 0}).communicate(timeout=DEADLINE)
    assert steps(output) == list(range(1, 9))
    assert fired(values) == []


def test_sigkill_leaves_the_event_and_the_claim_behind(values: dict[str, Any], start: Any) -> None:
    values["fault_kinds"] = "sigkill"
    process = start("train", values)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == -signal.SIGKILL and steps(output) == [1, 2, 3, 4]
    assert [fault["kind"] for fault in fired(values)] == ["sigkill"]
    output, _ = start("train", values).communicate(timeout=DEADLINE)
    assert steps(output) == list(range(1, 9))


def test_a_hang_is_a_loop_that_python_can_interrupt(values: dict[str, Any], start: Any) -> None:
    process = start("train", values | {"fault_kinds": "hang"})
    eventually(lambda: bool(fired(values)), "the fault fires")
    time.sleep(0.5)
    assert process.poll() is None
    assert psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING
    process.send_signal(signal.SIGINT)  # raises KeyboardInterrupt in the loop
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0 and steps(output) == [1, 2, 3, 4]


def test_every_second_hang_is_a_stopped_process(values: dict[str, Any], start: Any) -> None:
    values |= {"fault_kinds": "hang", "fault_count": 2, "fault_ranks": "0,1"}
    stop = schedule(build(values))[1]
    assert (stop.rank, stop.variant) == (1, "stop")
    process = start("train", values)
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the process is stopped")
    assert [fault["variant"] for fault in fired(values)] == ["stop"]
    assert process.poll() is None


def test_oom_is_refused_under_a_limit_and_leaves_the_process_usable(values: dict[str, Any], start: Any) -> None:
    process = start("train", values | {"fault_kinds": "oom"}, CUDA_VISIBLE_DEVICES="")
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    caught = next(line for line in output.splitlines() if line.startswith("caught"))
    assert caught == "caught injected oom: fault 0 at step 5 on rank 1 limited=False rss=True big=400"
    assert steps(output) == list(range(1, 9))


@pytest.mark.gpu
def test_oom_on_a_gpu_is_the_allocators_and_gives_the_memory_back() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or none that a run without -m gpu sees")
    from trainer.faults import exhaust_memory

    before = torch.cuda.memory_reserved()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        exhaust_memory("test")
    assert torch.cuda.memory_reserved() <= before
    assert torch.zeros(1 << 20, device="cuda").sum().item() == 0.0


def marked(node_pid: int) -> list[psutil.Process]:
    """Living processes that carry the mark of the node, wherever they are in the process tree."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get("HOLDFAST_NODE_PID")
            if mark == str(node_pid) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_lost_node_leaves_no_process_and_no_snapshot(values: dict[str, Any], start: Any) -> None:
    values |= {"fault_kinds": "node", "fault_first_step": 2}
    run = paths(values)
    mine, others = (run.snapshots(Path(values["snapshot_root"]), node) for node in (0, 1))
    for directory in (mine, others):
        (directory / "generation-0").mkdir(parents=True)
        (directory / "generation-0" / "rank-0.bin").write_bytes(b"state")
    worker = {
        "HOLDFAST_RUN": str(run.run), "HOLDFAST_ATTEMPT": "1", "HOLDFAST_NODE": "0", "HOLDFAST_POD": "0", "RANK": "1",
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
    }  # fmt: skip
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | {"HOLDFAST_NODE_PID": "1234567"}
    )
    try:
        node = start("node", values, **worker)
        assert node.wait(timeout=DEADLINE) == -signal.SIGKILL
        assert [fault["kind"] for fault in fired(values)] == ["node"]
        eventually(lambda: not marked(node.pid), "every process of the node is gone")
        time.sleep(0.5)
        assert not marked(node.pid), "a process of the node has escaped"
        assert not mine.exists() and (others / "generation-0" / "rank-0.bin").exists()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_fault_is_claimed_by_one_process_of_many(values: dict[str, Any], start: Any) -> None:
    """Two processes of one rank at once, as when an old attempt lives on: one of them is struck."""
    values["fault_kinds"] = "exception"
    outputs = [process.communicate(timeout=DEADLINE)[0] for process in [start("train", values) for _ in range(6)]]
    assert sum("caught" in output for output in outputs) == 1
    assert all(steps(output) == list(range(1, 9)) for output in outputs)


def test_the_claim_is_made_before_the_fault_strikes(values: dict[str, Any]) -> None:
    made = build(values | {"fault_kinds": "exception"})
    log = events.EventLog(paths(values).events, made.run_id, "trainer")
    injector = Injector(made, paths(values), 1, log)
    with pytest.raises(InjectedFault):
        injector.maybe_fire(5)
    assert [path.name for path in paths(values).faults_fired.iterdir()] == ["0"]
    injector.maybe_fire(5)  # a replay of the step
    log.close()
