"""The launcher that runs the nodes of a training run as an Indexed Job with a headless Service.

1. ``attach``: a Job of this run that still goes on is adopted, and told who its owner is now; of one that came to its end
   meanwhile that is all there is to say. (A supervisor may end, be evicted or be killed as often as it likes: the training does not notice.)
2. ``start``: what an earlier attempt left is ended first, its pods awaited, except those on nodes that do not answer;
   then the Service and the Job of this attempt are made.
3. ``wait``: follows the Job and the log of node 0, watches the nodes, and ends with a code of the contract. A node that
   has been silent for too long ends the wait with ``NodeLost``: its pod cannot be replaced within the same Job, since
   nobody can say that it has stopped.
4. On SIGTERM the Job is ended only if the Workflow is. Otherwise the supervisor alone goes (75), and the next attaches.
5. ``release``: deletes everything of the run, and waits a bounded time until it is gone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from steps import cluster, job_state
from steps.cluster import Manifest, Placement
from steps.kubernetes_api import ApiServer, lacking
from steps.launcher import Launch, NodeLost
from steps.pod_log import PodLog
from trainer import environment
from trainer.config import RunConfig
from trainer.errors import ConfigurationError, DeniedError, ExitCode, UnavailableError
from trainer.paths import RunPaths
from trainer.progress import newest_attempt

IMAGE_VARIABLE = "HOLDFAST_IMAGE"
WORKFLOW_VARIABLE = "HOLDFAST_WORKFLOW"
QUEUE_VARIABLE = "HOLDFAST_QUEUE"
POLL_SECONDS = 1.0
NODES_EVERY_SECONDS = 5.0
CANNOT_START_SECONDS = 300.0
"""How long an image that cannot be pulled is waited for: a registry may be down for a while."""
PODS_GONE_SECONDS = 60.0
"""How long, beyond the grace period, the pods of an ended Job may take to go."""
STOPPING_PATIENCE_SECONDS = 15.0
"""How long the API server is asked again once the supervisor itself was told to stop."""

NEEDED: tuple[tuple[str, str, str, str], ...] = (
    *((verb, "batch", "jobs", "") for verb in ("create", "get", "list", "patch", "delete")),
    *((verb, "", "services", "") for verb in ("create", "list", "patch", "delete")),
    ("list", "", "pods", ""),
    ("get", "", "pods", "log"),
    ("get", "", "persistentvolumeclaims", ""),
    ("get", "", "serviceaccounts", ""),
    ("get", "argoproj.io", "workflows", ""),
    ("get", "", "nodes", ""),
)
"""What the supervisor does with the API: verb, group, resource, subresource."""


@dataclass(frozen=True)
class KubernetesOptions:
    """What the supervisor is told about the cluster; each field is a flag."""

    image: str = ""
    namespace: str = ""
    claim: str = cluster.CLAIM
    service_account: str = cluster.SERVICE_ACCOUNT_TRAINING
    workflow: str = ""
    queue: str = ""
    deadline_seconds: int = 7 * 24 * 3600
    node_cpus: str = ""
    node_memory_gib: int = 0
    node_shm_gib: int = 0

    @property
    def placement(self) -> Placement:
        return Placement(
            image=self.image,
            claim=self.claim,
            service_account=self.service_account,
            queue=self.queue,
            deadline_seconds=self.deadline_seconds,
            cpus=self.node_cpus,
            memory_gib=self.node_memory_gib,
            shm_gib=self.node_shm_gib,
        )


HELP = {
    "image": f"image of the training pods [${IMAGE_VARIABLE}]",
    "namespace": "namespace of the Workflow and the Job [the pod's own]",
    "claim": "claim of the shared file system, mounted at --root",
    "service_account": "service account of the training pods; it needs no rights",
    "workflow": f"name of the Workflow that this runs in: the owner of the Job [${WORKFLOW_VARIABLE}]",
    "queue": f"Kueue's local queue that admits the Job, all pods or none [${QUEUE_VARIABLE}]",
    "deadline_seconds": "seconds after which an attempt's Job ends by itself",
    "node_cpus": "CPUs that a training pod asks for [the profile's]",
    "node_memory_gib": "memory limit of a training pod, /dev/shm included, GiB [the profile's]",
    "node_shm_gib": "size of a training pod's /dev/shm, GiB [the profile's]",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``KubernetesOptions``; one that is not given keeps its default."""
    group = parser.add_argument_group("kubernetes launcher")
    for option in fields(KubernetesOptions):
        kind = int if isinstance(option.default, int) else str
        group.add_argument(
            "--" + option.name.replace("_", "-"), type=kind, default=argparse.SUPPRESS, help=HELP[option.name]
        )


def options(namespace: argparse.Namespace) -> KubernetesOptions:
    """The options of a parsed command line; a Workflow's template sets some through the environment instead."""
    given = {
        option.name: getattr(namespace, option.name) for option in fields(KubernetesOptions) if option.name in namespace
    }
    variables = {"image": IMAGE_VARIABLE, "workflow": WORKFLOW_VARIABLE, "queue": QUEUE_VARIABLE}
    for name, variable in variables.items():
        given.setdefault(name, environment.variable(variable))
    return KubernetesOptions(**given)


