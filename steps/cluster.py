"""The Job and Service of a run. Pure: values in, manifests (plain dictionaries) out.

From a profile (``steps.profiles``) and a run's configuration come

1. ``check``: what can never work is refused before any GPU is asked for (wrong GPU count, a model that is too big);
2. ``service``: a headless Service, so that node 0 has a stable name from the moment its pod has an address;
3. ``job``: an Indexed Job with one pod per node, whose failure policy reads the exit codes of ``trainer.errors``.

Names depend on the run id and the attempt only: a supervisor that starts again finds what it started before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from steps.launcher import RENDEZVOUS_PORT, Launch
from steps.profiles import PROFILES, Profile
from trainer.config import RunConfig
from trainer.errors import FINAL_CODES, ConfigurationError

Manifest = dict[str, Any]

NAME = "holdfast"
USER = 1000
"""User and group of every container; the image has it, and the shared directory must be writable by it."""

CLAIM = f"{NAME}-fsx"
SERVICE_ACCOUNT_STEPS = f"{NAME}-steps"
SERVICE_ACCOUNT_SUPERVISOR = f"{NAME}-supervisor"
SERVICE_ACCOUNT_TRAINING = f"{NAME}-training"
HUB_SECRET = f"{NAME}-hub"
WEBHOOK_SECRET = f"{NAME}-webhook"

LABEL_RUN = f"{NAME}/run-id"
LABEL_ATTEMPT = f"{NAME}/attempt"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
TRAINING = "training"
CONTAINER = "train"

GIB = 1024**3
STATE_BYTES_PER_PARAMETER = 16
"""fp32 weights, gradients and the two AdamW moments, all of them sharded over the ranks."""
SAVED_BYTES_PER_PARAMETER = 12
"""What a checkpoint holds of it: everything but the gradients."""
SNAPSHOT_COPIES = 2
"""Generations that a rank keeps in its own node's memory (``trainer.checkpointing.snapshots``)."""
REPLICA_COPIES = 3
"""What a peer holds of them: the two it keeps, and one that is arriving (``trainer.checkpointing.replicas``)."""


@dataclass(frozen=True)
class Placement:
    """What a cluster, not the run, decides about the pods."""

    image: str
    claim: str = CLAIM
    service_account: str = SERVICE_ACCOUNT_TRAINING
    queue: str = ""
    """Kueue's local queue; the Job is then made suspended, and Kueue admits all of its pods or none."""
    deadline_seconds: int = 7 * 24 * 3600
    """The Job ends by itself after this long, should nobody be left to delete it."""
    ttl_seconds: int = 3600
    cpus: str = ""
    memory_gib: int = 0
    shm_gib: int = 0
    """Of one pod, in place of the profile's."""


@dataclass(frozen=True)
class ModelShape:
    """What the size of a training state follows from."""

    parameters: int
    hidden: int
    layers: int
    vocabulary: int


def shape_of(model: str) -> ModelShape:
    """The shape of a model preset (with its smallest vocabulary); ``ConfigurationError`` for an unknown name."""
    from trainer.model import model_config, parameter_count

    config = model_config(model, 0)
    return ModelShape(parameter_count(config), config.dim, config.layers, config.vocabulary_size)


# --- names -------------------------------------------------------------------------------------------------------------


def service_name(run_id: str) -> str:
    return f"{NAME}-{run_id}"


def job_name(run_id: str, attempt: int) -> str:
    return f"{NAME}-{run_id}-{attempt}"


def rendezvous_host(run_id: str, attempt: int) -> str:
    """The name of node 0 within the namespace: Indexed pods are called <job>-<index>, below the Service's subdomain."""
    return f"{job_name(run_id, attempt)}-0.{service_name(run_id)}"


