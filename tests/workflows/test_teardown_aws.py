"""Teardown's AWS half against a server that speaks AWS's protocols (moto), and how a stage is gone through."""

from __future__ import annotations

import argparse
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from trainer.errors import ConfigurationError, DeniedError, UnavailableError
from workflows import teardown
from workflows.preflight_aws import Account
from workflows.teardown import Step

REGION = "us-west-2"
ROLE = "arn:aws:iam::123456789012:role/eks"


@pytest.fixture(scope="module")
def account() -> Iterator[Account]:
    """A cluster made by eksctl with a p5, a g5 and a system node group; a file system made by Terraform."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    _, port = server.get_host_and_port()
    reset = urllib.request.Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset, timeout=10).close()  # what the servers of one process hold, they share
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        account = Account("train", "", "", REGION)
        ec2, eks = account.client("ec2"), account.client("eks")
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
        eks.create_cluster(
            name="train", version="1.33", roleArn=ROLE, resourcesVpcConfig={"subnetIds": [subnet]},
            tags={"alpha.eksctl.io/cluster-name": "train"},
        )  # fmt: skip
        for name, kind in (("gpu", "p5.48xlarge"), ("small", "g5.48xlarge"), ("system", "m5.large")):
            eks.create_nodegroup(
                clusterName="train", nodegroupName=name, nodeRole=ROLE, subnets=[subnet], instanceTypes=[kind],
                scalingConfig={"minSize": 1, "maxSize": 4, "desiredSize": 2},
            )  # fmt: skip
        fsx = account.client("fsx")
        tags = [{"Key": "ManagedBy", "Value": "terraform"}]
        fsx.create_file_system(FileSystemType="LUSTRE", StorageCapacity=1200, SubnetIds=[subnet], Tags=tags)
        fsx.create_file_system(FileSystemType="LUSTRE", StorageCapacity=2400, SubnetIds=[subnet])
        account.client("ecr").create_repository(repositoryName="holdfast")
        account.client("ecr").create_repository(repositoryName="somebody-elses")
        yield account
    server.stop()


def sizes(account: Account) -> dict[str, int]:
    eks = account.client("eks")
    groups = (
        eks.describe_nodegroup(clusterName="train", nodegroupName=n)["nodegroup"] for n in ("gpu", "small", "system")
    )
    return {group["nodegroupName"]: group["scalingConfig"]["desiredSize"] for group in groups}


def test_a_dry_run_names_the_gpu_groups_and_changes_nothing(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sizes(account)
    teardown.run_stage("4. node groups", teardown.group_steps(account), execute=False, limit_seconds=1)
    shown = capsys.readouterr().out
    assert "would remove 2 nodes of node group gpu" in shown
    assert "small" in shown
    assert "system" not in shown
    assert sizes(account) == before == {"gpu": 2, "small": 2, "system": 2}


def test_executed_the_gpu_groups_are_at_zero_and_a_second_time_there_is_nothing_to_do(account: Account) -> None:
    teardown.run_stage("4. node groups", teardown.group_steps(account), execute=True, limit_seconds=30)
    assert sizes(account) == {"gpu": 0, "small": 0, "system": 2}
    assert teardown.group_steps(account) == []


def test_what_a_tool_owns_is_listed_with_that_tools_command_and_stays(account: Account) -> None:
    items = {item.what: item.command for item in teardown.left(account)}
    systems = {what: command for what, command in items.items() if what.startswith("FSx")}
    assert sorted(command.split()[0] for command in systems.values()) == ["aws", "terraform"]
    assert items["EKS cluster train"] == "eksctl delete cluster --name train"
    assert [what for what in items if "ECR" in what] == ["ECR repository holdfast"]
    kinds = [what.split()[0] for what in items]
    assert kinds == sorted(kinds, key=["FSx", "ECR", "EKS"].index), "the order that does not hang"
    assert len(account.client("fsx").describe_file_systems()["FileSystems"]) == 2


def test_a_listing_goes_on_after_its_first_page(account: Account) -> None:
    one = {"PaginationConfig": {"PageSize": 1}}
    groups = account.every("eks", "list_nodegroups", "nodegroups", clusterName="train", **one)
    assert list(groups) == ["gpu", "small", "system"]
    assert len(list(account.every("fsx", "describe_file_systems", "FileSystems", **one))) == 2
    assert len(account.client("eks").list_nodegroups(clusterName="train", maxResults=1)["nodegroups"]) == 1


def test_without_an_api_server_the_aws_half_is_done_and_the_other_named(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kubeconfig = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x", "users": [{"name": "x", "user": {}}],
        "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(teardown, "PATIENCE_SECONDS", 1.0)
    account.client("eks").update_nodegroup_config(
        clusterName="train", nodegroupName="gpu", scalingConfig={"minSize": 0, "maxSize": 4, "desiredSize": 2}
    )
    parser = argparse.ArgumentParser()
    teardown.add_arguments(parser)
    arguments = ["--cluster", "train", "--region", REGION, "--stage-seconds", "30"]
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="did not answer for 1 s"):
        teardown.main(parser.parse_args(arguments))
    assert sizes(account)["gpu"] == 2, "not told to"
    with pytest.raises(UnavailableError, match="did not answer for 1 s"):
        teardown.main(parser.parse_args([*arguments, "--execute"]))
    assert time.monotonic() - started < 60
    assert sizes(account) == {"gpu": 0, "small": 0, "system": 2}
    shown = capsys.readouterr().out
    assert "claim and volume: skipped" in shown
    assert "run teardown again before nodes are started" in shown
    assert "5. left to its owner" in shown
    with pytest.raises(UnavailableError, match="list workflows"):  # there is no other half to do
        teardown.main(parser.parse_args(["--execute"]))


def test_what_aws_refuses_is_said_before_anything_is_changed(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no API server to change anything at either: its error would come first."""
    parser = argparse.ArgumentParser()
    teardown.add_arguments(parser)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "/nowhere")
    with pytest.raises(ConfigurationError, match=r"AWS: DescribeCluster: .*elsewhere.*; check the name and the region"):
        teardown.asked(lambda: account.client("eks").describe_cluster(name="elsewhere"))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DeniedError, match=r"AWS: You must specify a region\.; aws configure"):
        teardown.main(parser.parse_args(["--cluster", "train", "--execute"]))


