"""Teardown's AWS half against a server that speaks AWS's protocols (moto), and how a stage is gone through."""

from __future__ import annotations

import argparse
import urllib.request
from collections.abc import Iterator

import pytest

from trainer.errors import ConfigurationError, UnavailableError
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
