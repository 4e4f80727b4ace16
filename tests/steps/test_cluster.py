"""Properties of the Job and Service that a run becomes, and of the prerequisites that are committed beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steps import cluster
from steps.cluster import GIB, ModelShape, Placement
from steps.kubernetes import NEEDED
from steps.launcher import Launch
from steps.profiles import PROFILES
from trainer.checkpointing.replicas import KEPT
from trainer.checkpointing.snapshots import GENERATIONS
from trainer.config import RunConfig
from trainer.errors import FINAL_CODES, ConfigurationError
from trainer.paths import RunPaths

PLACEMENT = Placement(image="registry/holdfast:1")
PREREQUISITES = Path(__file__).resolve().parents[2] / "templates" / "cluster"
DNS_LABEL = re.compile(r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")
LLAMA_8B = ModelShape(parameters=8_030_261_248, hidden=4096, layers=32, vocabulary=128_256)

run_ids = st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?\Z")


def launch(profile: str = "cpu", nodes: int = 2, attempt: int = 1, run_id: str = "run", **fields: Any) -> Launch:
    gpus = PROFILES[profile].gpus or 2
    config = RunConfig(
        run_id=run_id, root=Path("/fsx"), profile=profile, nodes=nodes, gpus_per_node=gpus,  # type: ignore[arg-type]
        global_batch_size=nodes * gpus, micro_batch_size=1, **fields,
    )  # fmt: skip
    return Launch(config, RunPaths(config.root, config.run_id), attempt)


def pod_of(one: Launch, placement: Placement = PLACEMENT) -> dict[str, Any]:
    spec: dict[str, Any] = cluster.job(one, placement)["spec"]["template"]["spec"]
    return spec


@given(run_id=run_ids, attempt=st.integers(1, 9999), nodes=st.integers(1, 999))
def test_every_name_is_a_dns_label_and_node_0_is_found_under_the_name_its_pod_gets(
    run_id: str, attempt: int, nodes: int
) -> None:
    name, service = cluster.job_name(run_id, attempt), cluster.service_name(run_id)
    for hostname in (f"{name}-{nodes - 1}", service):
        assert DNS_LABEL.match(hostname), hostname
    spec = pod_of(launch(run_id=run_id, attempt=attempt, nodes=min(nodes, 64)))
    args = spec["containers"][0]["args"]
    host = args[args.index("--rendezvous-host") + 1]
    assert host == f"{name}-0.{spec['subdomain']}"
    assert spec["subdomain"] == cluster.service(run_id)["metadata"]["name"]


@given(attempt=st.integers(1, 50))
def test_the_name_depends_on_run_and_attempt_only(attempt: int) -> None:
    first = cluster.job(launch(attempt=attempt), PLACEMENT)
    again = cluster.job(launch(attempt=attempt, nodes=4, max_steps=77), Placement(image="other"))
    assert first["metadata"]["name"] == again["metadata"]["name"]
    assert first["metadata"]["name"] != cluster.job(launch(attempt=attempt + 1), PLACEMENT)["metadata"]["name"]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("nodes", [1, 2, 3, 16])
def test_one_pod_per_node_with_a_budget_a_deadline_and_an_end(profile: str, nodes: int) -> None:
    one = launch(profile, nodes, max_restarts=3)
    spec = cluster.job(one, PLACEMENT)["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", nodes, nodes)
    assert spec["backoffLimit"] == 3 * nodes
    assert spec["activeDeadlineSeconds"] > 0
    assert spec["ttlSecondsAfterFinished"] > 0
    args = spec["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--run-directory") + 1] == "/fsx/runs/run"


def test_the_failure_policy_ignores_disruptions_first_and_fails_on_final_codes_only() -> None:
    first, second = cluster.job(launch(), PLACEMENT)["spec"]["podFailurePolicy"]["rules"]
    assert first["action"] == "Ignore"
    assert first["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert second["action"] == "FailJob"
    assert second["onExitCodes"]["values"] == [64, 65, 70, 76, 77] == sorted(FINAL_CODES)
    assert second["onExitCodes"]["containerName"] == pod_of(launch())["containers"][0]["name"]


def test_the_service_is_headless_selects_the_pods_and_publishes_them_before_they_are_ready() -> None:
    service = cluster.service("run")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    pods = cluster.job(launch(), PLACEMENT)["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= pods.items()
    wanted = dict(pair.split("=") for pair in cluster.selector("run").split(","))
    for found in (pods, service["metadata"]["labels"], cluster.job(launch(), PLACEMENT)["metadata"]["labels"]):
        assert wanted.items() <= found.items()


@pytest.mark.parametrize("profile", PROFILES)
def test_security_and_memory(profile: str) -> None:
    spec = pod_of(launch(profile))
    container = spec["containers"][0]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] != 0
    assert spec["automountServiceAccountToken"] is False
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert "privileged" not in security
    assert security["capabilities"]["drop"] == ["ALL"]
    assert security["capabilities"].get("add", []) == (["IPC_LOCK"] if PROFILES[profile].efa else [])
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert not any("hostPath" in volume for volume in volumes.values())
    shm = volumes["shm"]["emptyDir"]
    assert shm["medium"] == "Memory"
    shm_gib, memory_gib = (
        int(text.removesuffix("Gi")) for text in (shm["sizeLimit"], container["resources"]["limits"]["memory"])
    )
    assert 0 < shm_gib < memory_gib, "what is in /dev/shm counts against the memory limit"
    assert {m["mountPath"] for m in container["volumeMounts"]} == {"/fsx", "/tmp", "/dev/shm"}
    assert not any("valueFrom" in variable or "secret" in str(variable).lower() for variable in container["env"])


@pytest.mark.parametrize(
    ("profile", "gpus", "efa", "pages"),
    [("p5", "8", "32", "5120Mi"), ("p4de", "8", "4", "5120Mi"), ("g5", "8", "1", None)],
)
def test_a_gpu_pod_takes_its_node_whole(profile: str, gpus: str, efa: str, pages: str | None) -> None:
    spec = pod_of(launch(profile))
    asked = spec["containers"][0]["resources"]
    for amounts in (asked["requests"], asked["limits"]):
        assert amounts["nvidia.com/gpu"] == gpus
        assert amounts["vpc.amazonaws.com/efa"] == efa
        assert amounts.get("hugepages-2Mi") == pages
    assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": PROFILES[profile].instance_type}
    assert {toleration["key"] for toleration in spec["tolerations"]} == {"nvidia.com/gpu", "vpc.amazonaws.com/efa"}
    env = {variable["name"]: variable["value"] for variable in spec["containers"][0]["env"]}
    assert env["FI_PROVIDER"] == "efa"
    assert "RDMAV_FORK_SAFE" not in env


def test_a_cpu_pod_asks_for_nothing_that_a_plain_cluster_lacks() -> None:
    spec = pod_of(launch("cpu"), Placement(image="i", cpus="250m", memory_gib=3, shm_gib=2))
    assert spec["containers"][0]["resources"] == {
        "requests": {"cpu": "250m", "memory": "3Gi"},
        "limits": {"memory": "3Gi"},
    }
    assert "nodeSelector" not in spec
    assert [c["whenUnsatisfiable"] for c in spec["topologySpreadConstraints"]] == ["ScheduleAnyway"]


def test_the_pod_is_given_longer_than_the_trainer_takes_to_stop() -> None:
    assert pod_of(launch(grace_seconds=600.5))["terminationGracePeriodSeconds"] > 600.5


def test_a_queue_makes_a_suspended_job_for_kueue() -> None:
    queued = cluster.job(launch(), Placement(image="i", queue="gpus"))
    assert queued["spec"]["suspend"] is True
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "suspend" not in cluster.job(launch(), PLACEMENT)["spec"]


def test_the_owner_is_the_workflow() -> None:
    workflow = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "w", "uid": "u", "x": 1}}
    owner = cluster.owner_reference(workflow)
    assert owner == {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "w", "uid": "u"}
    for item in (cluster.job(launch(), PLACEMENT, owner), cluster.service("run", owner)):
        assert item["metadata"]["ownerReferences"] == [owner]
    assert "ownerReferences" not in cluster.service("run")["metadata"]


# --- what is refused ---


def test_a_gpu_count_that_is_not_the_profiles_is_refused_with_both_numbers() -> None:
    one = launch("p5")
    wrong = one.config.model_copy(update={"gpus_per_node": 4})
    with pytest.raises(
        ConfigurationError, match=r"4 does not match profile p5: p5\.48xlarge has 8 GPUs.*--gpus-per-node 8"
    ):
        cluster.check(wrong, PLACEMENT)
    assert cluster.check(one.config, PLACEMENT).name == "p5"


def test_a_model_that_cannot_fit_is_refused_with_the_gap_and_a_number_of_nodes_that_works() -> None:
    config = launch("g5", nodes=1, sequence_length=8192).config
    big = ModelShape(2 * LLAMA_8B.parameters, LLAMA_8B.hidden, 2 * LLAMA_8B.layers, LLAMA_8B.vocabulary)
    with pytest.raises(ConfigurationError) as error:
        cluster.check(config, PLACEMENT, big)
    message = str(error.value)
    needed, gap, has = (float(number) for number in re.findall(r"([\d.]+) GiB", message))
    assert needed - has == pytest.approx(gap, abs=0.11), message
    nodes = int(re.findall(r"--nodes (\d+)", message)[0])
    enough = config.model_copy(update={"nodes": nodes})
    assert cluster.check(enough, PLACEMENT, big)
    with pytest.raises(ConfigurationError):
        cluster.check(config.model_copy(update={"nodes": nodes - 1}), PLACEMENT, big)


def test_the_bound_is_below_what_was_measured_for_8b_on_two_gpus() -> None:
    """95 GB at batch 1 x 8192 on two GPUs: a bound above that would refuse what works."""
    config = launch("cpu", nodes=1, sequence_length=8192).config  # two ranks
    assert 60e9 < cluster.gpu_bytes_needed(config, LLAMA_8B) < 95e9


@given(nodes=st.integers(1, 256), factor=st.integers(2, 8))
def test_more_ranks_never_need_more_memory_each(nodes: int, factor: int) -> None:
    few = launch("p5", nodes=1).config.model_copy(update={"nodes": nodes})
    many = few.model_copy(update={"nodes": nodes * factor})
    assert cluster.gpu_bytes_needed(many, LLAMA_8B) <= cluster.gpu_bytes_needed(few, LLAMA_8B)
    assert cluster.snapshot_bytes_needed(many, LLAMA_8B) <= cluster.snapshot_bytes_needed(few, LLAMA_8B)


def test_what_a_run_may_shrink_to_must_have_room() -> None:
    """The nodes that are left hold what all did."""
    config = launch("p5", nodes=8, snapshot_replicas=0).config
    shrinks = config.model_copy(update={"min_nodes": 2})
    two = config.model_copy(update={"nodes": 2})
    assert cluster.gpu_bytes_needed(shrinks, LLAMA_8B) == cluster.gpu_bytes_needed(two, LLAMA_8B) > cluster.gpu_bytes_needed(config, LLAMA_8B)
    assert cluster.snapshot_bytes_needed(shrinks, LLAMA_8B) == 4 * cluster.snapshot_bytes_needed(config, LLAMA_8B)
    large = ModelShape(12 * LLAMA_8B.parameters, LLAMA_8B.hidden, 20 * LLAMA_8B.layers, LLAMA_8B.vocabulary)
    enough = config.model_copy(update={"nodes": 64})
    assert cluster.check(enough, PLACEMENT, large)
    with pytest.raises(ConfigurationError, match=r"on each of 16 GPUs, .* use --min-nodes (\d+), of as many --nodes or more"):
        cluster.check(enough.model_copy(update={"min_nodes": 2}), PLACEMENT, large)


def test_snapshots_that_do_not_fit_in_shared_memory_are_refused() -> None:
    config = launch("cpu", nodes=1, snapshot_interval_steps=5).config
    with pytest.raises(ConfigurationError, match=r"which has 1 GiB"):
        cluster.check(config, PLACEMENT, LLAMA_8B)
    assert cluster.check(config, Placement(image="i", shm_gib=-(-2 * 12 * LLAMA_8B.parameters // GIB)), LLAMA_8B)


def test_a_node_holds_its_own_generations_and_what_a_peer_sends_it() -> None:
    """A replica that arrives lies beside those that are kept."""
    assert (cluster.SNAPSHOT_COPIES, cluster.REPLICA_COPIES) == (GENERATIONS, KEPT + 1)
    state = 12 * LLAMA_8B.parameters
    for nodes, replicas, copies in ((1, 0, 2), (2, 0, 2), (2, 1, 5), (1, 1, 2)):
        config = launch(nodes=nodes, snapshot_replicas=replicas).config
        assert cluster.snapshot_bytes_needed(config, LLAMA_8B) == state * copies / nodes


def test_no_image_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--image"):
        cluster.check(launch().config, Placement(image=""))


def test_every_preset_fits_the_profile_it_is_meant_for() -> None:
    assert cluster.check(
        launch("p5", nodes=2, sequence_length=8192).config, PLACEMENT, cluster.shape_of("llama-3.1-8b")
    )
    assert cluster.check(launch("cpu", nodes=1, snapshot_interval_steps=5).config, PLACEMENT, cluster.shape_of("tiny"))


# --- prerequisites ---


def documents() -> list[dict[str, Any]]:
    return [
        item for path in sorted(PREREQUISITES.glob("*.yaml")) for item in yaml.safe_load_all(path.read_text()) if item
    ]


def found(kind: str, name: str) -> dict[str, Any]:
    return next(d for d in documents() if d.get("kind") == kind and d["metadata"]["name"] == name)


def test_the_supervisors_roles_hold_exactly_the_verbs_that_the_launcher_uses() -> None:
    granted = {
        (verb, group, *(resource.partition("/")[::2]))
        for role in (found("Role", "holdfast-supervisor"), found("ClusterRole", "holdfast-nodes"))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == set(NEEDED)


def test_training_pods_and_steps_have_no_rights_on_the_cluster() -> None:
    bound = [
        (d["roleRef"]["name"], subject["name"])
        for d in documents()
        if d.get("kind", "").endswith("RoleBinding") or d.get("kind") == "RoleBinding"
        for subject in d["subjects"]
    ]
    assert sorted(bound) == [
        ("holdfast-nodes", "holdfast-supervisor"),
        ("holdfast-steps", "holdfast-steps"),
        ("holdfast-steps", "holdfast-supervisor"),
        ("holdfast-supervisor", "holdfast-supervisor"),
    ]
    assert found("Role", "holdfast-steps")["rules"] == [
        {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]}
    ]


def test_prerequisites_carry_the_names_that_the_code_uses() -> None:
    for account in (
        cluster.SERVICE_ACCOUNT_STEPS,
        cluster.SERVICE_ACCOUNT_SUPERVISOR,
        cluster.SERVICE_ACCOUNT_TRAINING,
    ):
        assert found("ServiceAccount", account)
    claims = [d for d in documents() if d.get("kind") == "PersistentVolumeClaim"]
    assert {claim["metadata"]["name"] for claim in claims} == {cluster.CLAIM}
    for claim in claims:
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        assert claim["spec"]["storageClassName"] == ""


def test_volumes_keep_their_data() -> None:
    volumes = [d for d in documents() if d.get("kind") == "PersistentVolume"]
    assert len(volumes) == 2
    assert {volume["spec"]["persistentVolumeReclaimPolicy"] for volume in volumes} == {"Retain"}


def test_no_prerequisite_holds_a_secret_or_a_shell() -> None:
    for document in documents():
        assert document.get("kind") != "Secret"
    text = "\n".join(path.read_text() for path in PREREQUISITES.glob("*.yaml"))
    assert not re.search(r"\b(sh|bash)\b.*-c", text)


def test_the_network_policy_selects_the_training_pods() -> None:
    policy = found("NetworkPolicy", "holdfast-training")
    labels = cluster.job(launch(), PLACEMENT)["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_network_policies_mean_something_on_eks_and_select_the_steps_of_every_committed_pipeline() -> None:
    (selected,) = found("NetworkPolicy", "holdfast-steps")["spec"]["podSelector"]["matchExpressions"]
    assert selected["operator"] == "In"
    pipelines = [yaml.safe_load(path.read_text()) for path in PREREQUISITES.parent.glob("*.yaml")]
    assert {item["spec"]["podMetadata"]["labels"][selected["key"]] for item in pipelines} == set(selected["values"])
    addons = {addon["name"]: addon for addon in found("ClusterConfig", "CLUSTER")["addons"]}
    assert json.loads(addons["vpc-cni"]["configurationValues"]) == {"enableNetworkPolicy": "true"}


def test_no_taint_keeps_the_efa_device_plugin_off_the_nodes_that_have_efa() -> None:
    """The one that eksctl installs tolerates these two keys and no other."""
    for group in found("ClusterConfig", "CLUSTER")["managedNodeGroups"]:
        taints = {taint["key"] for taint in group.get("taints", [])}
        assert not group.get("efaEnabled") or taints <= {"CriticalAddonsOnly", "aws.amazon.com/efa"}
