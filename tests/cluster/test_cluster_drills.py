"""Real events in the middle of a run of the committed pipeline. Each states how long it may take, submission to end."""

from __future__ import annotations

import secrets
import time
from typing import Any

import pytest
from cluster_support import OVER, SMALL, Cluster, command, until, whole

from steps import job_state

STEPS = 100
WAIT = 540

HOG = """
import os, pathlib, signal, time
marked = []
for process in pathlib.Path('/proc').glob('[0-9]*'):
    if process.name not in ('1', str(os.getpid())):
        try:
            (process / 'oom_score_adj').write_text('1000')
            marked.append(process)
        except OSError:
            pass
eaters = []
while all(process.exists() for process in marked) and len(eaters) < 40:
    eaters.append(os.fork())
    if eaters[-1] == 0:
        eaten = bytearray(os.urandom(1 << 20) * 100)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.5)
for eater in eaters:
    os.kill(eater, signal.SIGKILL)
"""
"""Fills a pod's memory with processes that the kernel likes better than those of the run, until it has killed one."""


def training(cluster: Cluster, name: str, **changes: object) -> tuple[str, str, float]:
    """A run that has committed something and has still a way to go."""
    started = time.monotonic()
    workflow, run_id = cluster.submit(name, **({"max_steps": STEPS} | changes))
    cluster.reaches(run_id, 12)
    return workflow, run_id, started


def succeeded(cluster: Cluster, workflow: str, run_id: str, seconds: float = WAIT, steps: int = STEPS) -> Any:
    assert cluster.finish(workflow, seconds) == "Succeeded"
    report = cluster.report(run_id)
    whole(report, steps)
    cluster.nothing_left(run_id)
    return report


def delete_pod(cluster: Cluster, pod: dict[str, Any], *options: str) -> None:
    command("kubectl", "delete", "pod", "-n", cluster.namespace, job_state.name(pod), "--wait=false", *options)


