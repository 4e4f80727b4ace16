"""The promise, on whole runs: through real faults to the same weights, with a report that adds up."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from pipeline_support import local, report, started, using, wait_for_commit, weights

from trainer.paths import RunPaths

TINY = (
    "--model=tiny", "--gpus-per-node=2", "--max-steps=60", "--checkpoint-interval-steps=10",
    "--snapshot-interval-steps=1", "--heartbeat-timeout-seconds=5",
)  # fmt: skip
FAULTS = ("--recovery=combined", "--fault-count=5", "--fault-kinds=exception,hang,sigkill")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsx")


@pytest.fixture(scope="module")
def faulted(root: Path) -> str:
    """The run of ``make demo`` in short: five faults of three kinds, both kinds of hang among them."""
    done = local(root, "faulted", *TINY, *FAULTS)
    assert done.code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def clean(root: Path) -> str:
    done = local(root, "clean", *TINY, "--recovery=none")
    assert done.code == 0, done.output
    return done.output


def test_a_faulted_run_ends_with_the_weights_of_a_clean_one(root: Path, faulted: str, clean: str) -> None:
    assert weights(root, "faulted") == weights(root, "clean")
    assert weights(root, "clean")[0] == 60


def test_every_fault_is_recovered_and_nothing_committed_is_lost(root: Path, faulted: str) -> None:
    found = report(root, "faulted")
    injected = [fault for fault in found.faults if fault.injected]
    assert [fault.kind for fault in injected] == ["exception", "hang", "sigkill", "exception", "hang"]
    assert all(fault.recovered_by in ("in_process", "in_job", "pod") for fault in injected)
    assert found.complete
    assert found.steps_completed == 60
    assert found.committed_steps_lost == 0
    assert (found.data_continuity.repeated, found.data_continuity.skipped) == (0, 0)
    assert found.validation.valid >= 1
    assert found.validation.invalid == 0


@pytest.mark.parametrize("run_id", ["faulted", "clean"])
def test_the_intervals_sum_to_the_wall_time(root: Path, faulted: str, clean: str, run_id: str) -> None:
    found = report(root, run_id)
    parts = found.breakdown_seconds.model_dump()
    assert sum(parts.values()) == pytest.approx(found.wall_seconds, rel=0.01)
    assert parts["other"] <= 0.02 * found.wall_seconds


def test_a_complete_run_is_not_trained_again(root: Path, clean: str) -> None:
    before = RunPaths(root, "clean").report("json").stat().st_mtime_ns
    done = local(root, "clean", *TINY, "--recovery=none")
    assert done.code == 0
    assert "complete" in done.output
    assert RunPaths(root, "clean").report("json").stat().st_mtime_ns == before


def test_another_configuration_under_the_same_id_is_refused(root: Path, clean: str) -> None:
    done = local(root, "clean", *TINY, "--recovery=none", "--seed=7")
    assert done.code == 64
    assert "--seed" in done.output


def test_an_interrupted_run_stops_whole_and_goes_on_to_the_same_weights(root: Path, clean: str) -> None:
    """Ctrl-C in the middle: every process ends; the same command resumes, and repeats nothing that was committed."""
    process = started(root, "interrupted", *TINY, "--recovery=in-job")
    wait_for_commit(root, "interrupted", 20)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    deadline = time.monotonic() + 5
    while left := using(root):
        assert time.monotonic() < deadline, f"processes of the run are left: {left}"
        time.sleep(0.1)
    done = local(root, "interrupted", *TINY, "--recovery=in-job")
    assert done.code == 0, done.output
    assert weights(root, "interrupted") == weights(root, "clean")
    assert report(root, "interrupted").committed_steps_lost == 0


def test_two_at_once_under_one_id_are_refused(root: Path) -> None:
    process = started(root, "twice", *TINY, "--recovery=none", "--max-steps=2000")
    try:
        wait_for_commit(root, "twice", 10)
        done = local(root, "twice", *TINY, "--recovery=none", "--max-steps=2000")
        assert done.code == 64
        assert "being worked on by another process" in done.output
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_the_workflow_leaves_its_status_as_argo_would(root: Path, faulted: str) -> None:
    found = sorted((root / "workflows").glob("faulted-*/workflow.json"))
    assert len(found) == 1
    status = json.loads(found[0].read_text())["status"]
    assert status["phase"] == "Succeeded"
    pods = {node["templateName"]: node["phase"] for node in status["nodes"].values() if node["type"] == "Pod"}
    assert pods == dict.fromkeys(("check", "download", "train", "validate", "report", "release"), "Succeeded")
