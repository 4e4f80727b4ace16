"""Checks of the cluster: versions, nodes and their devices, claim, identities and what they may do, Argo, the run id."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from steps import cluster, job_state
from steps.kubernetes import NEEDED
from steps.kubernetes_api import ApiServer, Manifest, lacking
from steps.profiles import PROFILES, Profile
from trainer.config import RunConfig
from trainer.errors import ExitCode
from workflows.findings import Finding
from workflows.preflight_aws import OLDEST_KUBERNETES

OLDEST_ARGO = (3, 6)
"""The first whose Workflows take a list of mutexes."""
EXECUTOR = tuple((verb, "argoproj.io", "workflowtaskresults", "") for verb in ("create", "patch"))
DRIVER_LABEL = "nvidia.com/cuda.driver.major"
OLDEST_DRIVER = 550
ZONE = "topology.kubernetes.io/zone"


def checks(api: ApiServer, config: RunConfig, image: str, queue: str) -> Iterator[Finding]:
    profile = PROFILES[config.profile]
    yield check_version(api.call("get version", api.client("VersionApi").get_code) or {})
    nodes = matching_nodes(api, profile)
    yield check_nodes(nodes, profile, config.nodes)
    if profile.gpus:
        yield from check_devices(nodes, profile)
    yield from _claim(api)
    yield from _identities(api)
    yield from _secrets(api, config)
    yield from _argo(api)
    yield check_run_id(config.run_id, api.jobs(cluster.selector(config.run_id)), api.workflows())
    if image:
        yield check_image_on_nodes(nodes, image)
    if queue:
        yield _queue(api, queue)


def check_version(version: Manifest) -> Finding:
    text = f"Kubernetes {version.get('gitVersion', 'unknown')}"
    numbers = tuple(int(re.sub(r"\D", "", str(version.get(part, "0"))) or 0) for part in ("major", "minor"))
    if numbers < OLDEST_KUBERNETES:
        oldest = ".".join(map(str, OLDEST_KUBERNETES))
        return Finding(
            "cluster",
            "version",
            "fail",
            f"{text}; {oldest} is the oldest that works",
            "upgrade",
            int(ExitCode.CONFIGURATION),
        )
    return Finding("cluster", "version", "pass", text)


# --- nodes ---


def matching_nodes(api: ApiServer, profile: Profile) -> list[Manifest]:
    """Ready nodes that the profile's pods may be given to."""
    selector = (
        ",".join(f"{key}={value}" for key, value in cluster.node_selector(profile).items())
        if profile.instance_type
        else ""
    )
    found = api.call("list nodes", api.core.list_node, label_selector=selector) or {}
    return [
        node
        for node in found.get("items", [])
        if job_state.holds(node, "Ready") and not node["spec"].get("unschedulable")
    ]


def zones(nodes: list[Manifest]) -> set[str]:
    return {zone for node in nodes if (zone := node["metadata"].get("labels", {}).get(ZONE))}


def check_nodes(nodes: list[Manifest], profile: Profile, wanted: int) -> Finding:
    kind = profile.instance_type or "any type"
    text = f"{len(nodes)} ready of {kind}, {wanted} asked for"
    if len(nodes) >= wanted:
        return Finding("cluster", "nodes", "pass", text)
    fix = "scale the node group up (eksctl scale nodegroup), or use fewer --nodes"
    return Finding("cluster", "nodes", "warn" if profile.gpus else "fail", text, fix)


def check_devices(nodes: list[Manifest], profile: Profile) -> Iterator[Finding]:
    """What the device plugins advertise on each node, and the driver that GPU feature discovery found."""
    plugins = {
        "nvidia.com/gpu": (profile.gpus, "the NVIDIA device plugin"),
        "vpc.amazonaws.com/efa": (profile.efa, "the EFA device plugin (aws-efa-k8s-device-plugin)"),
        "hugepages-2Mi": (profile.hugepages_mib, "huge pages in the node's bootstrap (2 MiB x 5128 for EFA)"),
    }
    for resource, (wanted, plugin) in plugins.items():
        if not wanted:
            continue
        if not nodes:
            yield Finding("cluster", resource, "warn", "no node to look at", "start one, and run this again")
            continue
        short = {job_state.name(n): has for n in nodes if (has := _allocatable(n, resource)) < wanted}
        if short:
            node, has = next(iter(short.items()))
            text = f"{node} offers {has} of {wanted}" + (f", and {len(short) - 1} more nodes" if len(short) > 1 else "")
            yield Finding("cluster", resource, "fail", text, f"install or repair {plugin}", int(ExitCode.CONFIGURATION))
        else:
            yield Finding("cluster", resource, "pass", f"{wanted} on each of {len(nodes)} nodes")
    drivers = {str(n["metadata"].get("labels", {}).get(DRIVER_LABEL, "")) for n in nodes} - {""}
    if not drivers:
        yield Finding(
            "cluster", "driver", "warn", "unknown: no label of GPU feature discovery", "see nvidia-smi on a node"
        )
    elif min(int(driver) for driver in drivers) < OLDEST_DRIVER:
        fix = "use a newer EKS accelerated AMI"
        yield Finding("cluster", "driver", "fail", f"{', '.join(sorted(drivers))}; {OLDEST_DRIVER} is needed", fix)
    else:
        yield Finding("cluster", "driver", "pass", ", ".join(sorted(drivers)))