def test_a_stage_that_the_next_need_not_wait_for_says_so_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    stuck = Step("Workflow that nobody ends", lambda: None, lambda: False)
    left = teardown.run_stage("1. workflows", [stuck], True, 0, otherwise=teardown.NO_CONTROLLER)
    assert left.startswith("not gone after 0 s: Workflow that nobody ends;")
    shown = capsys.readouterr().out
    assert left in shown
    assert "rollout restart deployment workflow-controller" in shown


def test_a_stage_that_does_not_end_is_given_up_in_bounded_time_and_names_what_is_left() -> None:
    stuck = Step("claim with a finalizer", lambda: None, lambda: False)
    done = Step("Job that went", lambda: None, lambda: True)
    with pytest.raises(UnavailableError, match=r"not gone after 0 s: claim with a finalizer; .*run teardown again"):
        teardown.run_stage("3. claim", [done, stuck], execute=True, limit_seconds=0)


def test_every_step_is_begun_before_any_is_waited_for() -> None:
    begun: list[str] = []
    steps = [Step(name, lambda name=name: begun.append(name), lambda: len(begun) == 3) for name in "abc"]  # type: ignore[misc]
    teardown.run_stage("2. jobs", steps, execute=True, limit_seconds=5)
    assert begun == ["a", "b", "c"]


def test_one_runs_teardown_never_touches_node_groups() -> None:
    parser = argparse.ArgumentParser()
    teardown.add_arguments(parser)
    with pytest.raises(ConfigurationError, match="other runs may use"):
        teardown.main(parser.parse_args(["--run-id", "a", "--cluster", "train"]))


def test_nothing_is_executed_unless_asked() -> None:
    parser = argparse.ArgumentParser()
    teardown.add_arguments(parser)
    assert parser.parse_args([]).execute is False
    assert parser.parse_args(["--execute"]).execute is True