def differs(pod: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(pod["metadata"]["uid"] != other["metadata"]["uid"])


def uid(cluster: Cluster, run_id: str) -> str:
    (job,) = cluster.jobs(run_id)
    return str(job["metadata"]["uid"])


# --- pods ---


def test_a_training_pod_is_deleted(cluster: Cluster) -> None:
    workflow, run_id, started = training(cluster, "poddel")
    job = uid(cluster, run_id)
    delete_pod(cluster, cluster.running(run_id, 1))
    cluster.reaches(run_id, cluster.step(run_id) + 20)
    assert uid(cluster, run_id) == job, "the Job replaced its pod; nobody replaced the Job"
    report = succeeded(cluster, workflow, run_id)
    assert len(cluster.nodes(workflow, "train")) == 1
    cluster.passed(
        "training pod deleted", "saved within its grace, replaced by the Job", time.monotonic() - started, WAIT, report
    )


@pytest.mark.parametrize("force", [False, True], ids=["gracefully", "force"])
def test_the_supervisor_is_deleted_and_the_job_goes_on(cluster: Cluster, force: bool) -> None:
    workflow, run_id, started = training(cluster, "supdel")
    job = uid(cluster, run_id)
    pods = {job_state.name(pod) for pod in cluster.pods(run_id)}
    first = cluster.supervisor(run_id, workflow)
    delete_pod(cluster, first, *(("--force", "--grace-period=0") if force else ()))
    # (Argo retries a step whose pod ended, and makes a pod that was gone before it looked anew, under the same name.)
    until("another supervisor", 120, lambda: differs(cluster.supervisor(run_id, workflow), first))
    report = succeeded(cluster, workflow, run_id)
    assert report.restarts.workflow == 0, "attached, not started again"
    assert report.faults == ()
    text = f"Job {job[:8]} and its {len(pods)} pods went on; the next supervisor attached"
    name = f"supervisor deleted{' by force' if force else ''}"
    cluster.passed(name, text, time.monotonic() - started, WAIT, report)
    log = "".join(
        command("kubectl", "logs", "-n", cluster.namespace, n["id"], check=False)
        for n in cluster.nodes(workflow, "train")
    )
    assert "attached to" in log or not log


@pytest.mark.parametrize("how", ["stop", "terminate"])
def test_a_stopped_workflow_leaves_no_job(cluster: Cluster, how: str) -> None:
    workflow, run_id, _ = training(cluster, how, max_steps=2000)
    started = time.monotonic()
    cluster.argo(how, workflow)
    cluster.nothing_left(run_id, 90)
    seconds = time.monotonic() - started
    until(f"the end of {workflow}", 90, lambda: cluster.phase(workflow) in OVER)
    saved = cluster.read(f"import os; print(sorted(os.listdir('/fsx/runs/{run_id}/checkpoints'))[-1])")
    cluster.passed(f"argo {how}", f"Job, pods and Service gone; newest checkpoint {saved}", seconds, 90)


def test_a_pod_over_its_memory_limit_is_killed_by_the_kernel(cluster: Cluster) -> None:
    workflow, run_id, started = training(cluster, "oomkill", node_memory_gib=2)
    pod = job_state.name(cluster.running(run_id, 1))
    command("kubectl", "exec", "-n", cluster.namespace, pod, "--", "python", "-c", HOG, seconds=90, check=False)
    report = succeeded(cluster, workflow, run_id)
    happened = (
        ", ".join(sorted({f"{f.kind} recovered by {f.recovered_by}" for f in report.faults})) or "no rank was hit"
    )
    cluster.passed("memory limit reached", happened, time.monotonic() - started, WAIT, report)
    assert report.faults, "the kernel killed a rank, and the report says so"


def test_a_job_that_ends_with_75_is_followed_by_the_next_attempt(cluster: Cluster) -> None:
    """A pod is told to stop, and the Job may not replace it: Argo's retry starts the next attempt from the checkpoint."""
    workflow, run_id, started = training(cluster, "exit75", max_restarts=0)
    pod = job_state.name(cluster.running(run_id, 1))
    program = "import os, signal; os.kill(1, signal.SIGTERM)"
    command("kubectl", "exec", "-n", cluster.namespace, pod, "--", "python", "-c", program)
    report = succeeded(cluster, workflow, run_id)
    assert report.restarts.workflow == 1
    codes = [node["outputs"]["exitCode"] for node in cluster.nodes(workflow, "train")]
    assert codes == ["75", "0"]
    happened = f"train ended with {' and '.join(codes)}; went on from the checkpoint of the stop"
    cluster.passed("a pod exits 75", happened, time.monotonic() - started, WAIT, report)
    assert report.lost_steps == 0


# --- retry, resubmit ---


def test_a_failed_workflow_is_retried_once_its_cause_is_gone(cluster: Cluster) -> None:
    """``argo retry`` after a failure that no retry of its own could change."""
    started = time.monotonic()
    folder = f"/fsx/.late-{secrets.token_hex(2)}"
    workflow, run_id = cluster.submit("late", dataset_uri=f"file://{folder}", max_steps=20)
    assert cluster.finish(workflow, 180) == "Failed"
    (failed,) = cluster.nodes(workflow, "download")
    assert failed["outputs"]["exitCode"] == "64"
    cluster.read(
        "import pathlib, pydoc_data.topics as text; "
        f"path = pathlib.Path('{folder}'); path.mkdir(); (path / 'a.txt').write_text(' '.join(text.topics.values()))"
    )
    cluster.argo("retry", workflow)
    until(f"{workflow} goes on", 60, lambda: cluster.phase(workflow) not in OVER)
    report = succeeded(cluster, workflow, run_id, steps=20)
    cluster.passed(
        "argo retry after a failure", "download ended with 64, its files came, all steps were done", time.monotonic() - started, 480, report
    )



def test_retry_and_resubmit_go_on_from_the_checkpoint(cluster: Cluster) -> None:
    """``argo stop``, then ``argo retry``, stop again, then ``argo resubmit``: one run, nothing committed lost."""
    workflow, run_id, started = training(cluster, "again")
    cluster.argo("stop", workflow)
    assert cluster.finish(workflow, 120) == "Failed"
    cluster.nothing_left(run_id)
    before = cluster.step(run_id)
    cluster.argo("retry", workflow)
    cluster.reaches(run_id, before + 10)
    cluster.argo("stop", workflow)
    assert cluster.finish(workflow, 120) == "Failed"
    cluster.nothing_left(run_id)
    resubmitted = cluster.argo("resubmit", workflow, "-o", "name").split()[-1]
    cluster.workflows[resubmitted] = run_id
    report = succeeded(cluster, resubmitted, run_id)
    cluster.passed(
        "argo stop, retry, stop, resubmit",
        "each went on from the newest checkpoint",
        time.monotonic() - started,
        600,
        report,
    )


# --- what needs control over the machines ---


def test_the_workflow_controller_is_killed_and_started(cluster: Cluster) -> None:
    workflow, run_id, started = training(cluster, "controller")
    job = uid(cluster, run_id)
    cluster.kit("kill", "workflow-controller")
    try:
        time.sleep(15)
        cluster.reaches(run_id, cluster.step(run_id) + 1)
    finally:
        cluster.kit("start", "workflow-controller")
    assert uid(cluster, run_id) == job
    report = succeeded(cluster, workflow, run_id)
    assert report.restarts.workflow == 0
    cluster.passed("controller killed, back after 15 s", "training did not notice", time.monotonic() - started, WAIT, report)


def test_a_node_is_lost_and_comes_back(cluster: Cluster) -> None:
    """The kubelet under training pod 1 (and not under the supervisor, if that can be) is frozen for longer than the limit."""
    workflow, run_id, started = training(cluster, "nodelost", max_steps=600)
    supervisor = cluster.supervisor(run_id, workflow)["spec"]["nodeName"]
    pods = [cluster.running(run_id, node) for node in (0, 1)]
    machine = next((p["spec"]["nodeName"] for p in pods if p["spec"]["nodeName"] != supervisor), "")
    if not machine:
        pytest.skip("all pods are on the supervisor's machine")
    cluster.place_reader(supervisor)  # on the frozen machine nothing can be run
    first = job_state.name(cluster.jobs(run_id)[0])
    with cluster.frozen(machine):
        until("a second attempt", 150, lambda: [j for j in cluster.jobs(run_id) if job_state.name(j) != first])
        found = time.monotonic() - started
        cluster.reaches(run_id, cluster.step(run_id) + 10, 240)
    report = succeeded(cluster, workflow, run_id, 600, steps=600)
    assert report.restarts.workflow >= 1
    text = f"kubelet of {machine} frozen; next attempt {found:.0f} s after submission; the old one fenced"
    cluster.passed("node lost and back", text, time.monotonic() - started, 700, report)


def test_the_supervisors_node_is_lost(cluster: Cluster) -> None:
    """The machine under the supervisor does not answer: training goes on or starts again, and the workflow ends well."""
    workflow, run_id, started = training(cluster, "suplost", max_steps=600)
    machine = cluster.supervisor(run_id, workflow)["spec"]["nodeName"]
    with cluster.frozen(machine):
        time.sleep(75)
    report = succeeded(cluster, workflow, run_id, 600, steps=600)
    cluster.passed(
        "supervisor's node lost for 75 s",
        f"{report.restarts.workflow} new attempt(s)",
        time.monotonic() - started,
        700,
        report,
    )


def test_a_pod_is_cut_off_the_network_and_comes_back(cluster: Cluster) -> None:
    workflow, run_id, started = training(cluster, "cut", max_steps=150)
    pod = job_state.name(cluster.running(run_id, 1))
    cluster.kit("cut", pod)
    heartbeat = float(str(SMALL["heartbeat-timeout-seconds"]))
    try:
        time.sleep(2 * heartbeat)
    finally:
        cluster.kit("mend", pod)
    report = succeeded(cluster, workflow, run_id, 600, steps=150)
    assert report.faults, "longer than the heartbeat, and nobody noticed"
    happened = f"off for {2 * heartbeat:g} s, heartbeat {heartbeat:g} s; {len(report.faults)} fault(s), {sum(report.restarts.model_dump().values())} restart(s)"
    cluster.passed("pod cut off the network", happened, time.monotonic() - started, 660, report)
