"""``run.py submit`` against a real Argo server: HOLDFAST_TEST_ARGO_SERVER is its address."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hera.workflows import WorkflowsService

from trainer.errors import ConfigurationError, UnavailableError
from workflows.parameters import arguments, cluster_config
from workflows.submission import Server, authored
from workflows.training import training_pipeline

# Hera 7.1 calls a method that pydantic has deprecated.
pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore:The `json` method is deprecated")]

RUN = Path(__file__).resolve().parent.parent.parent / "workflows" / "run.py"
PLACEMENT = {"image": "holdfast:none", "queue": "", "node-cpus": "", "node-memory-gib": "0", "node-shm-gib": "0"}


@pytest.fixture
def address() -> str:
    found = os.environ.get("HOLDFAST_TEST_ARGO_SERVER", "")
    if not found:
        pytest.skip("set HOLDFAST_TEST_ARGO_SERVER to the address of an Argo server, as http://127.0.0.1:2746")
    return found


@pytest.fixture
def namespace() -> str:
    return os.environ.get("HOLDFAST_TEST_NAMESPACE") or "default"


@pytest.fixture
def service(address: str, namespace: str) -> Iterator[WorkflowsService]:
    """The server as Hera talks to it; what the test submitted is deleted afterwards."""
    found = WorkflowsService(host=address, namespace=namespace, verify_ssl=False)
    before = {item.metadata.name for item in found.list_workflows().items or ()}
    yield found
    for item in found.list_workflows().items or ():
        if item.metadata.name not in before:
            found.delete_workflow(item.metadata.name)


def test_the_server_has_what_was_committed_with_our_values(
    address: str, namespace: str, service: WorkflowsService
) -> None:
    run_id = f"submit-{secrets.token_hex(4)}"
    flags = ["--run-id", run_id, "--nodes", "2", "--gpus-per-node", "1", "--image", PLACEMENT["image"]]
    done = subprocess.run(
        [sys.executable, str(RUN), "submit", "--argo-server", address, "--namespace", namespace, *flags],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name = done.stdout.split()[1]
    stored = service.get_workflow(name)
    config = cluster_config(run_id=run_id, nodes=2, gpus_per_node=1)
    assert {item.name: item.value for item in stored.spec.arguments.parameters} == PLACEMENT | arguments(config)
    names = [template.name for template in stored.spec.templates]
    assert names == [template["name"] for template in training_pipeline().to_dict()["spec"]["templates"]]
    assert Server(address, namespace, "").running(run_id) == [name]


def test_waiting_ends_at_its_deadline_and_says_where_the_workflow_is(
    address: str, namespace: str, service: WorkflowsService
) -> None:
    server = Server(address, namespace, "")
    workflow = authored(cluster_config(run_id=f"submit-{secrets.token_hex(4)}"), PLACEMENT)
    workflow.suspend = True
    name = server.submit(workflow)
    with pytest.raises(UnavailableError, match=f"{name} has not ended after 6 s"):
        server.wait(name, 6)


def test_a_namespace_that_is_not_there_is_refused(address: str, service: WorkflowsService) -> None:
    with pytest.raises(ConfigurationError, match="not found"):
        Server(address, "no-such-namespace", "").submit(training_pipeline())