def labels(run_id: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": NAME, LABEL_COMPONENT: TRAINING, LABEL_RUN: run_id}


def selector(run_id: str) -> str:
    """The label selector of everything the launcher made for a run."""
    return f"{LABEL_RUN}={run_id},{LABEL_COMPONENT}={TRAINING}"


# --- checks ------------------------------------------------------------------------------------------------------------


def gpu_bytes_needed(config: RunConfig, shape: ModelShape) -> int:
    """A lower bound of one GPU's memory in bytes: its share of the training state, the largest piece that is gathered
    whole (a layer or the embedding, bf16), the residual stream of every layer and the logits of one micro-batch.
    """
    state = STATE_BYTES_PER_PARAMETER * shape.parameters / (config.fewest_nodes * config.gpus_per_node)
    embedding = shape.vocabulary * shape.hidden
    layer = max(0, shape.parameters - 2 * embedding) / max(1, shape.layers)
    tokens = config.micro_batch_size * config.sequence_length
    activations = 2 * tokens * shape.hidden * shape.layers
    logits = 2 * tokens * shape.vocabulary
    return math.ceil(state + 2 * max(layer, embedding) + activations + logits)


def snapshot_bytes_of_run(config: RunConfig, parameters: int) -> int:
    """Memory-backed storage of all nodes together in bytes: the generations of every shard, and their copies on a peer."""
    if not config.snapshot_interval_steps:
        return 0
    replicas = config.snapshot_replicas if config.nodes > 1 else 0
    return SAVED_BYTES_PER_PARAMETER * parameters * (SNAPSHOT_COPIES + REPLICA_COPIES * replicas)


def snapshot_bytes_needed(config: RunConfig, shape: ModelShape) -> int:
    """/dev/shm of one node in bytes."""
    return math.ceil(snapshot_bytes_of_run(config, shape.parameters) / config.fewest_nodes)


def check(config: RunConfig, placement: Placement, shape: ModelShape | None = None) -> Profile:
    """The run's profile; ``ConfigurationError`` with the number and the fix where the run cannot work on it."""
    profile = PROFILES[config.profile]
    if not placement.image:
        raise ConfigurationError("--image: no image for the training pods; give the one that the workflow's steps use")
    if profile.gpus and config.gpus_per_node != profile.gpus:
        raise ConfigurationError(
            f"--gpus-per-node: {config.gpus_per_node} does not match profile {profile.name}: {profile.instance_type} has "
            f"{profile.gpus} GPUs, and a pod takes all of them; use --gpus-per-node {profile.gpus}"
        )
    if shape is None:
        return profile
    needed, available = gpu_bytes_needed(config, shape), profile.gpu_memory_gib * GIB
    if profile.gpus and needed > available:
        raise ConfigurationError(
            f"--model: {config.model} needs at least {needed / GIB:.1f} GiB on each of {config.fewest_nodes * config.gpus_per_node} GPUs, "
            f"{(needed - available) / GIB:.1f} GiB more than the {profile.gpu_memory_gib} GiB of {profile.instance_type}; "
            f"{_advice(config, shape, available)}"
        )
    shm = placement.shm_gib or profile.shm_gib
    if (snapshot := snapshot_bytes_needed(config, shape)) > shm * GIB:
        raise ConfigurationError(
            f"--snapshot-interval-steps: the snapshots of {config.model} take {snapshot / GIB:.1f} GiB of each node's "
            f"/dev/shm, which has {shm} GiB; use more nodes{' (--min-nodes)' if config.min_nodes else ''}, or 0 to turn the node-local tier off"
        )
    return profile


def _advice(config: RunConfig, shape: ModelShape, available: int) -> str:
    for nodes in range(config.fewest_nodes + 1, 1025):
        if gpu_bytes_needed(config.model_copy(update={"nodes": nodes, "min_nodes": 0}), shape) <= available:
            return f"use --nodes {nodes}" if not config.min_nodes else f"use --min-nodes {nodes}, of as many --nodes or more"
    return "use a smaller --micro-batch-size, --sequence-length or --model"


# --- manifests ---------------------------------------------------------------------------------------------------------


def service(run_id: str, owner: Manifest | None = None) -> Manifest:
    """The run's headless Service: one for all attempts, since the pods' names differ by attempt."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(service_name(run_id), labels(run_id), owner),
        "spec": {
            "clusterIP": "None",
            # Ranks look for each other before any of them could be called ready.
            "publishNotReadyAddresses": True,
            "selector": {LABEL_RUN: run_id, LABEL_COMPONENT: TRAINING},
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        },
    }


def job(launch: Launch, placement: Placement, owner: Manifest | None = None) -> Manifest:
    """The Indexed Job of one attempt: a pod per node, each running ``steps.node``."""
    config = launch.config
    tags = labels(config.run_id) | {LABEL_ATTEMPT: str(launch.attempt)}
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": config.nodes,
        "parallelism": config.nodes,
        "backoffLimit": launch.max_pod_restarts,
        "activeDeadlineSeconds": placement.deadline_seconds,
        "ttlSecondsAfterFinished": placement.ttl_seconds,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": failure_policy(),
        "template": {"metadata": {"labels": tags}, "spec": pod(launch, placement)},
    }
    job_labels = dict(tags)
    if placement.queue:
        spec["suspend"] = True
        job_labels[LABEL_QUEUE] = placement.queue
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job_name(config.run_id, launch.attempt), job_labels, owner),
        "spec": spec,
    }


def failure_policy() -> Manifest:
    """Disruptions cost no restart; a code that another attempt would end with again fails the Job at once."""
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": sorted(map(int, FINAL_CODES))},
            },
        ]
    }


def pod(launch: Launch, placement: Placement) -> Manifest:
    """The pod of one node. It takes the whole node on a GPU profile, so placement needs no anti-affinity there."""
    config = launch.config
    profile = PROFILES[config.profile]
    spec: Manifest = {
        "restartPolicy": "Never",
        "subdomain": service_name(config.run_id),
        "serviceAccountName": placement.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(config.grace_seconds) + 10,
        "securityContext": pod_security(),
        "tolerations": tolerations(profile),
        "containers": [_container(launch, placement, profile)],
        "volumes": [
            {"name": "root", "persistentVolumeClaim": {"claimName": placement.claim}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{placement.shm_gib or profile.shm_gib}Gi"}},
        ],
    }
    if profile.instance_type:
        spec["nodeSelector"] = node_selector(profile)
    else:
        # Soft: a hard one would leave the replacement of a lost node's pod pending until that node is back.
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {LABEL_RUN: config.run_id, LABEL_ATTEMPT: str(launch.attempt)}},
            }
        ]
    return spec


def _container(launch: Launch, placement: Placement, profile: Profile) -> Manifest:
    config = launch.config
    return {
        "name": CONTAINER,
        "image": placement.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "steps.node"],
        "args": [
            "--run-directory", str(launch.paths.run),
            "--attempt", str(launch.attempt),
            "--node", "$(JOB_COMPLETION_INDEX)",
            "--rendezvous-host", rendezvous_host(config.run_id, launch.attempt),
            "--rendezvous-port", str(RENDEZVOUS_PORT),
            "--shm-gib", str(placement.shm_gib or profile.shm_gib),
        ],
        "env": [{"name": name, "value": value} for name, value in sorted(environment(profile).items())],
        "ports": [{"name": "rendezvous", "containerPort": RENDEZVOUS_PORT}],
        "resources": resources(profile, placement),
        "securityContext": container_security(profile),
        "volumeMounts": [
            {"name": "root", "mountPath": str(config.root)},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }  # fmt: skip


def resources(profile: Profile, placement: Placement) -> Manifest:
    """Requests and limits. /dev/shm counts against the memory limit, and extended resources must be equal in both."""
    fixed: Manifest = {"memory": f"{placement.memory_gib or profile.memory_gib}Gi"}
    if profile.gpus:
        fixed["nvidia.com/gpu"] = str(profile.gpus)
    if profile.efa:
        fixed["vpc.amazonaws.com/efa"] = str(profile.efa)
    if profile.hugepages_mib:
        fixed["hugepages-2Mi"] = f"{profile.hugepages_mib}Mi"
    # No CPU limit: throttled data and checkpoint threads would stall the GPUs.
    return {"requests": fixed | {"cpu": placement.cpus or profile.cpus}, "limits": dict(fixed)}


def environment(profile: Profile) -> dict[str, str]:
    """Variables of every training container. HOME is on /tmp since the root file system is read-only."""
    return {"HOME": "/tmp", "USER": NAME, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"} | dict(
        profile.environment
    )


def node_selector(profile: Profile) -> dict[str, str]:
    return {"node.kubernetes.io/instance-type": profile.instance_type}


def tolerations(profile: Profile) -> list[Manifest]:
    """The taints that EKS users put on accelerator nodes."""
    keys = [key for key, count in (("nvidia.com/gpu", profile.gpus), ("vpc.amazonaws.com/efa", profile.efa)) if count]
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]


def pod_security() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # Walking a petabyte to change its group would take longer than the training.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(profile: Profile | None = None) -> Manifest:
    """Nothing but IPC_LOCK, and that only where EFA registers memory."""
    capabilities: Manifest = {"drop": ["ALL"]}
    if profile is not None and profile.efa:
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities}


def _metadata(name: str, tags: dict[str, str], owner: Manifest | None) -> Manifest:
    metadata: Manifest = {"name": name, "labels": dict(tags)}
    if owner:
        metadata["ownerReferences"] = [owner]
    return metadata


def owner_reference(workflow: Manifest) -> Manifest:
    """Has the garbage collector remove what the run started once ``workflow`` is deleted."""
    return {
        "apiVersion": workflow["apiVersion"],
        "kind": workflow["kind"],
        "name": workflow["metadata"]["name"],
        "uid": workflow["metadata"]["uid"],
    }
