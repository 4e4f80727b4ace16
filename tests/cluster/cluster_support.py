"""What the tests on a real cluster share: submitting the committed pipeline, watching it, and disturbing it.

The tests need argo and kubectl on PATH, and from the environment, so that they run on EKS, kind or a cluster on one machine
(what is missing is skipped with the reason; `make cluster-test` prints this):

    KUBECONFIG                 an API server with Argo Workflows; the context's namespace is used
    HOLDFAST_TEST_IMAGE        the project's image (docs/eks.md, section 5), pullable by the nodes
    HOLDFAST_TEST_NAMESPACE    another namespace than the context's
    HOLDFAST_TEST_HOSTPATH     where there is no claim holdfast-fsx yet: a directory to make one of, that all nodes see and
                               user 1000 may write
    HOLDFAST_TEST_ARGO_SERVER  http(s) address of an Argo server, for the tests of run.py submit
    HOLDFAST_CLUSTER_KIT       a program that stops, kills or freezes what runs the nodes: `freeze|thaw kubelet-I`,
                               `kill|start workflow-controller`, `cut|mend POD`; the drills that need it are skipped without
    HOLDFAST_TEST_ARGO_METRICS where the controller's metrics are (https://.../metrics), to be looked at in one test
    HOLDFAST_DRILLS_TABLE      a file to write the table of outcomes to (benchmarks/cluster-drills.md)
    HOLDFAST_TEST_PATIENCE     a factor for every wait and bound [1]: a machine that is busy with other things is slower

A cluster: on EKS by docs/eks.md, sections 1 to 5; or on one machine with kind (two workers that share
a directory) and Argo's quick-start manifest:

    mkdir -p /var/tmp/holdfast && chmod 777 /var/tmp/holdfast
    worker='{role: worker, extraMounts: [{hostPath: /var/tmp/holdfast, containerPath: /var/lib/holdfast}]}'
    echo "{kind: Cluster, apiVersion: kind.x-k8s.io/v1alpha4, nodes: [{role: control-plane}, $worker, $worker]}" |
        kind create cluster --config -
    docker build -t holdfast:test . && kind load docker-image holdfast:test
    kubectl create namespace argo && kubectl create namespace holdfast
    kubectl apply -n argo --server-side -f \
        https://github.com/argoproj/argo-workflows/releases/download/v4.0.5/quick-start-minimal.yaml
    kubectl -n argo patch deployment workflow-controller --patch-file templates/cluster/argo-controller.yaml
    make cluster-test HOLDFAST_TEST_IMAGE=holdfast:test HOLDFAST_TEST_NAMESPACE=holdfast \
        HOLDFAST_TEST_HOSTPATH=/var/lib/holdfast
"""

from __future__ import annotations

import json
import os
import secrets
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from steps import cluster, job_state
from steps.kubernetes_api import ApiServer
from trainer.paths import RunPaths
from trainer.records import RunReport

PROJECT = Path(__file__).resolve().parents[2]
PIPELINE = PROJECT / "templates" / "training.yaml"
ROOT = Path("/fsx")
READER = "holdfast-test-reader"
OVER = ("Succeeded", "Failed", "Error")
PATIENCE = float(os.environ.get("HOLDFAST_TEST_PATIENCE") or 1)

SMALL = {
    "profile": "cpu", "nodes": 2, "gpus-per-node": 1, "model": "tiny", "max-steps": 100, "global-batch-size": 8,
    "micro-batch-size": 4, "sequence-length": 512, "checkpoint-interval-steps": 10, "recovery": "in-job",
    "heartbeat-timeout-seconds": 20 * max(1, PATIENCE / 2), "node-cpus": "250m", "node-memory-gib": 3, "node-shm-gib": 1, "node-lost-seconds": 30,
    "grace-seconds": 15,
}  # fmt: skip
"""Two pods of one process each: what two cores can train while they also are the cluster."""


