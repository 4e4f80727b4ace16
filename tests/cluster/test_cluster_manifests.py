"""What is committed, read by the real thing: Argo's linter and the API server itself."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cluster_support import PROJECT

from steps import cluster
from steps.cluster import Placement
from steps.kubernetes_api import ApiServer
from steps.launcher import Launch
from steps.profiles import PROFILES
from trainer.config import RunConfig
from trainer.paths import RunPaths

WORKFLOWS = sorted((PROJECT / "templates").glob("*.yaml"))


@pytest.mark.skipif(shutil.which("argo") is None, reason="argo is not on PATH")
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_argo_lint_accepts_every_committed_workflow(path: Path) -> None:
    done = subprocess.run(
        ["argo", "lint", "--offline", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_the_api_server_takes_the_job_and_service_of_every_profile(api: ApiServer, profile: str) -> None:
    gpus = PROFILES[profile].gpus or 2
    config = RunConfig(
        run_id="x" * 40, root=Path("/fsx"), profile=profile, nodes=16, gpus_per_node=gpus,  # type: ignore[arg-type]
        global_batch_size=16 * gpus, micro_batch_size=1,
    )  # fmt: skip
    launch = Launch(config, RunPaths(config.root, config.run_id), 9999)
    for document in (cluster.job(launch, Placement(image="i", queue="q")), cluster.service(config.run_id)):
        # Strict: a field that the server does not know is an error, not dropped.
        done = subprocess.run(
            ["kubectl", "create", "-n", api.namespace, "--dry-run=server", "--validate=strict", "-f", "-"],
            input=json.dumps(document), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((PROJECT / "templates" / "cluster").glob("*.yaml")), ids=lambda path: path.name)
def test_the_api_server_takes_every_prerequisite(api: ApiServer, path: Path) -> None:
    if path.name in ("eksctl.yaml", "argo-controller.yaml"):
        pytest.skip("for eksctl and kubectl patch, not for the API server")
    text = path.read_text().replace("namespace: holdfast\n", f"namespace: {api.namespace}\n")
    text = text.replace("holdfast-fsx", "holdfast-fsx-dry-run")  # (the drills have made one, and a volume cannot be changed)
    command = ["kubectl", "apply", "--dry-run=server", "--validate=strict", "-f", "-"]
    if path.name in ("rbac.yaml", "network-policy.yaml"):
        command += ["-n", api.namespace]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
