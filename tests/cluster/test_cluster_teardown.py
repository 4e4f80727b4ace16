"""Teardown against a real API server: what goes, what stays, and what keeps the rest from nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
from cluster_support import apply, command, until
from test_cluster_preflight import claim, grant, launch, space, unattended

from steps import cluster
from steps.kubernetes import KubernetesLauncher, KubernetesOptions
from steps.kubernetes_api import ApiServer
from trainer.errors import UnavailableError
from workflows import teardown
from workflows.preflight_aws import Account

__all__ = ["space"]  # (the fixture)

OPTIONS = KubernetesOptions(image="absent.example/none:1")
ROLE = "arn:aws:iam::123456789012:role/eks"


@pytest.fixture
def account() -> Iterator[Account]:
    """An EKS cluster with a node group of p5s, as far as AWS is concerned."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:{1}".format(*server.get_host_and_port()))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-west-2")
        account = Account("train", "", "", "us-west-2")
        ec2, eks = account.client("ec2"), account.client("eks")
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
        eks.create_cluster(name="train", version="1.33", roleArn=ROLE, resourcesVpcConfig={"subnetIds": [subnet]})
        eks.create_nodegroup(
            clusterName="train", nodegroupName="gpu", nodeRole=ROLE, subnets=[subnet], instanceTypes=["p5.48xlarge"],
            scalingConfig={"minSize": 1, "maxSize": 4, "desiredSize": 2},
        )  # fmt: skip
        yield account
    server.stop()


def tear(space: ApiServer, *argv: str) -> int:
    parser = argparse.ArgumentParser()
    teardown.add_arguments(parser)
    return teardown.main(parser.parse_args(["--namespace", space.namespace, *argv]))


def start(space: ApiServer, run_id: str, workflow: str = "") -> str:
    """A Job of a run, whose pod never gets further than its image; returns the Job's name."""
    grant(space)
    apply(claim(), namespace=space.namespace)
    one = launch(run_id, nodes=1)
    KubernetesLauncher(one.config, KubernetesOptions(image=OPTIONS.image, workflow=workflow), space).start(one)
    return cluster.job_name(run_id, 1)


def test_teardown_of_one_run_takes_that_run_only_and_a_dry_run_takes_nothing(
    space: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for run_id in ("one", "two"):
        start(space, run_id)

    def told(*argv: str) -> str:
        assert tear(space, "--stage-seconds", "90", *argv) == 0
        return capsys.readouterr().out

    assert "would remove Job holdfast-one-1" in told("--run-id", "one")
    assert len(space.jobs("")) == 2
    assert "removing Job holdfast-one-1" in told("--run-id", "one", "--execute")
    assert [job["metadata"]["name"] for job in space.jobs("")] == ["holdfast-two-1"]
    assert "nothing to do" in told("--run-id", "one", "--execute"), "again: nothing is left of it"
    shown = told("--execute")
    assert shown.index("removing Job holdfast-two-1") < shown.index(f"removing claim {cluster.CLAIM}")
    assert space.jobs("") == []
    assert space.claim(cluster.CLAIM) is None


def test_teardown_goes_on_to_the_jobs_of_a_workflow_that_nobody_ends(
    space: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(unattended("unattended"), namespace=space.namespace)
    start(space, "unattended")
    words = ["--run-id", "unattended", "--execute", "--stage-seconds", "20"]
    try:
        with pytest.raises(UnavailableError, match="not gone after 20 s: Workflow unattended"):
            tear(space, *words)
        assert "removing Job holdfast-unattended-1" in capsys.readouterr().out
        assert space.jobs(cluster.selector("unattended")) == []
        assert space.workflow("unattended")["spec"]["shutdown"] == "Stop"  # type: ignore[index]
    finally:
        command("kubectl", "delete", "workflow", "-n", space.namespace, "unattended")
    assert tear(space, *words) == 0


def test_the_jobs_of_a_benchmarks_arms_go_although_its_workflow_is_over(space: ApiServer) -> None:
    workflow = unattended("bench")
    workflow["metadata"]["labels"] |= {"workflows.argoproj.io/completed": "true", cluster.LABEL_RUN: "bench"}
    apply(workflow, namespace=space.namespace)
    name = start(space, "bench-bare", workflow="bench")
    try:
        assert tear(space, "--run-id", "another", "--execute") == 0
        assert space.job(name) is not None
        assert tear(space, "--run-id", "bench", "--execute", "--stage-seconds", "60") == 0
        assert space.job(name) is None
    finally:
        command("kubectl", "delete", "workflow", "-n", space.namespace, "bench")


def test_a_pod_that_does_not_go_keeps_no_node_group_from_being_scaled_down(
    space: ApiServer, account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    start(space, "held")
    selector = cluster.selector("held")
    until("its pod", 30, lambda: bool(space.pods(selector)))
    (pod,) = space.pods(selector)
    patch = ["kubectl", "patch", "pod", "-n", space.namespace, pod["metadata"]["name"], "--type=merge", "-p"]
    command(*patch, '{"metadata": {"finalizers": ["holdfast.example/held"]}}')
    try:
        with pytest.raises(UnavailableError, match="not gone after 10 s: Job holdfast-held-1"):
            tear(space, "--cluster", "train", "--region", "us-west-2", "--execute", "--stage-seconds", "10")
        shown = capsys.readouterr().out
        assert "3. claim and volume: skipped" in shown
        group = account.client("eks").describe_nodegroup(clusterName="train", nodegroupName="gpu")["nodegroup"]
        assert group["scalingConfig"]["desiredSize"] == 0
    finally:
        command(*patch, '{"metadata": {"finalizers": null}}')
    assert tear(space, "--execute", "--stage-seconds", "60") == 0
    assert space.claim(cluster.CLAIM) is None


def test_a_volume_whose_data_would_go_with_its_claim_stays_with_it(
    space: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{space.namespace}-volume"
    volume = {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "persistentVolumeReclaimPolicy": "Delete",
            "hostPath": {"path": "/var/lib/holdfast-nothing"}, "claimRef": {"namespace": space.namespace, "name": cluster.CLAIM},
        },
    }  # fmt: skip
    bound = claim()
    bound["spec"]["volumeName"] = name
    apply(volume, bound, namespace=space.namespace)
    try:
        until("the claim to be bound", 30, lambda: (space.claim(cluster.CLAIM) or {})["status"]["phase"] == "Bound")
        assert tear(space, "--execute", "--stage-seconds", "30") == 0
        assert f"claim {cluster.CLAIM} and volume {name} stay: the volume's reclaim policy is Delete" in capsys.readouterr().out
        assert space.claim(cluster.CLAIM) is not None
        command("kubectl", "patch", "pv", name, "-p", '{"spec": {"persistentVolumeReclaimPolicy": "Retain"}}')
        assert tear(space, "--execute", "--stage-seconds", "60") == 0
        assert space.claim(cluster.CLAIM) is None
    finally:
        command("kubectl", "delete", "pv", name, "--ignore-not-found", "--wait=false")