def _allocatable(node: Manifest, resource: str) -> int:
    """A count, or MiB of huge pages."""
    text = str(node["status"].get("allocatable", {}).get(resource, "0"))
    units = {"Ki": 1 / 1024, "Mi": 1, "Gi": 1024}
    return int(float(text[:-2]) * units[text[-2:]]) if text[-2:] in units else int(text)


def check_image_on_nodes(nodes: list[Manifest], image: str) -> Finding:
    have = [n for n in nodes if any(image in (item.get("names") or []) for item in n["status"].get("images", []))]
    if len(have) == len(nodes) and nodes:
        return Finding("cluster", "image", "pass", f"{image} is on all {len(nodes)} nodes")
    fix = (
        f"kubectl run pull --rm -i --restart=Never --image={image} -- --version: if it cannot, let the nodes' role read the "
        "registry (AmazonEC2ContainerRegistryPullOnly), or give the service accounts imagePullSecrets"
    )
    return Finding("cluster", "image", "warn", f"{image} is on {len(have)} of {len(nodes)} nodes; the others must pull it", fix)


# --- storage, identities, secrets ---


def _claim(api: ApiServer) -> Iterator[Finding]:
    claim = api.claim(cluster.CLAIM)
    fix = "kubectl apply -f templates/cluster/storage-fsx.yaml (docs/eks.md)"
    if claim is None:
        text = f"there is no claim {cluster.CLAIM} in namespace {api.namespace}"
        yield Finding("cluster", "claim", "fail", text, fix, int(ExitCode.CONFIGURATION))
        return
    yield check_claim(claim)
    volume_name = claim["spec"].get("volumeName", "")
    volume = api.volume(volume_name) if volume_name else None
    driver = (volume or {}).get("spec", {}).get("csi", {}).get("driver", "")
    if driver and api.call("get csidrivers", api.client("StorageV1Api").read_csi_driver, driver) is None:
        fix = "eksctl create addon --name aws-fsx-csi-driver --cluster CLUSTER"
        yield Finding("cluster", "storage driver", "fail", f"the CSI driver {driver} is not installed", fix)


def check_claim(claim: Manifest) -> Finding:
    phase, modes = claim.get("status", {}).get("phase", "unknown"), claim["spec"].get("accessModes", [])
    text = f"{job_state.name(claim)} is {phase}, {', '.join(modes)}"
    if "ReadWriteMany" not in modes:
        fix = "make the claim ReadWriteMany: every node writes its shards"
        return Finding("cluster", "claim", "fail", text, fix, int(ExitCode.CONFIGURATION))
    if phase != "Bound":
        return Finding("cluster", "claim", "fail", text, "kubectl describe pv,pvc: do the names and sizes match?")
    return Finding("cluster", "claim", "pass", text)


def file_system_of(api: ApiServer) -> str:
    """The FSx id behind the claim, or nothing."""
    claim = api.claim(cluster.CLAIM) or {}
    name = claim.get("spec", {}).get("volumeName", "")
    volume = (api.volume(name) if name else None) or {}
    csi: dict[str, Any] = volume.get("spec", {}).get("csi", {})
    return str(csi.get("volumeHandle", "")) if csi.get("driver") == "fsx.csi.aws.com" else ""


def _identities(api: ApiServer) -> Iterator[Finding]:
    wanted = {
        cluster.SERVICE_ACCOUNT_STEPS: EXECUTOR,
        cluster.SERVICE_ACCOUNT_SUPERVISOR: (*EXECUTOR, *NEEDED),
        cluster.SERVICE_ACCOUNT_TRAINING: (),
    }
    fix = f"kubectl apply -n {api.namespace} -f templates/cluster/rbac.yaml"
    for account, verbs in wanted.items():
        if api.service_account(account) is None:
            text = f"there is no service account {account} in namespace {api.namespace}"
            yield Finding("cluster", account, "fail", text, fix, int(ExitCode.CONFIGURATION))
            continue
        missing = [needed for needed in verbs if not _may(api, account, *needed)]
        if missing:
            verb, group, resource, sub = missing[0]
            shown = "/".join(filter(None, (resource, sub))) + (f".{group}" if group else "")
            text = lacking(verb, shown, api.namespace).partition(";")[0] + (
                f" and {len(missing) - 1} more" if missing[1:] else ""
            )
            yield Finding("cluster", account, "fail", text, fix, int(ExitCode.DENIED))
        else:
            yield Finding(
                "cluster", account, "pass", f"may do the {len(verbs)} things it must" if verbs else "needs no rights"
            )


