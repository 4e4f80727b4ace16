"""Preflight and the launcher against a real API server: what is missing is named, what is there is found."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_support import PROJECT, apply, command, environment, until

from steps import cluster, job_state
from steps.cluster import Placement
from steps.kubernetes import KubernetesLauncher, KubernetesOptions
from steps.kubernetes_api import ApiServer
from steps.launcher import Launch
from trainer.config import OneLineParser, RunConfig
from trainer.errors import ConfigurationError, DeniedError
from trainer.paths import RunPaths
from workflows import preflight


@pytest.fixture(scope="module")
def space(api: ApiServer) -> Iterator[ApiServer]:
    """A namespace of its own, empty."""
    name = f"holdfast-test-{secrets.token_hex(3)}"
    command("kubectl", "create", "namespace", name)
    yield ApiServer(name, 15.0)
    command("kubectl", "delete", "clusterrolebinding,clusterrole", f"{name}-nodes", check=False)
    command("kubectl", "delete", "namespace", name, "--wait=false")


def grant(space: ApiServer, without: tuple[str, str] | None = None) -> None:
    """Apply templates/cluster/rbac.yaml, less one verb of one resource."""
    documents = [d for d in yaml.safe_load_all((PROJECT / "templates/cluster/rbac.yaml").read_text()) if d]
    for document in documents:
        for rule in document.get("rules", []):
            if without and without[1] in rule["resources"]:
                rule["verbs"] = [verb for verb in rule["verbs"] if verb != without[0]]
        if "rules" in document:
            document["rules"] = [rule for rule in document["rules"] if rule["verbs"]]
        if document["kind"] in ("ClusterRole", "ClusterRoleBinding"):  # of the cluster: under a name of this test's own
            document["metadata"]["name"] = f"{space.namespace}-nodes"
        if document["kind"] == "ClusterRoleBinding":
            document["roleRef"]["name"] = f"{space.namespace}-nodes"
            document["subjects"][0]["namespace"] = space.namespace
    apply(*documents, namespace=space.namespace)


def run_preflight(
    space: ApiServer, capsys: pytest.CaptureFixture[str], *argv: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    parser = OneLineParser()
    preflight.add_arguments(parser)
    code = preflight.main(parser.parse_args(["--only", "cluster", "--json", "--namespace", space.namespace, *argv]))
    return code, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_an_empty_namespace_fails_with_what_is_missing(space: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_preflight(space, capsys, "--dataset-uri", "hf://a/b")
    assert code == 64
    for name in ("claim", "holdfast-steps", "holdfast-supervisor", "holdfast-training"):
        assert (found[name]["status"], found[name]["exit_code"]) == ("fail", 64), name
        assert "kubectl apply" in found[name]["fix"]
    assert found["hub token"]["status"] == "warn"
    assert found["version"]["status"] == "pass"
    assert found["run id"]["status"] == "pass"


@pytest.mark.parametrize(
    ("verb", "resource"),
    [("create", "jobs"), ("get", "pods/log"), ("get", "workflows"), ("create", "workflowtaskresults")],
)
def test_a_role_that_lacks_a_verb_is_told_which(
    space: ApiServer, capsys: pytest.CaptureFixture[str], verb: str, resource: str
) -> None:
    grant(space, (verb, resource))
    code, found = run_preflight(space, capsys)
    assert code in (64, 77)
    finding = found["holdfast-supervisor"]
    assert (finding["status"], finding["exit_code"]) == ("fail", 77)
    assert f"'{verb}' on {resource}" in finding["detail"]
    grant(space)
    _, found = run_preflight(space, capsys)
    assert found["holdfast-supervisor"]["status"] == "pass"
    assert found["holdfast-training"]["status"] == "pass"


def test_gpus_that_are_not_there_are_counted(space: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run_preflight(
        space,
        capsys,
        "--profile",
        "p5",
        "--nodes",
        "2",
        "--gpus-per-node",
        "8",
        "--global-batch-size",
        "16",
        "--micro-batch-size",
        "1",
    )
    assert found["nodes"]["detail"].startswith("0 ready of p5.48xlarge, 2 asked for")


def test_a_workflow_that_has_not_made_a_job_yet_holds_its_run(
    space: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(unattended("early"), namespace=space.namespace)
    try:
        _, found = run_preflight(space, capsys, "--run-id", "early")
        assert (found["run id"]["status"], "Workflow early is" in found["run id"]["detail"]) == ("warn", True)
        _, found = run_preflight(space, capsys, "--run-id", "another")
        assert found["run id"]["status"] == "pass"
    finally:
        command("kubectl", "delete", "workflow", "-n", space.namespace, "early")


def test_an_image_that_no_node_has_is_a_warning(space: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run_preflight(space, capsys, "--image", "absent.example/none:1")
    assert found["image"]["status"] == "warn"


def test_a_queue_that_is_not_there(space: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run_preflight(space, capsys, "--queue", "absent")
    assert found["queue"]["status"] == "fail"


def supervisor_api(space: ApiServer) -> ApiServer:
    """The API as the supervisor's service account sees it."""
    token = command("kubectl", "create", "token", "-n", space.namespace, cluster.SERVICE_ACCOUNT_SUPERVISOR).strip()
    api = ApiServer(space.namespace, 15.0)
    configuration = api.core.api_client.configuration
    configuration.cert_file = configuration.key_file = None
    configuration.api_key = {"authorization": f"Bearer {token}", "BearerToken": f"Bearer {token}"}
    import kubernetes

    client = kubernetes.client.ApiClient(configuration)
    api._api = client
    api.core, api.batch = kubernetes.client.CoreV1Api(client), kubernetes.client.BatchV1Api(client)
    api.custom = kubernetes.client.CustomObjectsApi(client)
    return api


