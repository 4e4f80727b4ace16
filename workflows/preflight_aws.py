"""Checks of the AWS account: the cluster's version, the file system's place and speed, quotas, the image.

What is compared is computed by pure functions; each check asks AWS once, and an answer that is refused is a finding
that names the action, not the end of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from steps.cluster import SAVED_BYTES_PER_PARAMETER
from steps.profiles import PROFILES, Profile
from trainer.config import RunConfig
from trainer.errors import ExitCode
from workflows.findings import Finding

OLDEST_KUBERNETES = (1, 28)
ASSUMED_UTILISATION = 0.4
"""Of the GPUs' peak, to say how long a step will take before one was run."""
ECR = re.compile(
    r"^(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com/(?P<repository>[^:@]+)(:(?P<tag>[^@]+))?(@(?P<digest>sha256:\w+))?$"
)


@dataclass(frozen=True)
class Account:
    """Where to look."""

    cluster: str
    file_system: str
    image: str
    region: str = ""

    @cached_property
    def session(self) -> Any:
        """Made once: it reads the descriptions of AWS's services, which takes a while."""
        import boto3

        return boto3.session.Session(region_name=self.region or None)

    def client(self, service: str) -> Any:
        from botocore.config import Config

        config = Config(connect_timeout=5, read_timeout=20, retries={"max_attempts": 3, "mode": "standard"})
        return self.session.client(service, config=config)

    def every(self, service: str, operation: str, key: str, **arguments: Any) -> Iterator[Any]:
        """What an operation lists under ``key``, page after page."""
        for page in self.client(service).get_paginator(operation).paginate(**arguments):
            yield from page[key]


def checks(account: Account, config: RunConfig, node_zones: set[str], nodes_ready: int) -> Iterator[Finding]:
    """All of them. ``node_zones`` and ``nodes_ready`` are what the cluster said of the profile's nodes, if it was asked."""
    profile = PROFILES[config.profile]
    yield from _asked("credentials", lambda: [_identity(account)])
    zones = set(node_zones)
    if account.cluster:
        found = _asked("EKS cluster", lambda: [check_version(_cluster(account))])
        yield from found
        if profile.instance_type and not zones and found[0].status == "pass":
            yield from _asked("node groups", lambda: _zones_of_groups(account, profile, zones))
    else:
        yield Finding("AWS", "EKS cluster", "warn", "not checked: no --cluster", "name it: --cluster NAME")
    if account.file_system:
        yield from _asked("file system", lambda: check_file_system(account, config, zones))
    else:
        yield Finding("AWS", "file system", "warn", "not checked: no --file-system", "name it: --file-system fs-...")
    if profile.quota_code:
        yield from _asked("quota", lambda: [_quota(account, profile, config.nodes, nodes_ready)])
        yield from _asked("instances", lambda: [_offered(account, profile, zones)])
    yield from _asked("image", lambda: [_image(account)])


