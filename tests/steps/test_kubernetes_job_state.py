"""What is concluded from a Job, its pods, their nodes and the Workflow, as the API gives them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps import job_state
from trainer.errors import FINAL_CODES, ExitCode

Manifest = dict[str, Any]
NOW = datetime(2025, 1, 1, 12, 0, 0, tzinfo=UTC).timestamp()


def job(*conditions: str, reason: str = "", message: str = "", deleting: bool = False) -> Manifest:
    metadata: Manifest = {"name": "holdfast-run-3", "labels": {"holdfast/attempt": "3"}}
    if deleting:
        metadata["deletionTimestamp"] = "2025-01-01T12:00:00Z"
    states = [{"type": c, "status": "True", "reason": reason, "message": message} for c in conditions]
    return {"metadata": metadata, "status": {"conditions": states}}


def pod(
    name: str = "p", node: int = 0, phase: str = "Running", code: int | None = None, reason: str = "Error",
    disrupted: bool = False, created: str = "2025-01-01T11:00:00Z", machine: str | None = "m0",
) -> Manifest:  # fmt: skip
    state = {"terminated": {"exitCode": code, "reason": reason}} if code is not None else {"running": {}}
    conditions = (
        [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}] if disrupted else []
    )
    return {
        "metadata": {"name": name, "labels": {job_state.INDEX: str(node)}, "creationTimestamp": created},
        "spec": {"nodeName": machine} if machine else {},
        "status": {"phase": phase, "conditions": conditions, "containerStatuses": [{"name": "train", "state": state}]},
    }


def machine(ready: str, since: str = "2025-01-01T11:59:00Z") -> Manifest:
    return {
        "metadata": {"name": "m0"},
        "status": {"conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": since}]},
    }


def test_a_job_without_conditions_goes_on() -> None:
    assert job_state.ended(job(), [pod()]) is None
    assert job_state.ended({"metadata": {"name": "j"}, "status": {"conditions": None}}, []) is None
    assert job_state.living(job())
    assert job_state.attempt(job()) == 3


@pytest.mark.parametrize("state", ["Complete", "Failed", "FailureTarget"])
def test_a_job_that_is_over_or_failing_or_being_deleted_is_not_attached_to(state: str) -> None:
    assert not job_state.living(job(state))
    assert not job_state.living(job(deleting=True))


def test_complete_is_done() -> None:
    end = job_state.ended(job("SuccessCriteriaMet", "Complete"), [pod(phase="Succeeded", code=0)])
    assert end is not None
    assert end.exit_code == 0


def test_success_that_is_still_being_settled_is_not_an_end_yet() -> None:
    assert job_state.ended(job("SuccessCriteriaMet"), [pod(phase="Succeeded", code=0)]) is None


@given(code=st.sampled_from(sorted(FINAL_CODES)), others=st.lists(st.sampled_from([1, 75, 137, 143]), max_size=4))
def test_a_final_code_of_any_pod_is_the_jobs_code(code: int, others: list[int]) -> None:
    pods = [pod(f"o{i}", phase="Failed", code=other) for i, other in enumerate(others)] + [pod("f", 1, "Failed", code)]
    for condition in ("FailureTarget", "Failed"):
        end = job_state.ended(job(condition, reason="PodFailurePolicy"), pods)
        assert end is not None
        assert end.exit_code == code


def test_the_code_is_known_though_the_pod_that_had_it_is_gone() -> None:
    message = (
        "Container train for pod argo/holdfast-run-3-1-x failed with exit code 64 matching FailJob rule at index 1"
    )
    end = job_state.ended(job("Failed", reason="PodFailurePolicy", message=message), [])
    assert end is not None
    assert end.exit_code == 64


@given(codes=st.lists(st.integers(1, 255).filter(lambda code: code not in FINAL_CODES), min_size=1, max_size=5))
def test_a_spent_budget_is_retried_by_the_layer_above(codes: list[int]) -> None:
    pods = [pod(f"p{i}", phase="Failed", code=code) for i, code in enumerate(codes)]
    end = job_state.ended(job("Failed", reason="BackoffLimitExceeded"), pods)
    assert end is not None
    assert end.exit_code in (ExitCode.STOPPED, ExitCode.UNAVAILABLE)


@pytest.mark.parametrize("reason", ["BackoffLimitExceeded", "DeadlineExceeded"])
def test_a_failed_job_never_counts_as_done(reason: str) -> None:
    end = job_state.ended(job("Failed", reason=reason), [pod(phase="Succeeded", code=0)])
    assert end is not None
    assert end.exit_code == ExitCode.STOPPED


def test_failures_say_who_how_and_whether_it_counted() -> None:
    oom = job_state.failed(pod(node=2, phase="Failed", code=137, reason="OOMKilled"))
    assert oom is not None
    assert str(oom) == "node 2 ended (exit code 137, OOMKilled)"
    assert not oom.disrupted
    drained = job_state.failed(pod(phase="Failed", code=75, disrupted=True))
    assert drained is not None
    assert drained.disrupted
    assert job_state.failed(pod(phase="Succeeded", code=0)) is None
    assert job_state.failed(pod()) is None
    without = pod(phase="Failed")
    without["status"]["containerStatuses"] = []
    lost = job_state.failed(without)
    assert lost is not None
    assert lost.exit_code is None


def test_a_node_is_lost_once_it_was_silent_for_the_limit() -> None:
    assert job_state.lost({"m0": machine("True")}, NOW, 60) == {}
    assert job_state.lost({"m0": machine("Unknown")}, NOW - 1, 60) == {}
    assert job_state.lost({"m0": machine("Unknown")}, NOW, 60) == {"m0": 60.0}
    assert job_state.lost({"m0": machine("False")}, NOW + 5, 60) == {"m0": 65.0}


def test_a_node_that_was_removed_is_not_lost_for_its_pods_are_replaced() -> None:
    assert job_state.lost({"m0": None}, NOW, 60) == {}


def test_only_nodes_under_pods_that_go_on_are_watched() -> None:
    pods = [pod(machine="a"), pod(phase="Failed", code=1, machine="b"), pod(phase="Pending", machine=None)]
    assert job_state.nodes_of(pods) == {"a"}


def test_the_log_is_that_of_the_newest_pod_of_node_0() -> None:
    pods = [
        pod("old", 0, "Failed", 1, created="2025-01-01T11:00:00Z"),
        pod("new", 0, created="2025-01-01T11:30:00Z"),
        pod("waiting", 0, "Pending", created="2025-01-01T11:40:00Z"),
        pod("other", 1, created="2025-01-01T11:50:00Z"),
    ]
    chosen = job_state.current(pods, 0)
    assert chosen is not None
    assert job_state.name(chosen) == "new"
    assert job_state.current(pods, 2) is None


def test_an_image_that_cannot_be_pulled_is_named() -> None:
    waiting = pod(phase="Pending")
    waiting["status"]["containerStatuses"][0]["state"] = {
        "waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}
    }
    assert job_state.cannot_start([pod(), waiting]) == "p: ImagePullBackOff: no such tag"
    waiting["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "ContainerCreating"}}
    assert job_state.cannot_start([pod(), waiting]) == ""


def test_a_pod_without_a_machine_says_why() -> None:
    waiting = pod(phase="Pending", machine=None)
    waiting["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
    ]
    assert "0/2 nodes are available" in job_state.unschedulable([waiting])
    assert job_state.unschedulable([pod()]) == ""


def workflow(**spec: Any) -> Manifest:
    return {"metadata": {}, "spec": spec, "status": {"phase": "Running", "startedAt": "2025-01-01T11:00:00Z"}}


def test_only_a_workflow_that_ends_takes_its_job_with_it() -> None:
    assert job_state.ending(workflow(), NOW) == ""
    assert "Stop" in job_state.ending(workflow(shutdown="Stop"), NOW)
    assert "Terminate" in job_state.ending(workflow(shutdown="Terminate"), NOW)
    assert job_state.ending(workflow(activeDeadlineSeconds=7200), NOW) == ""
    assert "deadline" in job_state.ending(workflow(activeDeadlineSeconds=3600), NOW)
    assert job_state.ending(None, NOW) != ""
    assert job_state.ending(workflow() | {"metadata": {"deletionTimestamp": "x"}}, NOW) != ""
    assert job_state.ending(workflow() | {"status": {"phase": "Failed"}}, NOW) != ""
    assert job_state.ending({"metadata": {}, "spec": {}}, NOW) == "", "no status yet"