def launch(run_id: str, nodes: int = 2) -> Launch:
    config = RunConfig(run_id=run_id, root=Path("/fsx"), profile="cpu", nodes=nodes, gpus_per_node=1, grace_seconds=2)
    return Launch(config, RunPaths(config.root, run_id), 1)


@pytest.mark.parametrize(
    ("verb", "resource"), [("create", "jobs"), ("list", "pods"), ("get", "nodes"), ("delete", "services")]
)
def test_the_launcher_refuses_to_start_what_it_could_not_look_after(space: ApiServer, verb: str, resource: str) -> None:
    """77, with the verb, before a Job is made."""
    grant(space, (verb, resource))
    one = launch("denied")
    launcher = KubernetesLauncher(one.config, KubernetesOptions(image="i"), supervisor_api(space))
    with pytest.raises(DeniedError, match=rf"'{verb}' on {resource}.*rbac\.yaml"):
        launcher.start(one)
    assert space.jobs("") == []
    grant(space)


def test_the_launcher_names_a_missing_claim_and_account(space: ApiServer) -> None:
    grant(space)
    one = launch("missing")
    launcher = KubernetesLauncher(one.config, KubernetesOptions(image="i", claim="absent"), supervisor_api(space))
    with pytest.raises(ConfigurationError, match="there is no claim 'absent'"):
        launcher.start(one)


def test_start_attach_release_with_the_supervisors_own_rights(space: ApiServer) -> None:
    """Everything the launcher does to the API, with exactly the rights of rbac.yaml; the image need not exist."""
    grant(space)
    apply(claim(), namespace=space.namespace)
    one = launch("rights")
    options = KubernetesOptions(image="absent.example/none:1")
    launcher = KubernetesLauncher(one.config, options, supervisor_api(space))
    assert launcher.attach() is None
    launcher.start(one)
    (job,) = space.jobs(cluster.selector("rights"))
    again = KubernetesLauncher(one.config, options, supervisor_api(space))
    assert again.attach() == 1
    again.start(one)
    assert [j["metadata"]["uid"] for j in space.jobs(cluster.selector("rights"))] == [job["metadata"]["uid"]], (
        "not made twice"
    )
    assert again.wait(one, lambda: "SIGTERM") == 75
    assert space.jobs(cluster.selector("rights")), "a supervisor that only goes itself leaves the Job"
    again.release()
    again.release()
    assert space.jobs(cluster.selector("rights")) == space.services(cluster.selector("rights")) == []
    assert space.pods(cluster.selector("rights")) == []


