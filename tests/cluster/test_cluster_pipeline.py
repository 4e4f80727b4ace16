"""The committed pipeline on a real controller: from submission to the report, through faults."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from cluster_support import PIPELINE, Cluster, command, until, whole

from steps import job_state

MINUTES = 60


def test_the_committed_pipeline_through_three_faults(cluster: Cluster) -> None:
    """Two pods on two machines, three kinds of fault, and a report that says so; under 10 minutes."""
    started = time.monotonic()
    workflow, run_id = cluster.submit(
        "faults", max_steps=60, fault_count=3, fault_kinds="exception,hang,sigkill", fault_ranks="all", recovery="combined",
        heartbeat_timeout_seconds=15,
    )  # fmt: skip
    machines = {cluster.running(run_id, node)["spec"]["nodeName"] for node in (0, 1)}
    assert len(machines) == 2, "the two pods are to be on two machines"
    words = ("kubectl", "logs", "-n", cluster.namespace, job_state.name(cluster.running(run_id, 1)))
    until("the node says that it was checked", 60, lambda: "pass  shared memory" in command(*words))
    assert cluster.finish(workflow, 9 * MINUTES) == "Succeeded"
    seconds = time.monotonic() - started
    report = cluster.report(run_id)
    whole(report, 60)
    assert len(report.faults) == 3
    assert {fault.kind for fault in report.faults} == {"exception", "hang", "sigkill"}
    assert all(fault.recovered_by != "none" for fault in report.faults)
    outputs = cluster.nodes(workflow, "report")[0]["outputs"]["parameters"]
    values = {output["name"]: output["value"] for output in outputs}
    assert float(values["goodput"]) == pytest.approx(report.training_goodput, abs=0.01)
    assert values["faults"] == "3"
    if (text := cluster.metrics()) is not None:
        labels = f'{{model="tiny",run_id="{run_id}"}}'
        assert f"argo_workflows_holdfast_faults{labels} 3" in text
        assert f"argo_workflows_holdfast_goodput{labels} " in text
    progress = cluster.nodes(workflow, "train")[0].get("progress", "")
    cluster.nothing_left(run_id)
    cluster.passed(
        "the pipeline, three faults", f"exception, hang, SIGKILL; {len(machines)} machine(s); progress {progress}",
        seconds, 10 * MINUTES, report,
    )  # fmt: skip
    assert seconds < 10 * MINUTES, "whatever the patience"


def test_two_submissions_of_one_run_id_at_once(cluster: Cluster) -> None:
    """The second waits for the first, then finds the run complete and trains nothing."""
    started = time.monotonic()
    first, run_id = cluster.submit("twice", max_steps=40)
    second, _ = cluster.submit("twice", run_id=run_id, max_steps=40)
    cluster.running(run_id, 0)
    assert cluster.phase(second) in ("", "Pending"), "it waits for the mutex"
    assert len(cluster.jobs(run_id)) == 1
    assert cluster.finish(first, 6 * MINUTES) == "Succeeded"
    assert cluster.finish(second, 3 * MINUTES) == "Succeeded"
    report = cluster.report(run_id)
    whole(report, 40)
    assert report.restarts.workflow == 0, "the second found nothing to do"
    cluster.nothing_left(run_id)
    cluster.passed(
        "two submissions of one run id",
        "the second waited, then had nothing to do",
        time.monotonic() - started,
        420,
        report,
    )


def test_a_wrong_configuration_asks_for_no_gpu_and_is_not_retried(cluster: Cluster) -> None:
    """64 from the supervisor: refused before a Job was made."""
    started = time.monotonic()
    workflow, run_id = cluster.submit("wrong", profile="p5")
    assert cluster.finish(workflow, 3 * MINUTES) == "Failed"
    attempts = cluster.nodes(workflow, "check")
    assert [node["outputs"]["exitCode"] for node in attempts] == ["64"]
    assert cluster.nodes(workflow, "download") == [] and cluster.jobs(run_id) == []
    log = cluster.argo("logs", workflow)
    assert "--gpus-per-node: 1 does not match profile p5" in log
    cluster.passed("wrong configuration", "refused with 64 before the download, one attempt, no Job", time.monotonic() - started, 180)


def test_a_missing_claim_is_named_and_nothing_waits_for_it(cluster: Cluster, tmp_path: Path) -> None:
    """A pod that mounts it would wait for ever, in silence."""
    started = time.monotonic()
    document = yaml.safe_load(PIPELINE.read_text())
    document["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = "nothing-here"
    (check,) = (one for one in document["spec"]["templates"] if one["name"] == "check")
    check["container"]["args"].append("--claim=nothing-here")
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document))
    workflow, _ = cluster.submit("noclaim", pipeline=path)
    until("its check has failed", 120, lambda: [n for n in cluster.nodes(workflow, "check") if n["phase"] == "Failed"])
    assert [node["outputs"]["exitCode"] for node in cluster.nodes(workflow, "check")] == ["64"]
    assert cluster.nodes(workflow, "download") == []
    assert "there is no claim 'nothing-here'" in cluster.argo("logs", workflow)
    cluster.passed("a missing claim", "named with 64 before anything mounts it", time.monotonic() - started, 120)


def test_a_training_pod_that_exits_64_ends_the_job_and_is_not_retried(cluster: Cluster) -> None:
    started = time.monotonic()
    empty = "/fsx/.empty-weights"
    cluster.read(f"import os; os.makedirs('{empty}', exist_ok=True)")
    workflow, run_id = cluster.submit("exit64", init_from=empty)
    assert cluster.finish(workflow, 4 * MINUTES) == "Failed"
    assert [node["outputs"]["exitCode"] for node in cluster.nodes(workflow, "train")] == ["64"]
    assert "--init-from" in cluster.argo("logs", workflow)
    cluster.nothing_left(run_id)
    cluster.passed("a pod exits 64", "Job failed at once, one attempt, nothing left", time.monotonic() - started, 240)


def test_a_model_larger_than_the_machines_is_seen_to_wait(cluster: Cluster) -> None:
    """A pod that no node can take: the supervisor says so, and stopping leaves nothing."""
    workflow, run_id = cluster.submit("pending", node_memory_gib=100_000)

    def said() -> bool:
        return "waits for a node" in cluster.argo("logs", workflow, "--no-color")

    until("the scheduler's reason in the supervisor's log", 120, said, 2)
    assert all(job_state.name(pod) and pod["status"]["phase"] == "Pending" for pod in cluster.pods(run_id))
    cluster.argo("stop", workflow)
    cluster.finish(workflow, 120)
    cluster.nothing_left(run_id)