def say(message: str) -> None:
    print(f"train: {message}", flush=True)


class KubernetesLauncher:
    """A ``steps.launcher.Launcher`` on the cluster that the kubeconfig or the pod's service account leads to."""

    def __init__(self, config: RunConfig, options: KubernetesOptions, api: ApiServer | None = None) -> None:
        self.config = config
        self.options = options
        self.api = api or ApiServer(options.namespace)
        self.selector = cluster.selector(config.run_id)
        self._attached = False
        self.stopped_by_user = False

    # --- attach ---

    def attach(self) -> int | None:
        found = sorted(self.api.jobs(self.selector), key=job_state.attempt)
        jobs = [job for job in found if job_state.living(job)]
        if not jobs:
            return self._completed(found)
        for older in jobs[:-1]:
            say(f"{job_state.name(older)} is of an older attempt: deleting it")
            self.api.delete_job(job_state.name(older))
        job = jobs[-1]
        self._renew_owner(job)
        self._attached = True
        say(f"attached to {job_state.name(job)}, which is still running")
        return job_state.attempt(job)

    def _completed(self, jobs: list[Manifest]) -> int | None:
        """The newest attempt, if its Job came to its end while no supervisor watched: there is nothing left to start for."""
        if not jobs or job_state.deleting(jobs[-1]) or not job_state.holds(jobs[-1], "Complete"):
            return None
        attempt = job_state.attempt(jobs[-1])
        if attempt != newest_attempt(RunPaths(self.config.root, self.config.run_id)):
            return None
        self._attached = True
        say(f"{job_state.name(jobs[-1])} has finished meanwhile")
        return attempt

    def _renew_owner(self, job: Manifest) -> None:
        """Else the clean-up of the Workflow that started the Job takes it away from a Workflow that resumed the run."""
        owner = self._owner()
        if owner is None:
            return
        body = {"metadata": {"ownerReferences": [owner]}}
        self.api.patch_job(job_state.name(job), body)
        self.api.patch_service(cluster.service_name(self.config.run_id), body)

    def _owner(self) -> Manifest | None:
        if not self.options.workflow:
            return None
        workflow = self.api.workflow(self.options.workflow)
        if workflow is None:
            raise ConfigurationError(
                f"--workflow: there is no Workflow '{self.options.workflow}' in namespace {self.api.namespace}"
            )
        return cluster.owner_reference(workflow)

    # --- start ---

    def start(self, launch: Launch) -> None:
        placement = self.options.placement
        self.check()
        owner = self._owner()
        self._clear(keep=cluster.job_name(launch.config.run_id, launch.attempt))
        service = cluster.service(launch.config.run_id, owner)
        if not self.api.create_service(service) and owner:
            self.api.patch_service(job_state.name(service), {"metadata": {"ownerReferences": [owner]}})
        job = cluster.job(launch, placement, owner)
        name = job_state.name(job)
        while not self.api.create_job(job):
            existing = self.api.job(name)
            if existing is not None and job_state.living(existing):
                say(f"{name} exists already: going on with it")
                self._renew_owner(existing)
                break
            self._clear()
        self._attached = False
        say(f"started {name}: {launch.config.nodes} pod(s), profile {launch.config.profile}")

    def check(self) -> None:
        """Refuse everything that can be known to be wrong before a GPU is asked for."""
        cluster.check(self.config, self.options.placement, cluster.shape_of(self.config.model))
        for verb, group, resource, subresource in NEEDED:
            if not self.api.may(verb, group, resource, subresource, namespaced=resource != "nodes"):
                shown = "/".join(filter(None, (resource, subresource))) + (f".{group}" if group else "")
                raise DeniedError(lacking(verb, shown, self.api.namespace))
        claim = self.api.claim(self.options.claim)
        where = f"in namespace {self.api.namespace}; see templates/cluster"
        if claim is None:
            raise ConfigurationError(f"--claim: there is no claim '{self.options.claim}' {where}")
        if claim.get("status", {}).get("phase") == "Lost":
            raise UnavailableError(f"the volume of claim '{self.options.claim}' is lost {where}")
        if self.api.service_account(self.options.service_account) is None:
            raise ConfigurationError(
                f"--service-account: there is no service account '{self.options.service_account}' {where}"
            )

    def _clear(self, keep: str = "") -> None:
        """End the Jobs of this run, but not ``keep`` if it lives, and wait until their pods are gone (or out of reach)."""
        for job in self.api.jobs(self.selector):
            if job_state.name(job) == keep and job_state.living(job):
                continue
            if not job_state.deleting(job):
                say(f"deleting {job_state.name(job)}")
                self.api.delete_job(job_state.name(job))
        graces = [int(pod["spec"].get("terminationGracePeriodSeconds") or 0) for pod in self.api.pods(self.selector)]
        limit = max(graces, default=0) + PODS_GONE_SECONDS
        deadline = time.monotonic() + limit
        while True:
            pods = [
                pod
                for pod in self.api.pods(self.selector)
                if pod["metadata"].get("labels", {}).get(job_state.JOB) != keep
            ]
            left = self.api.reachable(pods)
            gone = not any(job_state.name(job) != keep for job in self.api.jobs(self.selector))
            if gone and not left:
                for pod in pods:
                    say(f"{job_state.name(pod)} is on a node that does not answer; it is fenced off and not waited for")
                return
            if time.monotonic() > deadline:
                names = ", ".join(sorted(map(job_state.name, left))) or "a Job with a finalizer"
                raise UnavailableError(f"still there {limit:.0f} s after their Job was deleted: {names}")
            time.sleep(POLL_SECONDS)

    # --- wait ---

    def wait(self, launch: Launch, stop: Callable[[], str | None]) -> int:
        name = cluster.job_name(launch.config.run_id, launch.attempt)
        watch = Watch(self.api, launch, name, attached=self._attached)
        try:
            while True:
                if reason := stop():
                    return self._stopped(name, reason)
                if (code := watch.look()) is not None:
                    return code
                time.sleep(POLL_SECONDS)
        except NodeLost:
            say(f"deleting {name}; the next attempt starts without that node's pods")
            self.api.delete_job(name)
            raise
        finally:
            watch.close(drain=not stop())

    def _stopped(self, name: str, reason: str) -> int:
        self.api.patience_seconds = min(self.api.patience_seconds, STOPPING_PATIENCE_SECONDS)
        over = ""
        try:
            if self.options.workflow:
                workflow = self.api.workflow(self.options.workflow)
                over = job_state.ending(workflow, time.time())
                self.stopped_by_user = bool(workflow and workflow.get("spec", {}).get("shutdown"))
            if over:
                say(f"{reason}; {over}: ending {name}")
                self.release()
                return int(ExitCode.STOPPED)
        except UnavailableError as error:
            say(f"could not end {name}: {error}")
        say(f"{reason}; {name} goes on, and the next supervisor of this run attaches to it")
        return int(ExitCode.STOPPED)

    # --- release ---

    def release(self) -> None:
        self._clear()
        for service in self.api.services(self.selector):
            self.api.delete_service(job_state.name(service))


