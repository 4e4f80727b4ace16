"""``run.py teardown``: remove what runs left, in the one order that does not hang.

A claim cannot go while a pod uses it, a node group not while pods hold their nodes, a file system not while it is
mounted. So:

1. Workflows are stopped (their exit handlers run), then
2. Jobs, pods and Services of the runs go, then
3. the claim and its volume (never the data: they stay where the volume is not Retain), then
4. the node groups of GPU instances are scaled to zero, and
5. what a provisioning tool owns (file systems, image repositories, the cluster) is listed with the command that deletes
   it, and left.

With ``--run-id`` only 1 and 2, of that run. Nothing is changed without ``--execute``. Every stage looks at what is there
now, so that a teardown that was interrupted, or gave up waiting, is simply run again.

What is broken does not keep the rest: Workflows that nobody ends, since Argo's controller is dead, are left marked to stop
before 2; pods on a node that does not answer are not waited for, and with ``--cluster`` nothing of 2 and 3 keeps the nodes
from being scaled to zero; without an API server 1 to 3 are skipped, and 4 and 5 ask AWS alone. Each ends with 69 and says what is left.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from steps import cluster, job_state
from steps.cluster import LABEL_COMPONENT, LABEL_RUN, NAME, TRAINING
from steps.kubernetes_api import ApiServer, Manifest
from steps.profiles import PROFILES
from trainer.errors import ConfigurationError, DeniedError, ExitCode, UnavailableError
from workflows.preflight_aws import Account, said_by_aws

T = TypeVar("T")

POLL_SECONDS = 2.0
PATIENCE_SECONDS = 30.0
WORKFLOWS = ("argoproj.io", "v1alpha1")

NO_CONTROLLER = (
    "they are marked to stop; going on, since a supervisor whose Job is deleted ends. Argo's controller must run to end "
    "them: kubectl -n argo rollout restart deployment workflow-controller"
)
NODES_NEXT = "going on, since the node groups are next: with its node the last pod goes that holds any of them"
NO_API_SERVER = (
    "what is in the cluster stays as it is, and what runs on the node groups' nodes is cut off at its newest checkpoint. "
    "If the API server comes back, run teardown again before nodes are started: Jobs would go on there"
)


@dataclass(frozen=True)
class Step:
    """One thing to remove: what, how, and how to know that it is gone."""

    what: str
    act: Callable[[], Any]
    gone: Callable[[], bool]


@dataclass(frozen=True)
class Left:
    """What is not ours to delete, and the command of whoever it belongs to."""

    what: str
    command: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-id", default="", help="only what this run left in the cluster [every run, then the rest]"
    )
    parser.add_argument("--namespace", default="", help="namespace of the Workflows [the kubeconfig's]")
    parser.add_argument("--cluster", default="", help="EKS cluster whose GPU node groups are scaled to zero")
    parser.add_argument("--region", default="", help="AWS region [the AWS configuration's]")
    parser.add_argument("--stage-seconds", type=float, default=600.0, help="how long one stage may take [600]")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--dry-run", action="store_true", default=True, help="say what would be done (the default)")
    chosen.add_argument("--execute", action="store_true", help="do it")


def main(args: argparse.Namespace) -> int:
    """Go through the stages; ``UnavailableError`` (69) names what was not gone in time, or who did not answer."""
    if args.run_id and args.cluster:
        raise ConfigurationError("--run-id: other runs may use the node groups; give --cluster without it")
    account = Account(args.cluster, "", "", args.region)
    if args.cluster:
        asked(lambda: group_steps(account))  # before anything is changed: who may not do the last stage is told so first
    api = ApiServer(args.namespace, PATIENCE_SECONDS)
    undone = no_answer(api) if args.cluster else ""
    if undone:
        print(f"1. to 3. workflows, jobs and services, claim and volume: skipped\n   {undone}\n   {NO_API_SERVER}")
    else:
        undone = clear_cluster(api, args)
    if args.cluster:
        asked(lambda: run_stage("4. node groups", group_steps(account), args.execute, args.stage_seconds))
        asked(lambda: show_left(left(account), 5))
    if not args.execute:
        print("nothing was changed; --execute does it")
    if undone:
        raise UnavailableError(undone)
    return int(ExitCode.DONE)


def asked(ask: Callable[[], T]) -> T:
    """``ask()`` of AWS; what AWS or its client says against it becomes the contract's error."""
    try:
        return ask()
    except Exception as error:
        if (said := said_by_aws(error)) is None:
            raise
        text, fix, code = said
        kinds = {ExitCode.DENIED: DeniedError, ExitCode.CONFIGURATION: ConfigurationError}
        raise kinds.get(code, UnavailableError)(f"AWS: {text}; {fix}") from None


def no_answer(api: ApiServer) -> str:
    """Why the API server cannot be asked anything; nothing if it can."""
    try:
        api.call("get version", api.client("VersionApi").get_code)
    except UnavailableError as error:
        return str(error)
    return ""


