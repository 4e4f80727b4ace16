"""Preflight's AWS half, against a server that speaks AWS's protocols (moto), and its arithmetic."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.profiles import PROFILES
from trainer.config import RunConfig
from workflows import preflight_aws
from workflows.findings import Finding
from workflows.preflight_aws import Account

REGION = "us-west-2"
ACCOUNT_ID = "123456789012"
IMAGE = f"{ACCOUNT_ID}.dkr.ecr.{REGION}.amazonaws.com/holdfast:0.1.0"


def config(**fields: Any) -> RunConfig:
    values: dict[str, Any] = {
        "profile": "p5", "nodes": 2, "gpus_per_node": 8, "model": "llama-3.1-8b", "sequence_length": 8192,
        "global_batch_size": 16, "micro_batch_size": 1, "root": Path("/fsx"), "checkpoint_interval_steps": 100,
    }  # fmt: skip
    return RunConfig(**(values | fields))


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


# --- against the server ---


@pytest.fixture(scope="module")
def aws() -> Iterator[Any]:
    """A moto server, and the environment that leads boto3 to it."""
    import boto3
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
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        yield boto3.session.Session(region_name=REGION)
    server.stop()


@pytest.fixture(scope="module")
def stack(aws: Any) -> dict[str, Any]:
    """A cluster with a p5 node group in one zone, two file systems in two zones, and an image."""
    ec2, eks, fsx, ecr = (aws.client(service) for service in ("ec2", "eks", "fsx", "ecr"))
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnets = {
        zone: ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{n}.0/24", AvailabilityZone=f"{REGION}{zone}")["Subnet"][
            "SubnetId"
        ]
        for n, zone in enumerate("ab")
    }
    role = f"arn:aws:iam::{ACCOUNT_ID}:role/eks"
    for name, version in (("train", "1.33"), ("old", "1.27")):
        eks.create_cluster(
            name=name, version=version, roleArn=role, resourcesVpcConfig={"subnetIds": list(subnets.values())}
        )
    eks.create_nodegroup(
        clusterName="train", nodegroupName="p5", nodeRole=role, subnets=[subnets["a"]], instanceTypes=["p5.48xlarge"],
        scalingConfig={"minSize": 0, "maxSize": 2, "desiredSize": 2},
    )  # fmt: skip

    def file_system(zone: str, gib: int, per_tib: int) -> str:
        made = fsx.create_file_system(
            FileSystemType="LUSTRE", StorageCapacity=gib, StorageType="SSD", SubnetIds=[subnets[zone]],
            LustreConfiguration={"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": per_tib},
        )  # fmt: skip
        return str(made["FileSystem"]["FileSystemId"])

    ecr.create_repository(repositoryName="holdfast")
    ecr.put_image(
        repositoryName="holdfast", imageTag="0.1.0",
        imageManifest='{"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json", "config": '
        '{"mediaType": "a", "size": 1, "digest": "sha256:aa"}, "layers": [{"mediaType": "b", "size": 5, "digest": "sha256:bb"}]}',
    )  # fmt: skip
    return {
        "session": aws,
        "fast": file_system("a", 9600, 1000),
        "other_zone": file_system("b", 9600, 1000),
        "small": file_system("a", 1200, 125),
    }


def run(
    stack: dict[str, Any], file_system: str = "fast", cluster: str = "train", image: str = IMAGE, **fields: Any
) -> list[Finding]:
    account = Account(cluster, stack.get(file_system, file_system), image, REGION)
    account.__dict__["session"] = stack["session"]  # where cached_property keeps it: one for all tests saves seconds
    return list(preflight_aws.checks(account, config(**fields), set(), 0))


def test_a_sound_account_has_no_failure(stack: dict[str, Any]) -> None:
    found = run(stack)
    assert [f for f in found if f.status == "fail"] == []
    for name in ("credentials", "EKS cluster", "zone", "capacity", "checkpoint speed", "instances", "image"):
        assert named(found, name).status == "pass", named(found, name)
    assert "96.4 GB takes 10 s at 9375 MB/s" in named(found, "checkpoint speed").detail


def test_an_old_cluster_is_refused_with_its_version(stack: dict[str, Any]) -> None:
    finding = named(run(stack, cluster="old"), "EKS cluster")
    assert (finding.status, finding.exit_code) == ("fail", 64)
    assert "1.27" in finding.detail
    assert "1.28" in finding.fix


def test_a_file_system_in_another_zone_is_refused_with_both(stack: dict[str, Any]) -> None:
    finding = named(run(stack, "other_zone"), "zone")
    assert (finding.status, finding.exit_code) == ("fail", 64)
    assert "us-west-2b" in finding.detail
    assert "us-west-2a" in finding.detail


def test_a_slow_file_system_is_refused_with_the_seconds_and_an_interval_that_works(stack: dict[str, Any]) -> None:
    finding = named(run(stack, "small"), "checkpoint speed")
    assert finding.status == "fail"
    assert "takes 658 s at 146 MB/s" in finding.detail
    interval = int(finding.fix.split()[1])
    assert (
        named(run(stack, "small", checkpoint_interval_steps=interval, max_steps=100_000), "checkpoint speed").status
        == "pass"
    )


def test_too_many_checkpoints_for_the_file_system(stack: dict[str, Any]) -> None:
    assert named(run(stack, "small", keep_checkpoints=20), "capacity").status == "fail"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"cluster": "absent"}, "EKS cluster"),
        ({"file_system": "fs-0123456789abcdef0"}, "file system"),
        ({"image": IMAGE.replace("0.1.0", "9.9.9")}, "image"),
        ({"image": IMAGE.replace("/holdfast", "/absent")}, "image"),
    ],
)
def test_what_does_not_exist_is_a_failure_of_its_own_and_stops_no_other_check(
    stack: dict[str, Any], arguments: dict[str, str], name: str
) -> None:
    found = run(stack, **arguments)  # type: ignore[arg-type]
    assert (named(found, name).status, named(found, name).exit_code) == ("fail", 64), named(found, name)
    assert named(found, name).fix
    assert named(found, "credentials").status == "pass"
    assert sum(f.status == "fail" for f in found) == 1


def test_what_cannot_be_checked_is_a_warning_never_a_pass(stack: dict[str, Any]) -> None:
    found = run(stack, "", "", "")
    for name in ("EKS cluster", "file system", "image", "quota"):
        assert named(found, name).status == "warn", name
    assert named(run(stack, image="somewhere.else/holdfast:1"), "image").status == "warn"


def test_nodes_that_run_already_need_no_quota(stack: dict[str, Any]) -> None:
    account = Account("train", stack["fast"], IMAGE, REGION)
    found = list(preflight_aws.checks(account, config(), {f"{REGION}b"}, 2))
    assert named(found, "quota").status == "pass"
    assert named(found, "zone").status == "fail", "the zones of the nodes that run count, not those of the group"


def test_no_credentials_end_with_77(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    finding = next(preflight_aws.checks(Account("", "", "", REGION), config(), set(), 0))
    assert (finding.name, finding.status, finding.exit_code) == ("credentials", "fail", 77)


def test_an_endpoint_that_does_not_answer_ends_with_69(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    finding = next(preflight_aws.checks(Account("", "", "", REGION), config(), set(), 0))
    assert (finding.status, finding.exit_code) == ("fail", 69)


# --- arithmetic ---


@pytest.mark.parametrize(
    ("lustre", "gib", "expected"),
    [
        ({"DeploymentType": "SCRATCH_2"}, 1200, 234.4e6),
        ({"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 1000}, 4800, 4687.5e6),
        ({"DeploymentType": "PERSISTENT_2", "ThroughputCapacity": 4000}, 0, 4000e6),
    ],
)
def test_throughput_by_kind_of_file_system(lustre: dict[str, Any], gib: int, expected: float) -> None:
    assert preflight_aws.throughput({"StorageCapacity": gib, "LustreConfiguration": lustre}) == pytest.approx(
        expected, rel=0.001
    )


def test_a_scratch_file_system_takes_over_200_s_for_48_gb() -> None:
    speed = preflight_aws.throughput({"StorageCapacity": 1200, "LustreConfiguration": {"DeploymentType": "SCRATCH_2"}})
    assert 200 < 48e9 / speed < 212


@given(speed=st.floats(1e6, 1e12), step=st.floats(0.01, 1000), interval=st.integers(1, 10_000))
def test_the_interval_that_is_advised_passes(speed: float, step: float, interval: int) -> None:
    first = preflight_aws.check_speed(speed, config(checkpoint_interval_steps=interval), 8 * 10**9, step)
    if first.status == "pass":
        return
    advised = int(first.fix.split()[1])
    assert advised > 0
    again = preflight_aws.check_speed(speed, config(checkpoint_interval_steps=advised), 8 * 10**9, step)
    assert again.status in ("pass", "warn")


@given(nodes=st.integers(1, 100), vcpus=st.integers(0, 20_000))
def test_the_quota_holds_exactly_when_the_vcpus_do(nodes: int, vcpus: int) -> None:
    finding = preflight_aws.check_quota(vcpus, PROFILES["p5"], nodes)
    assert (finding.status == "pass") == (192 * nodes <= vcpus)
    assert str(192 * nodes) in finding.detail


def test_no_checkpoints_need_no_speed() -> None:
    assert preflight_aws.check_speed(1.0, config(checkpoint_mode="off"), 8 * 10**9, 1.0).status == "pass"


def test_a_step_of_8b_on_two_p5_is_a_few_seconds() -> None:
    seconds = preflight_aws.step_seconds(config())
    assert seconds is not None
    assert 0.5 < seconds < 5
    assert preflight_aws.step_seconds(config(profile="cpu")) is None