def command(*argv: object, seconds: float = 60, check: bool = True) -> str:
    """Run a program, with a deadline; its error text is shown when it fails."""
    limit = seconds * PATIENCE
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=limit, check=False)
    if check and done.returncode:
        pytest.fail(f"{' '.join(map(str, argv))}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def until(what: str, seconds: float, check: Callable[[], Any], every: float = 1.0) -> Any:
    """The first true answer of ``check``; fails the test when none came in time."""
    deadline = time.monotonic() + seconds * PATIENCE
    while True:
        if answer := check():
            return answer
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {seconds * PATIENCE:.0f} s")
        time.sleep(every)


@dataclass
class Outcome:
    """A line of the table of drills."""

    drill: str
    happened: str
    seconds: float
    bound: float
    lost_steps: str


@dataclass
class Cluster:
    api: ApiServer
    image: str
    kit_program: str
    outcomes: list[Outcome] = field(default_factory=list)
    workflows: dict[str, str] = field(default_factory=dict)
    """Workflow name -> run id, of the test that runs now."""

    @property
    def namespace(self) -> str:
        return self.api.namespace

    # --- pipelines ---

    def submit(self, name: str, **changes: object) -> tuple[str, str]:
        """``argo submit`` the committed file; returns the Workflow's name and the run id."""
        run_id = str(changes.pop("run_id", f"{name}-{secrets.token_hex(2)}"))
        pipeline = changes.pop("pipeline", PIPELINE)
        parameters = (
            SMALL | {"image": self.image, "run-id": run_id} | {k.replace("_", "-"): v for k, v in changes.items()}
        )
        given = [word for key, value in parameters.items() for word in ("-p", f"{key}={value}")]
        made = command("argo", "submit", "-n", self.namespace, pipeline, *given, "-o", "name").split()[-1]
        self.workflows[made] = run_id
        return made, run_id

    def argo(self, *words: object) -> str:
        return command("argo", "-n", self.namespace, *words)

    def phase(self, workflow: str) -> str:
        found = self.api.workflow(workflow)
        return str((found or {}).get("status", {}).get("phase", ""))

    def finish(self, workflow: str, seconds: float) -> str:
        """Wait until a Workflow is over, exit handler included; returns its phase."""

        def over() -> str:
            phase = self.phase(workflow)
            return phase if phase in OVER else ""

        return str(until(f"the end of {workflow}", seconds, over))

    def nodes(self, workflow: str, template: str) -> list[dict[str, Any]]:
        """The pods of a step, in the order in which they started."""
        nodes = ((self.api.workflow(workflow) or {}).get("status", {}).get("nodes") or {}).values()
        found = [n for n in nodes if n.get("templateName") == template and n["type"] == "Pod"]
        return sorted(found, key=lambda n: str(n.get("startedAt")))

    def supervisor(self, run_id: str, workflow: str) -> dict[str, Any]:
        """The running pod of the train step."""

        def running() -> Any:
            pods = self.api.pods(f"workflows.argoproj.io/workflow={workflow}")
            return next(
                (
                    p
                    for p in pods
                    if "-train-" in job_state.name(p)
                    and p["status"]["phase"] == "Running"
                    and not job_state.deleting(p)
                ),
                None,
            )

        found: dict[str, Any] = until(f"the supervisor of {run_id}", 180, running)
        return found

    def metrics(self) -> str | None:
        """What Prometheus would read of Argo's controller (its certificate is its own)."""
        url = environment("HOLDFAST_TEST_ARGO_METRICS")
        if not url:
            return None
        with urllib.request.urlopen(url, timeout=20, context=ssl._create_unverified_context()) as answer:
            return str(answer.read().decode())

    def story(self, workflow: str, run_id: str) -> str:
        """What there is to say of a run that went wrong."""
        words = ("kubectl", "get", "pods,jobs", "-n", self.namespace, "-o", "wide", "-l")
        parts = [
            command(*words, f"workflows.argoproj.io/workflow={workflow}", check=False),
            command(*words, cluster.selector(run_id), check=False),
            command("argo", "-n", self.namespace, "logs", workflow, "--no-color", "--tail", "60", check=False),
        ]
        return "\n".join(parts)

    # --- what a run has in the cluster ---

    def jobs(self, run_id: str) -> list[dict[str, Any]]:
        return self.api.jobs(cluster.selector(run_id))

    def pods(self, run_id: str) -> list[dict[str, Any]]:
        return self.api.pods(cluster.selector(run_id))

    def running(self, run_id: str, node: int) -> dict[str, Any]:
        """The running training pod of a node."""

        def look() -> Any:
            pods = [p for p in self.pods(run_id) if job_state.index(p) == node and not job_state.deleting(p)]
            return next((p for p in pods if p["status"]["phase"] == "Running"), None)

        found: dict[str, Any] = until(f"pod {node} of {run_id}", 240, look)
        return found

    def nothing_left(self, run_id: str, seconds: float = 60) -> None:
        def gone() -> bool:
            return not (self.jobs(run_id) or self.pods(run_id) or self.api.services(cluster.selector(run_id)))

        until(f"the last Job, pod and Service of {run_id}", seconds, gone)

    # --- what a run has on the shared file system ---

    def place_reader(self, machine: str = "") -> None:
        """(Re)start the pod that reads the claim, on ``machine`` if one is named, and wait for it."""
        command("kubectl", "delete", "pod", "-n", self.namespace, READER, "--ignore-not-found", seconds=120)
        apply(reader_pod(self.image, machine), namespace=self.namespace)
        words = ("kubectl", "wait", "-n", self.namespace, f"pod/{READER}", "--for=condition=Ready", "--timeout=300s")
        command(*words, seconds=310)

    def read(self, program: str) -> str:
        """What a line of Python prints in a pod that mounts the claim."""
        return command(
            "kubectl", "exec", "-n", self.namespace, READER, "--", "python", "-c", program, seconds=60, check=False
        ).strip()

    def step(self, run_id: str) -> int:
        """The furthest completed step of a run, -1 before the first."""
        text = self.read(
            "from pathlib import Path; from trainer.paths import RunPaths; from trainer.progress import read_now; "
            f"print(read_now(RunPaths(Path('{ROOT}'), '{run_id}')).step)"
        )
        return int(text) if text.lstrip("-").isdigit() else -1

    def reaches(self, run_id: str, step: int, seconds: float = 180) -> int:
        """Wait until a run has come to ``step``; returns where it is."""

        def look() -> int:
            now = self.step(run_id)
            return now if now >= step else 0

        return int(until(f"step {step} of {run_id}", seconds, look))

    def report(self, run_id: str) -> RunReport:
        path = RunPaths(ROOT, run_id).report("json")
        return RunReport.model_validate_json(self.read(f"print(open('{path}').read())"))

    # --- disturbing it ---

    def kit(self, *words: object) -> None:
        if not self.kit_program:
            pytest.skip("needs control over nodes: set HOLDFAST_CLUSTER_KIT")
        command(self.kit_program, *words, seconds=60)

    @contextmanager
    def frozen(self, machine: str) -> Iterator[None]:
        """The kubelet of a node does not answer; its containers run on."""
        process = machine.replace("node-", "kubelet-")
        self.kit("freeze", process)
        try:
            yield
        finally:
            self.kit("thaw", process)

    # --- the table ---

    def passed(self, drill: str, happened: str, seconds: float, bound: float, report: RunReport | None = None) -> None:
        """Keep a line of the table; the drill fails if it took longer than its bound."""
        bound *= PATIENCE
        lost = "-" if report is None else f"{report.lost_steps} ({report.committed_steps_lost} committed)"
        self.outcomes.append(Outcome(drill, happened, seconds, bound, lost))
        assert seconds <= bound, f"{drill}: {seconds:.0f} s, bound {bound:.0f} s"


def whole(report: RunReport, max_steps: int) -> None:
    """What every drill must leave: a complete run in which nothing that was committed was lost."""
    assert report.complete
    assert report.steps_completed == max_steps
    assert report.committed_steps_lost == 0
    assert (report.data_continuity.repeated, report.data_continuity.skipped) == (0, 0)
    assert report.validation.invalid == 0
    assert report.validation.valid >= 1


def reader_pod(image: str, machine: str) -> dict[str, Any]:
    """A pod that mounts the claim as the steps do, and waits; ``machine`` empty: wherever the scheduler puts it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": READER},
        "spec": {
            **({"nodeName": machine} if machine else {}),
            "serviceAccountName": cluster.SERVICE_ACCOUNT_TRAINING,
            "terminationGracePeriodSeconds": 0,
            "securityContext": cluster.pod_security(),
            "containers": [
                {
                    "name": "reader",
                    "image": image,
                    "command": ["python", "-c", "import time; time.sleep(86400)"],
                    "volumeMounts": [{"name": "root", "mountPath": str(ROOT)}],
                }
            ],
            "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": cluster.CLAIM}}],
        },
    }


def versions(api: ApiServer) -> str:
    """Of Kubernetes and Argo, for the table."""
    server = api.call("get version", api.client("VersionApi").get_code) or {}
    argo = command("argo", "version", "--short", check=False).split("\n")[0]
    return f"Kubernetes {server.get('gitVersion', '?')}, {argo or 'argo ?'}"


HEADING = """# Drills on a real cluster

Made by `make cluster-test` (`HOLDFAST_DRILLS_TABLE` names this file): each line is a real event in the middle of a run of
the committed pipeline, and fails if it takes longer than its bound. A later run replaces the lines of the drills it ran.
Seconds are from the submission to the end of the Workflow, release included, unless the line says otherwise.

| drill | what happened | seconds | bound | lost steps | when, where |
|---|---|---|---|---|---|
"""


def table(before: str, outcomes: list[Outcome], where: str) -> str:
    """The table with the lines of ``outcomes`` in place of older ones of the same drills."""
    rows = {
        line.split("|")[1].strip(): line
        for line in before.splitlines()
        if line.startswith("| ") and not line.startswith("| drill")
    }
    for o in outcomes:
        rows[o.drill] = f"| {o.drill} | {o.happened} | {o.seconds:.0f} | {o.bound:.0f} | {o.lost_steps} | {where} |"
    return HEADING + "\n".join(rows.values()) + "\n"


def environment(name: str) -> str:
    return os.environ.get(name, "")


def apply(*documents: dict[str, Any], namespace: str) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)})
    done = subprocess.run(
        ["kubectl", "apply", "-n", namespace, "-f", "-"],
        input=text,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