def clear_cluster(api: ApiServer, args: argparse.Namespace) -> str:
    """What runs left in the cluster. Returns what is still there although all stages were gone through."""
    how = (args.execute, args.stage_seconds)
    otherwise = NODES_NEXT if args.cluster else ""
    undone = [run_stage("1. workflows", workflow_steps(api, args.run_id), *how, otherwise=NO_CONTROLLER)]
    undone.append(run_stage("2. jobs and services", job_steps(api, args.run_id), *how, otherwise=otherwise))
    if undone[-1]:
        print("3. claim and volume: skipped, since pods use them")
    elif not args.run_id:
        undone.append(run_stage("3. claim and volume", claim_steps(api), *how, otherwise=otherwise))
    return "; ".join(filter(None, undone))


def run_stage(title: str, steps: list[Step], execute: bool, limit_seconds: float, otherwise: str = "") -> str:
    """Do all of a stage's steps, then wait until every one is gone.

    What is not gone in time is an ``UnavailableError``; with ``otherwise``, which says why the next stage is safe all the
    same, it is printed and returned.
    """
    if not steps:
        print(f"{title}: nothing to do")
        return ""
    print(f"{title}:")
    for step in steps:
        print(f"   {'removing' if execute else 'would remove'} {step.what}", flush=True)
        if execute:
            step.act()
    if not execute:
        return ""
    deadline = time.monotonic() + limit_seconds
    waiting = steps
    while waiting := [step for step in waiting if not step.gone()]:
        if time.monotonic() > deadline:
            names = ", ".join(step.what for step in waiting)
            problem = f"not gone after {limit_seconds:.0f} s: {names}; look at its events, then run teardown again"
            if not otherwise:
                raise UnavailableError(problem)
            print(f"   {problem}\n   {otherwise}", flush=True)
            return problem
        time.sleep(POLL_SECONDS)
    return ""


# --- the cluster ---


def workflow_steps(api: ApiServer, run_id: str) -> list[Step]:
    """Stop the Workflows that are not over; their exit handlers release what their runs hold."""
    found = [(job_state.run_of(w), job_state.name(w)) for w in api.workflows() if not job_state.finished(w)]
    return [_stop(api, name, run) for run, name in found if run and run_id in ("", run)]


def _stop(api: ApiServer, name: str, run_id: str) -> Step:
    def act() -> None:
        api.call(
            "patch workflows.argoproj.io", api.custom.patch_namespaced_custom_object, *WORKFLOWS, api.namespace,
            "workflows", name, {"spec": {"shutdown": "Stop"}}, _content_type="application/merge-patch+json",
        )  # fmt: skip

    def gone() -> bool:
        workflow = api.workflow(name)
        return workflow is None or job_state.finished(workflow)

    return Step(f"Workflow {name} of run '{run_id}' from the running ones (stop)", act, gone)


def job_steps(api: ApiServer, run_id: str) -> list[Step]:
    """The Jobs and Services of a run, or of all; of a benchmark, those of its arms too, which its Workflow owns."""
    selector = f"{LABEL_RUN},{LABEL_COMPONENT}={TRAINING}"
    owners = {job_state.name(workflow) for workflow in api.workflows(completed=True) if job_state.run_of(workflow) == run_id}

    def wanted(resource: Manifest) -> bool:
        metadata = resource["metadata"]
        owned = {owner["name"] for owner in metadata.get("ownerReferences", []) if owner["kind"] == "Workflow"}
        return run_id in ("", metadata["labels"][LABEL_RUN]) or bool(owned & owners)

    def pods_gone(job: str) -> bool:
        return api.job(job) is None and not api.reachable(api.pods(f"{job_state.JOB}={job}"))

    def job_step(name: str) -> Step:
        return Step(f"Job {name} and its pods", lambda: api.delete_job(name), lambda: pods_gone(name))

    def service_step(name: str) -> Step:
        still = f"metadata.name={name}"
        return Step(
            f"Service {name}",
            lambda: api.delete_service(name),
            lambda: (
                not (
                    api.call("list services", api.core.list_namespaced_service, api.namespace, field_selector=still)
                    or {}
                )["items"]
            ),
        )

    jobs = [job_step(job_state.name(job)) for job in api.jobs(selector) if wanted(job)]
    return jobs + [service_step(job_state.name(service)) for service in api.services(selector) if wanted(service)]


