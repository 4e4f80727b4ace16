"""What preflight concludes from a cluster's nodes, Jobs and Workflows, as the API gives them. That it finds them is
tested on a real API server (tests/cluster)."""

from __future__ import annotations

from typing import Any

import pytest

from steps import cluster
from workflows.preflight_cluster import check_image_on_nodes, check_run_id

IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/holdfast:0.1.0"


def node(*images: str) -> dict[str, Any]:
    return {"metadata": {"name": "n"}, "status": {"images": [{"names": [f"{image}@sha256:0", image]} for image in images]}}


@pytest.mark.parametrize(
    ("nodes", "status", "detail"),
    [
        ([node("other:1", IMAGE), node(IMAGE)], "pass", "on all 2 nodes"),
        ([node(IMAGE), node("other:1")], "warn", "on 1 of 2 nodes; the others must pull it"),
        ([node(), {"metadata": {"name": "n"}, "status": {}}], "warn", "on 0 of 2 nodes; the others must pull it"),
        ([node(IMAGE + "-rc1")], "warn", "on 0 of 1 nodes; the others must pull it"),
        ([], "warn", "on 0 of 0 nodes"),
    ],
)
def test_an_image_that_is_not_on_every_node_is_a_warning_with_a_way_to_try_it(
    nodes: list[dict[str, Any]], status: str, detail: str
) -> None:
    finding = check_image_on_nodes(nodes, IMAGE)
    assert (finding.status, detail in finding.detail) == (status, True), finding
    if status == "warn":
        assert finding.fix.startswith(f"kubectl run pull --rm -i --restart=Never --image={IMAGE} ")


def workflow(run_id: str, phase: str = "", *, seen: bool = True, ours: bool = True) -> dict[str, Any]:
    """As ``argo submit`` makes it; once Argo has ``seen`` it, it has the run's label."""
    labels = {"app.kubernetes.io/name": cluster.NAME} if ours else {}
    if seen:
        labels[cluster.LABEL_RUN] = run_id
    return {
        "metadata": {"name": "holdfast-training-x", "labels": labels},
        "spec": {"arguments": {"parameters": [{"name": "run-id", "value": run_id}]}},
        "status": {"phase": phase} if phase else {},
    }


def job(*, over: bool) -> dict[str, Any]:
    conditions = [{"type": "Complete", "status": "True"}] if over else []
    return {"metadata": {"name": "holdfast-mine-1"}, "status": {"conditions": conditions}}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (workflow("mine", "Running"), "Workflow holdfast-training-x is Running"),
        (workflow("mine", "Pending"), "Workflow holdfast-training-x is Pending"),
        (workflow("mine", seen=False), "Workflow holdfast-training-x is not begun"),
        (workflow("mine", "Running", ours=False), "Workflow holdfast-training-x is Running"),  # made from the template
    ],
)
def test_a_run_that_downloads_or_waits_for_the_mutex_is_in_use(found: dict[str, Any], says: str) -> None:
    finding = check_run_id("mine", [], [workflow("another", "Running"), found])
    assert (finding.status, finding.detail) == ("warn", f"run 'mine' is in use: {says}")
    assert "another --run-id" in finding.fix


def test_a_workflow_that_is_being_stopped_still_holds_its_run() -> None:
    stopped = workflow("mine", "Running")
    stopped["spec"]["shutdown"] = "Stop"
    assert check_run_id("mine", [], [stopped]).status == "warn"


def test_a_job_that_outlived_its_workflow_holds_the_run() -> None:
    finding = check_run_id("mine", [job(over=True), job(over=False)], [workflow("mine", "Failed")])
    assert (finding.status, "Job holdfast-mine-1" in finding.detail) == ("warn", True)
    assert "attaches" in finding.fix


def test_what_is_over_or_of_others_holds_nothing() -> None:
    others = [
        workflow("mine", "Succeeded"),
        workflow("another", "Running"),
        workflow("mine", "Running", seen=False, ours=False),  # somebody else's, with a parameter of that name
    ]
    finding = check_run_id("mine", [job(over=True)], others)
    assert (finding.status, finding.detail) == ("pass", "'mine' has nothing running")