def _asked(name: str, ask: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of ``ask``, or the one that says why AWS did not answer it."""
    try:
        return list(ask())
    except Exception as error:
        if (said := said_by_aws(error)) is None:
            raise
        text, fix, code = said
        return [Finding("AWS", name, "fail", text, fix, int(code))]


def said_by_aws(error: Exception) -> tuple[str, str, ExitCode] | None:
    """What AWS or its client says with ``error``, what to do about it, and the code that stands for it; None of other errors."""
    from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

    if isinstance(error, ClientError):
        code, action = error.response["Error"]["Code"], error.operation_name
        if code.startswith(
            ("AccessDenied", "Unauthorized", "UnrecognizedClient", "InvalidClientToken", "ExpiredToken")
        ):
            return f"{action} was refused: {code}", f"allow the action {action} to this identity, or use another one", ExitCode.DENIED
        if code.endswith(("NotFound", "NotFoundException", "NotFoundFault")):
            return f"{action}: {error.response['Error']['Message']}", "check the name and the region", ExitCode.CONFIGURATION
        return f"{action}: {error.response['Error']['Message']}", "try again", ExitCode.UNAVAILABLE
    if isinstance(error, ParamValidationError):
        return str(error).splitlines()[-1], "check how it is spelt", ExitCode.CONFIGURATION
    if isinstance(error, BotoCoreError):
        denied = type(error).__name__ in (
            "NoCredentialsError",
            "PartialCredentialsError",
            "NoRegionError",
            "ProfileNotFound",
        )
        return str(error), "aws configure, or export AWS_PROFILE and AWS_REGION", ExitCode.DENIED if denied else ExitCode.UNAVAILABLE
    return None


def _identity(account: Account) -> Finding:
    return Finding("AWS", "credentials", "pass", account.client("sts").get_caller_identity()["Arn"])


# --- cluster ---


def _cluster(account: Account) -> dict[str, Any]:
    found: dict[str, Any] = account.client("eks").describe_cluster(name=account.cluster)["cluster"]
    return found


def check_version(cluster: dict[str, Any]) -> Finding:
    """Of what ``describe_cluster`` says: 1.28 or later, and active."""
    text = f"{cluster['name']}: Kubernetes {cluster['version']}, {cluster['status']}"
    oldest = ".".join(map(str, OLDEST_KUBERNETES))
    if tuple(map(int, cluster["version"].split(".")[:2])) < OLDEST_KUBERNETES:
        fix = f"upgrade to {oldest} or later: eksctl upgrade cluster --name {cluster['name']} --version {oldest} --approve"
        return Finding(
            "AWS", "EKS cluster", "fail", f"{text}; {oldest} is the oldest that works", fix, int(ExitCode.CONFIGURATION)
        )
    if cluster["status"] != "ACTIVE":
        return Finding("AWS", "EKS cluster", "fail", text, "wait until it is ACTIVE")
    return Finding("AWS", "EKS cluster", "pass", text)


def _zones_of_groups(account: Account, profile: Profile, zones: set[str]) -> list[Finding]:
    """Add to ``zones`` those in which node groups of the profile's instance type start nodes. Only errors are findings."""
    eks = account.client("eks")
    subnets: set[str] = set()
    for name in account.every("eks", "list_nodegroups", "nodegroups", clusterName=account.cluster):
        group = eks.describe_nodegroup(clusterName=account.cluster, nodegroupName=name)["nodegroup"]
        if profile.instance_type in group.get("instanceTypes", []):
            subnets |= set(group["subnets"])
    zones |= _zones(account, subnets)
    return []


def _zones(account: Account, subnets: set[str]) -> set[str]:
    if not subnets:
        return set()
    described = account.client("ec2").describe_subnets(SubnetIds=sorted(subnets))["Subnets"]
    return {subnet["AvailabilityZone"] for subnet in described}


# --- file system ---


def check_file_system(account: Account, config: RunConfig, zones: set[str]) -> Iterator[Finding]:
    found = account.client("fsx").describe_file_systems(FileSystemIds=[account.file_system])["FileSystems"]
    if not found:
        fix = "check the id and the region"
        yield Finding(
            "AWS", "file system", "fail", f"there is no {account.file_system}", fix, int(ExitCode.CONFIGURATION)
        )
        return
    system = found[0]
    state = system.get("Lifecycle", "AVAILABLE")
    if system["FileSystemType"] != "LUSTRE" or state not in ("AVAILABLE", "UPDATING"):
        yield Finding(
            "AWS", "file system", "fail", f"{system['FileSystemType']}, {state}", "use an available FSx for Lustre"
        )
        return
    yield check_zone(_zones(account, set(system["SubnetIds"])), zones)
    shape = _shape(config)
    yield check_capacity(system["StorageCapacity"], config, shape.parameters)
    yield check_speed(throughput(system), config, shape.parameters, step_seconds(config))


def _shape(config: RunConfig) -> Any:
    from steps.cluster import shape_of

    return shape_of(config.model)


def check_zone(storage: set[str], nodes: set[str]) -> Finding:
    """Lustre crosses zones only slowly, and at a price per byte."""
    if not nodes:
        fix = "start the node group, or name the cluster (--cluster)"
        return Finding("AWS", "zone", "warn", f"file system in {_list(storage)}; no nodes to compare with", fix)
    if not nodes <= storage:
        fix = f"run the nodes in {_list(storage)}, or make a file system in {_list(nodes)}"
        detail = f"file system in {_list(storage)}, nodes in {_list(nodes)}"
        return Finding("AWS", "zone", "fail", detail, fix, int(ExitCode.CONFIGURATION))
    return Finding("AWS", "zone", "pass", f"file system and nodes in {_list(nodes)}")


def throughput(system: dict[str, Any]) -> float:
    """Bytes per second that a file system of FSx for Lustre sustains (its baseline), from ``describe_file_systems``."""
    lustre = system.get("LustreConfiguration", {})
    fixed = lustre.get("ThroughputCapacity")
    if fixed:  # intelligent tiering: MB/s of the whole file system
        return float(fixed) * 1e6
    per_tib = lustre.get("PerUnitStorageThroughput") or 200  # SCRATCH
    return float(per_tib) * 1e6 * float(system["StorageCapacity"]) / 1024


def step_seconds(config: RunConfig) -> float | None:
    """How long a step will take, about; None for a profile without GPUs."""
    profile = PROFILES[config.profile]
    if not profile.peak_flops:
        return None
    from trainer.model import flops_per_token, model_config

    tokens = config.global_batch_size * config.sequence_length
    flops = flops_per_token(model_config(config.model, 0), config.sequence_length) * tokens
    return float(flops / (config.world_size * profile.peak_flops * ASSUMED_UTILISATION))


def check_capacity(capacity_gib: int, config: RunConfig, parameters: int) -> Finding:
    """Room for the checkpoints that are kept and the one that is being written."""
    needed = (config.keep_checkpoints + 1) * SAVED_BYTES_PER_PARAMETER * parameters
    text = (
        f"{config.keep_checkpoints} + 1 checkpoints of {config.model} take {needed / 1e9:.1f} GB of {capacity_gib} GiB"
    )
    if config.checkpoint_mode != "off" and needed > capacity_gib * 1024**3:
        return Finding(
            "AWS",
            "capacity",
            "fail",
            text,
            "fewer --keep-checkpoints, or a larger file system",
            int(ExitCode.CONFIGURATION),
        )
    return Finding("AWS", "capacity", "pass", text)


def check_speed(bytes_per_second: float, config: RunConfig, parameters: int, seconds_per_step: float | None) -> Finding:
    """How long a save takes, against the time between two of them."""
    size = SAVED_BYTES_PER_PARAMETER * parameters
    save = size / bytes_per_second
    text = f"a save of {size / 1e9:.1f} GB takes {save:.0f} s at {bytes_per_second / 1e6:.0f} MB/s"
    if seconds_per_step is None or config.checkpoint_mode == "off":
        return Finding("AWS", "checkpoint speed", "pass", text)
    between = config.checkpoint_interval_steps * seconds_per_step
    text += f"; {config.checkpoint_interval_steps} steps take about {between:.0f} s"
    enough = max(1, -(-int(2 * save * 1000) // max(1, int(seconds_per_step * 1000))))
    fix = f"--checkpoint-interval-steps {enough} or more, or a file system of {2 * size / between / 1e6:.0f} MB/s"
    if save > between:
        return Finding("AWS", "checkpoint speed", "fail", text, fix, int(ExitCode.CONFIGURATION))
    if 2 * save > between:
        return Finding("AWS", "checkpoint speed", "warn", text, fix)
    return Finding("AWS", "checkpoint speed", "pass", text)


# --- quota, offerings, image ---


def _quota(account: Account, profile: Profile, nodes: int, nodes_ready: int) -> Finding:
    if nodes_ready >= nodes:
        return Finding("AWS", "quota", "pass", f"{nodes_ready} nodes of {profile.instance_type} run already")
    client = account.client("service-quotas")
    try:
        quota = client.get_service_quota(ServiceCode="ec2", QuotaCode=profile.quota_code)["Quota"]["Value"]
    except client.exceptions.NoSuchResourceException:
        fix = "look at Service Quotas, EC2, Running On-Demand instances"
        return Finding("AWS", "quota", "warn", f"quota {profile.quota_code} is not known here", fix)
    return check_quota(quota, profile, nodes)


def check_quota(vcpus: float, profile: Profile, nodes: int) -> Finding:
    """On-demand vCPUs of the family. (Capacity blocks do not count against it.)"""
    needed = nodes * profile.vcpus
    text = f"{nodes} x {profile.instance_type} are {needed} vCPUs of a quota of {vcpus:.0f}"
    if needed > vcpus:
        fix = (
            f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {profile.quota_code} "
            f"--desired-value {needed} (not needed for a capacity block)"
        )
        return Finding("AWS", "quota", "fail", text, fix)
    return Finding("AWS", "quota", "pass", text)


def _offered(account: Account, profile: Profile, zones: set[str]) -> Finding:
    offers = account.client("ec2").describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [profile.instance_type]}]
    )["InstanceTypeOfferings"]
    offered = {offer["Location"] for offer in offers}
    text = f"{profile.instance_type} is offered in {_list(offered)}"
    if not offered or (zones and not zones & offered):
        fix = "use a zone or region that offers it, for the nodes and for the file system"
        return Finding("AWS", "instances", "fail", text, fix, int(ExitCode.CONFIGURATION))
    return Finding("AWS", "instances", "pass", text)


def _image(account: Account) -> Finding:
    if not account.image:
        return Finding("AWS", "image", "warn", "not checked: no --image", "name it: --image ...")
    match = ECR.match(account.image)
    if match is None:
        return Finding(
            "AWS",
            "image",
            "warn",
            f"{account.image} is not in ECR: not checked",
            "make sure that the nodes can pull it",
        )
    wanted = {"imageDigest": match["digest"]} if match["digest"] else {"imageTag": match["tag"] or "latest"}
    client = account.client("ecr")
    try:
        found = client.describe_images(
            registryId=match["account"], repositoryName=match["repository"], imageIds=[wanted]
        )
    except (client.exceptions.ImageNotFoundException, client.exceptions.RepositoryNotFoundException) as error:
        fix = f"docker push {account.image}"
        return Finding(
            "AWS", "image", "fail", str(error.response["Error"]["Message"]), fix, int(ExitCode.CONFIGURATION)
        )
    size = found["imageDetails"][0].get("imageSizeInBytes", 0)
    return Finding("AWS", "image", "pass", f"{account.image}, {size / 1e9:.1f} GB compressed")


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