def _may(api: ApiServer, account: str, verb: str, group: str, resource: str, subresource: str) -> bool:
    attributes = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
    if resource != "nodes":
        attributes["namespace"] = api.namespace
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": f"system:serviceaccount:{api.namespace}:{account}", "resourceAttributes": attributes},
    }
    answer = api.call(
        "review subjectaccessreviews", api.client("AuthorizationV1Api").create_subject_access_review, review
    )
    return bool(answer and answer["status"]["allowed"])


def _secrets(api: ApiServer, config: RunConfig) -> Iterator[Finding]:
    if not config.dataset_uri.startswith("hf://"):
        return
    secret = api.call("get secrets", api.core.read_namespaced_secret, cluster.HUB_SECRET, api.namespace)
    fix = f"kubectl create secret generic {cluster.HUB_SECRET} -n {api.namespace} --from-literal=token=..."
    if secret is None:
        text = f"there is no secret {cluster.HUB_SECRET}: only public data sets can be read"
        yield Finding("cluster", "hub token", "warn", text, fix)
    elif "token" not in (secret.get("data") or {}):
        yield Finding(
            "cluster", "hub token", "fail", f"{cluster.HUB_SECRET} has no key 'token'", fix, int(ExitCode.CONFIGURATION)
        )
    else:
        yield Finding("cluster", "hub token", "pass", f"{cluster.HUB_SECRET} has a token")


# --- Argo, the run, Kueue ---


def _argo(api: ApiServer) -> Iterator[Finding]:
    definitions = api.client("ApiextensionsV1Api")
    crd = api.call(
        "get customresourcedefinitions", definitions.read_custom_resource_definition, "workflows.argoproj.io"
    )
    if crd is None:
        fix = "install Argo Workflows (docs/eks.md)"
        yield Finding("cluster", "Argo", "fail", "the cluster has no Workflows", fix, int(ExitCode.CONFIGURATION))
        return
    apps = api.client("AppsV1Api")
    found = api.call(
        "list deployments", apps.list_deployment_for_all_namespaces, field_selector="metadata.name=workflow-controller"
    )
    yield check_argo((found or {}).get("items", []))


def check_argo(deployments: list[Manifest]) -> Finding:
    """By the tag of the controller's image."""
    if not deployments:
        fix = "check that a workflow-controller watches this namespace"
        return Finding(
            "cluster", "Argo", "warn", "Workflows are defined, but no Deployment workflow-controller is found", fix
        )
    image = deployments[0]["spec"]["template"]["spec"]["containers"][0]["image"]
    ready = deployments[0].get("status", {}).get("readyReplicas", 0)
    match = re.search(r":v?(\d+)\.(\d+)", image)
    if not ready:
        return Finding(
            "cluster", "Argo", "fail", f"{image}: no replica is ready", "kubectl logs deployment/workflow-controller"
        )
    if match is None:
        return Finding("cluster", "Argo", "warn", f"{image}: its version is not in its tag", "3.6 or later is needed")
    if (int(match[1]), int(match[2])) < OLDEST_ARGO:
        oldest = ".".join(map(str, OLDEST_ARGO))
        return Finding(
            "cluster",
            "Argo",
            "fail",
            f"{image}; {oldest} is the oldest that works",
            "upgrade Argo",
            int(ExitCode.CONFIGURATION),
        )
    return Finding("cluster", "Argo", "pass", image)


def check_run_id(run_id: str, jobs: list[Manifest], workflows: list[Manifest]) -> Finding:
    """Whether something is at work on the run: a Workflow that is not over (it may still download, or wait for another),
    or a Job that goes on without one."""
    busy = [w for w in workflows if job_state.run_of(w) == run_id and not job_state.finished(w)]
    if busy:
        phase = job_state.phase(busy[0]) or "not begun"
        text = f"run '{run_id}' is in use: Workflow {job_state.name(busy[0])} is {phase}"
        fix = "another --run-id; with this one a submission waits for its end, then goes on from there"
        return Finding("cluster", "run id", "warn", text, fix)
    living = [job for job in jobs if job_state.living(job)]
    if living:
        text = f"run '{run_id}' is in use: Job {job_state.name(living[0])} is running, and no Workflow"
        return Finding("cluster", "run id", "warn", text, "another --run-id; with this one a submission attaches to the Job")
    return Finding("cluster", "run id", "pass", f"'{run_id}' has nothing running")


def _queue(api: ApiServer, queue: str) -> Finding:
    found = api.call(
        "get localqueues.kueue.x-k8s.io", api.custom.get_namespaced_custom_object,
        "kueue.x-k8s.io", "v1beta1", api.namespace, "localqueues", queue,
    )  # fmt: skip
    if found is None:
        fix = "kubectl get localqueues; without Kueue give no --queue: a Job would wait for ever"
        return Finding("cluster", "queue", "fail", f"there is no local queue {queue}", fix, int(ExitCode.CONFIGURATION))
    return Finding("cluster", "queue", "pass", f"local queue {queue}")