class Watch:
    """Looks at one Job again and again: its end, its pods' failures, the nodes under them, the log of node 0."""

    def __init__(self, api: ApiServer, launch: Launch, name: str, *, attached: bool) -> None:
        self.api = api
        self.name = name
        self.limit_seconds = launch.config.node_lost_seconds
        self.pods_selector = f"{job_state.JOB}={name}"
        self.log = PodLog(api, cluster.CONTAINER, from_now=attached)
        self._said: set[str] = set()
        self._failed: set[str] = set()
        self._nodes_at = 0.0
        self._cannot_start_since: float | None = None

    def look(self) -> int | None:
        """The contract's code once the Job has ended. Raises ``NodeLost``; ``UnavailableError`` if pods cannot start."""
        job = self.api.job(self.name)
        if job is None or job_state.deleting(job):
            say(f"{self.name} was deleted by someone else")
            return int(ExitCode.STOPPED)
        pods = self.api.pods(self.pods_selector)
        self._tell(pods)
        first = job_state.current(pods, 0)
        if first is not None:
            self.log.follow(job_state.name(first))
        if (end := job_state.ended(job, pods)) is not None:
            say(f"{self.name} ended with {end.exit_code}: {end.message}")
            return end.exit_code
        self._check_start(pods)
        if time.monotonic() >= self._nodes_at:
            self._nodes_at = time.monotonic() + NODES_EVERY_SECONDS
            self._check_nodes(pods)
        return None

    def _tell(self, pods: list[Manifest]) -> None:
        for pod in pods:
            failure = job_state.failed(pod)
            if failure is not None and failure.pod not in self._failed:
                self._failed.add(failure.pod)
                say(f"{failure}{'; it costs no restart' if failure.disrupted else ''}")
        if waiting := job_state.unschedulable(pods):
            self._once(waiting)

    def _check_start(self, pods: list[Manifest]) -> None:
        trouble = job_state.cannot_start(pods)
        if not trouble:
            self._cannot_start_since = None
            return
        self._once(trouble)
        now = time.monotonic()
        if self._cannot_start_since is None:
            self._cannot_start_since = now
        if now - self._cannot_start_since >= CANNOT_START_SECONDS:
            self.api.delete_job(self.name)
            raise UnavailableError(f"training pods cannot start for {CANNOT_START_SECONDS:.0f} s: {trouble}")

    def _check_nodes(self, pods: list[Manifest]) -> None:
        nodes = {node: self.api.node(node) for node in job_state.nodes_of(pods)}
        for node, item in nodes.items():
            if item is not None and job_state.seconds_not_ready(item, time.time()):
                self._once(f"{node} is not ready; it is given up after {self.limit_seconds:.0f} s")
        lost = job_state.lost(nodes, time.time(), self.limit_seconds)
        if lost:
            node, seconds = max(lost.items(), key=lambda pair: pair[1])
            raise NodeLost(f"{node} has not been ready for {seconds:.0f} s")

    def _once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            say(message)

    def close(self, *, drain: bool) -> None:
        self.log.close(drain=drain)
