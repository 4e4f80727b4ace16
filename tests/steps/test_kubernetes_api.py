"""The API adapter where no API server answers, and the launcher's flags. What a server says is tested on a real one."""

from __future__ import annotations

import argparse
import socket
import time
from pathlib import Path

import pytest
import yaml

from steps import kubernetes
from steps.kubernetes_api import ApiServer, lacking
from steps.pod_log import seconds
from trainer.config import OneLineParser, add_flags
from trainer.errors import ConfigurationError, UnavailableError


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubeconfig that leads to a port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x", "namespace": "here"}}],
        "users": [{"name": "x", "user": {}}],
    }
    path.write_text(yaml.safe_dump(content))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("patience", [0.0, 3.0])
def test_a_server_that_does_not_answer_is_asked_again_for_a_bounded_time(patience: float) -> None:
    api = ApiServer(patience_seconds=patience)
    assert api.namespace == "here"
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=f"get jobs: .* did not answer for {patience:.0f} s"):
        api.job("x")
    took = time.monotonic() - started
    assert patience * 0.4 <= took < patience + 5


@pytest.mark.usefixtures("nobody")
def test_a_log_that_cannot_be_had_is_empty() -> None:
    assert list(ApiServer().follow("pod", "train", None, 1.0)) == []


def test_no_cluster_at_all_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="KUBECONFIG"):
        ApiServer()


def test_a_missing_verb_is_named_with_its_resource_and_the_fix() -> None:
    text = lacking("create", "jobs.batch", "holdfast")
    assert "'create' on jobs.batch in namespace holdfast" in text
    assert "templates/cluster/rbac.yaml" in text


def parsed(*argv: str) -> kubernetes.KubernetesOptions:
    parser = OneLineParser()
    add_flags(parser)  # as the supervisor does: no flag may be taken twice
    kubernetes.add_arguments(parser)
    namespace: argparse.Namespace = parser.parse_args(list(argv))
    return kubernetes.options(namespace)


def test_flags_become_options_and_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (kubernetes.IMAGE_VARIABLE, kubernetes.WORKFLOW_VARIABLE, kubernetes.QUEUE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert parsed() == kubernetes.KubernetesOptions()
    given = parsed(
        "--image",
        "i:1",
        "--queue",
        "q",
        "--node-memory-gib",
        "5",
        "--node-shm-gib=2",
        "--node-cpus",
        "250m",
        "--claim",
        "c",
    )
    placement = given.placement
    assert (placement.image, placement.queue, placement.memory_gib, placement.shm_gib) == ("i:1", "q", 5, 2)
    assert (placement.cpus, placement.claim) == ("250m", "c")


def test_a_template_may_give_image_and_workflow_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kubernetes.IMAGE_VARIABLE, "from-environment")
    monkeypatch.setenv(kubernetes.WORKFLOW_VARIABLE, "w")
    assert parsed().image == "from-environment"
    assert parsed("--image", "given").image == "given"
    assert parsed().workflow == "w"


def test_every_option_has_a_help_text() -> None:
    assert set(kubernetes.HELP) == set(kubernetes.KubernetesOptions.__dataclass_fields__)


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [("2025-01-01T00:00:00.123456789Z", 1735689600.123456), ("2025-01-01T00:00:00Z", 1735689600.0), ("unable to", 0.0)],
)
def test_time_stamps_of_a_log(stamp: str, expected: float) -> None:
    assert seconds(stamp) == pytest.approx(expected, abs=1e-6)