def test_a_job_that_finished_while_nobody_watched_is_not_started_again(space: ApiServer, tmp_path: Path) -> None:
    image = environment("HOLDFAST_TEST_IMAGE") or pytest.skip("set HOLDFAST_TEST_IMAGE to an image that has `true`")
    grant(space)
    container = {"name": cluster.CONTAINER, "image": image, "command": ["true"]}
    job = {
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": cluster.job_name("over", 1), "labels": cluster.labels("over") | {cluster.LABEL_ATTEMPT: "1"}},
        "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }  # fmt: skip
    apply(job, namespace=space.namespace)
    until("the Job's end", 120, lambda: job_state.holds(space.job(cluster.job_name("over", 1)) or {}, "Complete"))
    one = launch("over", nodes=1)
    one = Launch(one.config.model_copy(update={"root": tmp_path}), RunPaths(tmp_path, "over"), 1)
    launcher = KubernetesLauncher(one.config, KubernetesOptions(image=image), supervisor_api(space))
    assert launcher.attach() is None, "of a run that has not taken an attempt here"
    one.paths.fence.parent.mkdir(parents=True)
    one.paths.fence.write_text("1")
    assert launcher.attach() == 1
    assert launcher.wait(one, lambda: None) == 0
    one.paths.fence.write_text("2")
    assert launcher.attach() is None
    launcher.release()


def test_a_queued_job_waits_for_kueue(space: ApiServer) -> None:
    grant(space)
    apply(claim(), namespace=space.namespace)
    one = launch("queued")
    launcher = KubernetesLauncher(one.config, KubernetesOptions(image="i:1", queue="gpus"), supervisor_api(space))
    launcher.start(one)
    (job,) = space.jobs(cluster.selector("queued"))
    until("the suspension", 20, lambda: space.job(job["metadata"]["name"])["status"].get("conditions"))  # type: ignore[index]
    assert space.pods(cluster.selector("queued")) == []
    launcher.release()


def test_a_node_with_p5s_devices_takes_a_p5_pod_as_far_as_the_kubelet(space: ApiServer) -> None:
    """Server-side dry run of the pod itself: security context, huge pages, devices."""
    config = RunConfig(profile="p5", nodes=1, gpus_per_node=8, global_batch_size=8, micro_batch_size=1)
    spec = cluster.pod(Launch(config, RunPaths(config.root, "run"), 1), Placement(image="i", service_account="default"))
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p5"}, "spec": spec}
    apply(document | {"metadata": {"name": "p5"}}, namespace=space.namespace)
    command("kubectl", "delete", "pod", "-n", space.namespace, "p5", "--wait=false")


def unattended(run_id: str) -> dict[str, Any]:
    """The committed Workflow for another controller's instance: to this cluster's it is as if there were no controller."""
    document: dict[str, Any] = yaml.safe_load((PROJECT / "templates" / "training.yaml").read_text())
    del document["metadata"]["generateName"]
    document["metadata"]["name"] = run_id
    document["metadata"]["labels"]["workflows.argoproj.io/controller-instanceid"] = "nobody"
    for item in document["spec"]["arguments"]["parameters"]:
        item["value"] = run_id if item["name"] == "run-id" else item["value"]
    return document


def claim() -> dict[str, Any]:
    """A claim that nobody binds: enough for what makes Jobs, too little for pods to run."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": cluster.CLAIM},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
