"""``run.py preflight``: what would stop or spoil a run, found before a GPU is paid for.

A table with pass, warn or fail for each check, and the fix for what is not a pass. Ends with 0, or with the exit code
of the first failure (64 configuration, 69 unavailable, 77 denied). Nothing is changed anywhere.
"""

from __future__ import annotations

import argparse
from typing import Any

from steps import cluster
from steps.cluster import Placement
from steps.profiles import PROFILES
from trainer.config import RunConfig, add_flags, from_namespace
from trainer.errors import ConfigurationError, ExitCode, PipelineError, code_of
from workflows import findings, preflight_aws, preflight_cluster
from workflows.findings import Finding

FIELDS = (
    "run_id", "profile", "nodes", "gpus_per_node", "model", "sequence_length", "global_batch_size", "micro_batch_size",
    "dataset_uri", "checkpoint_mode", "checkpoint_interval_steps", "keep_checkpoints", "snapshot_interval_steps",
    "snapshot_replicas",
)  # fmt: skip
PATIENCE_SECONDS = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, FIELDS)
    parser.add_argument("--image", default="", help="image of the steps and training pods")
    parser.add_argument("--namespace", default="", help="namespace of the Workflows [the kubeconfig's]")
    parser.add_argument("--queue", default="", help="Kueue's local queue, if one is used")
    parser.add_argument("--cluster", default="", help="name of the EKS cluster")
    parser.add_argument("--region", default="", help="AWS region [the AWS configuration's]")
    parser.add_argument("--file-system", default="", help="id of the FSx file system [the one behind the claim]")
    parser.add_argument("--only", choices=("aws", "cluster"), default="", help="leave out the other half")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(args: argparse.Namespace) -> int:
    """Run all checks that ``args`` asks for and print them. Returns the exit code."""
    config = from_namespace(args)
    found = [check_fit(config, args.image)]
    zones: set[str] = set()
    ready = 0
    file_system = args.file_system
    if args.only != "aws":
        try:
            from steps.kubernetes_api import ApiServer

            api = ApiServer(args.namespace, PATIENCE_SECONDS)
            found += list(preflight_cluster.checks(api, config, args.image, args.queue))
            nodes = preflight_cluster.matching_nodes(api, PROFILES[config.profile])
            zones, ready = preflight_cluster.zones(nodes), len(nodes)
            file_system = file_system or preflight_cluster.file_system_of(api)
        except PipelineError as error:
            fix = "aws eks update-kubeconfig --name CLUSTER, or --only aws"
            found.append(Finding("cluster", "API server", "fail", str(error), fix, code_of(error)))
    if args.only != "cluster":
        account = preflight_aws.Account(args.cluster, file_system, args.image, args.region)
        found += list(preflight_aws.checks(account, config, zones, ready))
    print(findings.as_json(found) if args.json else findings.table(found))
    return findings.exit_code(found)


def check_fit(config: RunConfig, image: str) -> Finding:
    """Whether the configuration can work on the profile at all: the checks that the supervisor makes, made early."""
    try:
        shape: Any = cluster.shape_of(config.model)
        cluster.check(config, Placement(image=image or "unknown"), shape)
    except ConfigurationError as error:
        return Finding("run", "configuration", "fail", str(error), "see above", int(ExitCode.CONFIGURATION))
    profile = PROFILES[config.profile]
    text = f"{config.model} on {config.nodes} x {profile.instance_type or 'any node'}"
    if profile.gpus:
        needed = cluster.gpu_bytes_needed(config, shape) / cluster.GIB
        text += f": at least {needed:.1f} of {profile.gpu_memory_gib} GiB a GPU"
    return Finding("run", "configuration", "pass", text)
