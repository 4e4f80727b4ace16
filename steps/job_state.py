"""What a Job, its pods and their nodes say, read from the API's dictionaries. Pure: no cluster is asked here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from steps.cluster import CONTAINER, LABEL_ATTEMPT, LABEL_RUN, NAME
from trainer.errors import FINAL_CODES, ExitCode, normalise

Manifest = dict[str, Any]

INDEX = "batch.kubernetes.io/job-completion-index"
JOB = "batch.kubernetes.io/job-name"
CANNOT_START = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
     "CreateContainerError", "RunContainerError"}
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a Job ended, in the contract's terms."""

    exit_code: int
    message: str


@dataclass(frozen=True)
class Failure:
    """A pod that failed."""

    pod: str
    node: int
    """Index of the training node, -1 if unknown."""
    exit_code: int | None
    """None: the pod ended without its container saying so (an eviction, a lost node)."""
    reason: str
    disrupted: bool
    """Drained, preempted or evicted: it costs no restart."""

    def __str__(self) -> str:
        code = "no exit code" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"node {self.node} ended ({code}{f', {self.reason}' if self.reason else ''})"


def name(item: Manifest) -> str:
    return str(item["metadata"]["name"])


def attempt(item: Manifest) -> int:
    """The attempt that a Job or a pod belongs to, 0 if its label is gone."""
    value = item["metadata"].get("labels", {}).get(LABEL_ATTEMPT, "0")
    return int(value) if value.isdigit() else 0


def index(pod: Manifest) -> int:
    value = pod["metadata"].get("annotations", {}).get(INDEX) or pod["metadata"].get("labels", {}).get(INDEX, "")
    return int(value) if value.isdigit() else -1


def condition(item: Manifest, kind: str) -> Manifest | None:
    """The condition of that type, whatever its status."""
    found = (c for c in item.get("status", {}).get("conditions") or [] if c["type"] == kind)
    return next(found, None)


def holds(item: Manifest, kind: str) -> bool:
    found = condition(item, kind)
    return found is not None and found["status"] == "True"


def deleting(item: Manifest) -> bool:
    return bool(item["metadata"].get("deletionTimestamp"))


def living(job: Manifest) -> bool:
    """Whether a supervisor can attach: not over, not failing, not being deleted."""
    return not deleting(job) and not any(holds(job, kind) for kind in ("Complete", "Failed", "FailureTarget"))


def over(pod: Manifest) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def ended(job: Manifest, pods: Iterable[Manifest]) -> Ended | None:
    """None while the Job goes on. A Job that is only about to be Failed (FailureTarget: its pods are still stopping)
    has ended too: its code is known, and one of those pods may be on a node that never answers again.
    """
    if holds(job, "Complete"):
        return Ended(int(ExitCode.DONE), "all nodes finished")
    for kind in ("Failed", "FailureTarget"):
        found = condition(job, kind)
        if found is not None and found["status"] == "True":
            return _failed(found, list(pods))
    return None


def _failed(found: Manifest, pods: list[Manifest]) -> Ended:
    reason, message = found.get("reason", ""), found.get("message", "")
    failures = [failure for pod in pods if (failure := failed(pod))]
    codes = [failure.exit_code for failure in failures if failure.exit_code is not None]
    for code in codes:
        if code in FINAL_CODES:
            return Ended(code, next(str(failure) for failure in failures if failure.exit_code == code))
    if reason == "PodFailurePolicy" and (match := re.search(r"exit code (\d+)", message)):
        return Ended(normalise(int(match[1])), message)  # the pod that said so is gone already
    if reason == "DeadlineExceeded":
        return Ended(int(ExitCode.STOPPED), "the Job reached its deadline (--deadline-seconds)")
    code = normalise(codes[-1]) if codes else int(ExitCode.STOPPED)
    return Ended(code if code else int(ExitCode.STOPPED), f"the Job failed: {reason}: {message}")