def claim_steps(api: ApiServer) -> list[Step]:
    """The claim, then its volume. Pods of other kinds that use the claim are named: they are not ours to end."""
    claim = api.claim(cluster.CLAIM)
    if claim is None:
        return []
    users = [job_state.name(pod) for pod in api.pods("") if not job_state.over(pod) and _uses(pod, cluster.CLAIM)]
    for user in users:
        print(f"   pod {user} uses the claim; the claim goes when that pod does")
    volume = claim["spec"].get("volumeName", "")
    core = api.core
    if volume and (policy := _reclaimed(api, volume)) not in ("Retain", ""):
        print(
            f"   claim {cluster.CLAIM} and volume {volume} stay: the volume's reclaim policy is {policy}, so the data would go with "
            f"the claim. To keep the data, make it Retain (kubectl patch pv {volume} -p "
            """'{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}') and run teardown again; """
            f"to delete all: kubectl delete -n {api.namespace} pvc {cluster.CLAIM}"
        )
        return []
    steps = [
        Step(
            f"claim {cluster.CLAIM}",
            lambda: api.call(
                "delete persistentvolumeclaims",
                core.delete_namespaced_persistent_volume_claim,
                cluster.CLAIM,
                api.namespace,
            ),
            lambda: api.claim(cluster.CLAIM) is None,
        )
    ]
    if volume:
        steps.append(
            Step(
                f"volume {volume} (the data stays)",
                lambda: api.call("delete persistentvolumes", core.delete_persistent_volume, volume),
                lambda: api.volume(volume) is None,
            )
        )
    return steps


def _reclaimed(api: ApiServer, volume: str) -> str:
    """What becomes of a volume without its claim; nothing where there is no such volume."""
    found = api.volume(volume)
    return str(found["spec"].get("persistentVolumeReclaimPolicy", "Retain")) if found else ""


def _uses(pod: Manifest, claim: str) -> bool:
    volumes = pod["spec"].get("volumes", [])
    return any(volume.get("persistentVolumeClaim", {}).get("claimName") == claim for volume in volumes)


# --- the account ---


def group_steps(account: Account) -> list[Step]:
    """Scale the node groups of the profiles' instance types to zero. Others run the cluster itself."""
    eks = account.client("eks")
    ours = {profile.instance_type for profile in PROFILES.values() if profile.instance_type}
    steps = []
    for name in account.every("eks", "list_nodegroups", "nodegroups", clusterName=account.cluster):
        group = eks.describe_nodegroup(clusterName=account.cluster, nodegroupName=name)["nodegroup"]
        scaling = group["scalingConfig"]
        if ours & set(group.get("instanceTypes", [])) and (scaling["minSize"] or scaling["desiredSize"]):
            steps.append(_scale(account, name, scaling))
    return steps


def _scale(account: Account, group: str, scaling: dict[str, int]) -> Step:
    eks = account.client("eks")

    def act() -> None:
        eks.update_nodegroup_config(
            clusterName=account.cluster,
            nodegroupName=group,
            scalingConfig={"minSize": 0, "desiredSize": 0, "maxSize": max(1, scaling["maxSize"])},
        )

    def gone() -> bool:
        found = eks.describe_nodegroup(clusterName=account.cluster, nodegroupName=group)["nodegroup"]
        return bool(found["status"] == "ACTIVE" and found["scalingConfig"]["desiredSize"] == 0)

    return Step(f"{scaling['desiredSize']} nodes of node group {group} (scaled to zero)", act, gone)


def left(account: Account) -> list[Left]:
    """What costs money or holds data still, and how its owner deletes it, in the order that works."""
    items = []
    for system in account.every("fsx", "describe_file_systems", "FileSystems"):
        if system["FileSystemType"] == "LUSTRE":
            tags = {tag["Key"]: tag["Value"] for tag in system.get("Tags", [])}
            text = f"FSx file system {system['FileSystemId']}, {system['StorageCapacity']} GiB, with its data"
            command = f"aws fsx delete-file-system --file-system-id {system['FileSystemId']}"
            items.append(Left(text, _owner(tags) or command))
    for repository in account.every("ecr", "describe_repositories", "repositories"):
        name = repository["repositoryName"]
        if name.split("/")[-1].startswith(NAME):
            items.append(Left(f"ECR repository {name}", f"aws ecr delete-repository --force --repository-name {name}"))
    found = account.client("eks").describe_cluster(name=account.cluster)["cluster"]
    owner = _owner(found.get("tags", {})) or f"eksctl delete cluster --name {account.cluster}"
    items.append(Left(f"EKS cluster {account.cluster}", owner))
    return items


def _owner(tags: dict[str, str]) -> str:
    """The command of the tool that made a thing, by the tags it leaves; empty if it left none."""
    if name := tags.get("alpha.eksctl.io/cluster-name"):
        return f"eksctl delete cluster --name {name}"
    if stack := tags.get("aws:cloudformation:stack-name"):
        return f"aws cloudformation delete-stack --stack-name {stack}"
    if any(
        key.lower() in ("terraform", "managedby", "managed-by") and "terraform" in (key + value).lower()
        for key, value in tags.items()
    ):
        return "terraform destroy (in the project that made it)"
    return ""


def show_left(items: list[Left], number: int) -> None:
    print(f"{number}. left to its owner, in this order:")
    for item in items:
        print(f"   {item.what}\n      {item.command}")
