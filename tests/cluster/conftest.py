"""The cluster that the tests in this folder run on, or the reason why they are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cluster_support
import pytest
import yaml
from cluster_support import PROJECT, READER, Cluster, apply, command, environment, until

from steps import cluster as manifests
from steps.kubernetes_api import ApiServer
from trainer.errors import PipelineError

CALL_SECONDS = 15.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900 * cluster_support.PATIENCE))


@pytest.fixture(scope="session")
def api() -> ApiServer:
    """An API server with Argo Workflows; skips what asks for it where there is none."""
    if not (os.environ.get("KUBECONFIG") or (Path.home() / ".kube/config").exists()):
        pytest.skip("no cluster: set KUBECONFIG to one with Argo Workflows")
    try:
        api = ApiServer(environment("HOLDFAST_TEST_NAMESPACE"), CALL_SECONDS)
        extensions = api.client("ApiextensionsV1Api")
        found = api.call("get crd", extensions.read_custom_resource_definition, "workflows.argoproj.io")
    except PipelineError as error:
        pytest.skip(f"no cluster: {error}")
    if found is None:
        pytest.skip(f"the cluster at {api.host} has no Argo Workflows")
    return api


@pytest.fixture(scope="session")
def prepared(api: ApiServer) -> Iterator[Cluster]:
    """The cluster with everything that templates/cluster asks for, an image, and a pod that reads the claim."""
    for program in ("argo", "kubectl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on PATH")
    image = environment("HOLDFAST_TEST_IMAGE")
    if not image:
        pytest.skip("set HOLDFAST_TEST_IMAGE to the project's image (docker build -t ... . && docker push ...)")
    apply(*prerequisites("rbac.yaml", api.namespace), namespace=api.namespace)
    host_path = environment("HOLDFAST_TEST_HOSTPATH")
    if api.claim(manifests.CLAIM) is None:
        if not host_path:
            pytest.skip(
                f"there is no claim {manifests.CLAIM} in {api.namespace}, and no HOLDFAST_TEST_HOSTPATH to make one of"
            )
        apply(*prerequisites("storage-hostpath.yaml", api.namespace, host_path), namespace=api.namespace)
    cluster = Cluster(api, image, environment("HOLDFAST_CLUSTER_KIT"))
    try:
        cluster.place_reader()
        yield cluster
    finally:
        command("kubectl", "delete", "pod", "-n", api.namespace, READER, "--wait=false", check=False)
        write_table(cluster)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """What the steps of a failed test printed, before they are deleted."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.when == "call" and report.failed and isinstance(cluster, Cluster):
        report.sections += [
            (f"Workflow {name}", cluster.story(name, run_id)) for name, run_id in cluster.workflows.items()
        ]
    return report


@pytest.fixture
def cluster(prepared: Cluster) -> Iterator[Cluster]:
    """The prepared cluster; afterwards the test's Workflows are deleted, and nothing of their runs may be left."""
    prepared.workflows.clear()
    yield prepared
    for name in prepared.workflows:
        if prepared.phase(name) not in cluster_support.OVER:
            prepared.argo("terminate", name)
            until(f"the end of {name}", 120, lambda name=name: prepared.phase(name) in cluster_support.OVER)
    for run_id in set(prepared.workflows.values()):
        prepared.nothing_left(run_id, 120)  # (before the garbage collector has a part in it)
    for name in prepared.workflows:
        prepared.argo("delete", name)


def prerequisites(name: str, namespace: str, host_path: str = "") -> list[dict[str, Any]]:
    """The documents of templates/cluster/<name>, for another namespace and host path."""
    text = (PROJECT / "templates" / "cluster" / name).read_text()
    text = text.replace("namespace: holdfast\n", f"namespace: {namespace}\n")
    if host_path:
        text = text.replace("/var/lib/holdfast", host_path)
    return [document for document in yaml.safe_load_all(text) if document]


def write_table(cluster: Cluster) -> None:
    path = environment("HOLDFAST_DRILLS_TABLE")
    if not path or not cluster.outcomes:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=PROJECT, check=False
    )
    where = (
        f"{datetime.now(UTC):%Y-%m-%d}, {commit.stdout.strip()}, {cluster_support.versions(cluster.api)}, "
        f"nodes of {nodes(cluster.api)}, patience {cluster_support.PATIENCE:g}"
    )
    file = Path(path)
    before = file.read_text() if file.exists() else ""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(cluster_support.table(before, cluster.outcomes, where))


def nodes(api: ApiServer) -> str:
    """What the cluster's nodes are: "2 x 2 CPUs"."""
    found = (api.call("list nodes", api.core.list_node) or {}).get("items", [])
    sizes = sorted(node["status"]["capacity"]["cpu"] for node in found)
    return ", ".join(f"{sizes.count(size)} x {size} CPUs" for size in dict.fromkeys(sizes))