def failed(pod: Manifest) -> Failure | None:
    """The failure of a pod that is over; None for one that is not, or that succeeded."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return None
    disruption = condition(pod, "DisruptionTarget")
    disrupted = disruption is not None and disruption["status"] == "True"
    for container in status.get("containerStatuses") or []:
        ending = container.get("state", {}).get("terminated")
        if container["name"] == CONTAINER and ending:
            reason = "" if ending.get("reason") == "Error" else ending.get("reason", "")
            if disrupted and disruption is not None:
                reason = disruption.get("reason", "disruption")
            return Failure(name(pod), index(pod), ending["exitCode"], reason, disrupted)
    return Failure(name(pod), index(pod), None, status.get("reason", ""), disrupted)


def cannot_start(pods: Iterable[Manifest]) -> str:
    """Why a container cannot start for a reason that waiting rarely mends (the image, a secret), or nothing."""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses") or []:
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in CANNOT_START:
                return f"{name(pod)}: {waiting['reason']}: {waiting.get('message', '')}".strip(": ")
    return ""


def unschedulable(pods: Iterable[Manifest]) -> str:
    """Why pods find no node, or nothing. Capacity may come: this is said, not acted upon."""
    for pod in pods:
        found = condition(pod, "PodScheduled")
        if found is not None and found["status"] == "False" and not over(pod):
            return f"{name(pod)} waits for a node: {found.get('message', found.get('reason', ''))}"
    return ""


def nodes_of(pods: Iterable[Manifest]) -> set[str]:
    """Names of the nodes that pods which are not over were given to."""
    return {pod["spec"]["nodeName"] for pod in pods if not over(pod) and pod["spec"].get("nodeName")}


def seconds_not_ready(node: Manifest, now: float) -> float:
    """How long a node has not been Ready, 0 if it is. ``now`` is the wall clock, seconds since the epoch."""
    found = condition(node, "Ready")
    if found is None or found["status"] == "True":
        return 0.0
    since = datetime.fromisoformat(found["lastTransitionTime"].replace("Z", "+00:00")).timestamp()
    return max(0.001, now - since)


def lost(nodes: Mapping[str, Manifest | None], now: float, limit_seconds: float) -> dict[str, float]:
    """Nodes that have not been Ready for as long as that, with the seconds. A node that was deleted is not lost: its
    pods are collected and replaced."""
    silent = {node: seconds_not_ready(item, now) for node, item in nodes.items() if item is not None}
    return {node: seconds for node, seconds in silent.items() if seconds >= limit_seconds}


def current(pods: Iterable[Manifest], node: int) -> Manifest | None:
    """The newest pod of a training node that has been given to a machine."""
    found = [pod for pod in pods if index(pod) == node and pod.get("status", {}).get("phase") != "Pending"]
    return max(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def run_of(workflow: Manifest) -> str:
    """The run id of a Workflow of this project, nothing for another. It is a label from the moment that Argo first looks
    at the Workflow, before it waits for the mutex; until then the argument says it."""
    labels = workflow["metadata"].get("labels") or {}
    if LABEL_RUN in labels or labels.get("app.kubernetes.io/name") != NAME:
        return str(labels.get(LABEL_RUN, ""))
    parameters = workflow["spec"].get("arguments", {}).get("parameters", [])
    return next((str(p.get("value", "")) for p in parameters if p["name"] == "run-id"), "")


def phase(workflow: Manifest) -> str:
    """Pending (it waits for the mutex), Running or an end; nothing until Argo has looked at it."""
    return str((workflow.get("status") or {}).get("phase") or "")


def finished(workflow: Manifest) -> bool:
    """Whether a Workflow is over, its exit handler included."""
    return phase(workflow) in ("Succeeded", "Failed", "Error")


def ending(workflow: Manifest | None, now: float) -> str:
    """Why the Workflow will not go on (it is being stopped, is past its deadline, deleted, or over), or nothing."""
    if workflow is None:
        return "the Workflow is gone"
    if deleting(workflow):
        return "the Workflow is being deleted"
    if shutdown := workflow.get("spec", {}).get("shutdown"):
        return f"the Workflow is being stopped ({shutdown})"
    if finished(workflow):
        return f"the Workflow is over ({phase(workflow)})"
    deadline, started = workflow.get("spec", {}).get("activeDeadlineSeconds"), (workflow.get("status") or {}).get("startedAt")
    if deadline and started:
        begun = datetime.fromisoformat(started.replace("Z", "+00:00")).timestamp()
        if now >= begun + float(deadline) - 1:
            return f"the Workflow is past its deadline of {deadline} s"
    return ""
