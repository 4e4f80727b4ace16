"""What a task sees: its own /tmp, volumes at their mount paths, its environment; and machines that forbid private mounts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import ENGINE, PROJECT, run, write

PODS = """
entrypoint: main
volumes:
- {name: shared, persistentVolumeClaim: {claimName: data}}
templates:
"""


def pod(command: str, *, mounts: str = "", outputs: str = "", volumes: str = "", env: str = "") -> str:
    """A template ``main`` that runs a shell command."""
    lines = [
        "- name: main",
        f"  volumes: [{volumes}]",
        f"  container: {{image: x, command: [sh, -c], args: [{json.dumps(command)}], volumeMounts: [{mounts}], env: [{env}]}}",
        f"  outputs: {{parameters: [{outputs}]}}",
    ]
    return "\n".join(lines) + "\n"


def output(path: str) -> str:
    return f"{{name: x, valueFrom: {{path: {path}}}}}"


def test_parallel_tasks_have_a_tmp_each(tmp_path: Path) -> None:
    spec = """
    entrypoint: main
    templates:
    - name: main
      steps:
      - - {name: each, template: t, arguments: {parameters: [{name: n, value: "{{item}}"}]}, withSequence: {count: "4"}}
    - name: t
      inputs: {parameters: [{name: n}]}
      container: {image: x, command: [sh, -c], args: ["ls /tmp | wc -l > /tmp/before; echo {{inputs.parameters.n}} > /tmp/same; sleep 0.5"]}
      outputs: {parameters: [{name: same, valueFrom: {path: /tmp/same}}]}
    """
    found = run(write(tmp_path, spec), tmp_path)
    for n in range(4):
        assert found.node(f"[0].each({n}:{n})")["parameters"] == {"same": str(n)}
    assert not (Path("/tmp") / "same").exists()


@pytest.mark.parametrize("target", ["/mnt/of/volumes", "/nowhere/on/this/machine", "/srv", "/tmp/inside"])
def test_a_volume_is_at_its_mount_path(tmp_path: Path, target: str) -> None:
    claim = tmp_path / "claim"
    claim.mkdir()
    (claim / "given").write_text("from outside")
    command = f"cat {target}/given > /tmp/x; echo from inside > {target}/made"
    spec = PODS + pod(command, mounts=f"{{name: shared, mountPath: {target}}}", outputs=output("/tmp/x"))
    found = run(write(tmp_path, spec), tmp_path, volumes={"data": claim})
    assert found.node("")["parameters"] == {"x": "from outside"}
    assert (claim / "made").read_text() == "from inside\n"
    assert target == "/srv" or not Path(target).exists(), "the host has got no such directory"


def test_volumes_can_be_read_only_parts_and_empty(tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    (claim / "part").mkdir(parents=True)
    (claim / "part" / "file").write_text("p")
    mounts = "{name: shared, mountPath: /data, subPath: part, readOnly: true}, {name: scratch, mountPath: /scratch}"
    command = "cat /data/file; touch /data/no 2>/dev/null && echo wrote; ls /scratch | wc -l; echo e > /scratch/x"
    spec = PODS + pod(command, mounts=mounts, volumes="{name: scratch, emptyDir: {}}", outputs=output("/scratch/x"))
    found = run(write(tmp_path, spec), tmp_path, volumes={"data": claim})
    assert found.log("") == "p0\n"
    assert found.node("")["parameters"] == {"x": "e"}


def test_a_claim_that_nobody_mapped_gets_a_directory(tmp_path: Path) -> None:
    spec = PODS + pod("echo kept > /data/x", mounts="{name: shared, mountPath: /data}")
    assert run(write(tmp_path, spec), tmp_path).result.phase == "Succeeded"
    assert (tmp_path / "volumes" / "data" / "x").read_text() == "kept\n"


def test_claim_templates_last_as_long_as_the_workflow(tmp_path: Path) -> None:
    spec = """
    entrypoint: main
    volumeClaimTemplates: [{metadata: {name: work}, spec: {accessModes: [ReadWriteOnce]}}]
    templates:
    - name: main
      steps: [[{name: a, template: w}], [{name: b, template: r}]]
    - name: w
      container: {image: x, command: [sh, -c], args: ["echo x > /work-of-it/f"], volumeMounts: [{name: work, mountPath: /work-of-it}]}
    - name: r
      container: {image: x, command: [cat, /work-of-it/f], volumeMounts: [{name: work, mountPath: /work-of-it}]}
    """
    assert run(write(tmp_path, spec), tmp_path).log("[1].b") == "x\n"


@pytest.mark.parametrize("path", ["/tmp/a/b", "/opt/x.txt", "/made/for/x", "/x.txt"])
def test_outputs_can_be_anywhere_and_leave_nothing_on_the_host(tmp_path: Path, path: str) -> None:
    spec = PODS + pod(f"mkdir -p $(dirname {path}); echo v > {path}", outputs=output(path))
    assert run(write(tmp_path, spec), tmp_path).node("")["parameters"] == {"x": "v"}
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("mkfifo /tmp/o", "it is a pipe"),
        ("mkdir /tmp/o", "is a directory"),
        ("head -c 2000000 /dev/zero > /tmp/o", "larger than 1048576 bytes"),
        ("ln -s /tmp/none /tmp/o", "no such file or directory"),
    ],
)
def test_an_output_that_is_no_readable_file_is_an_error(tmp_path: Path, command: str, message: str) -> None:
    found = run(write(tmp_path, PODS + pod(command, outputs=output("/tmp/o"))), tmp_path).node("")
    assert (found["phase"], found["message"]) == ("Error", f"wait: Error (exit code 64): open /tmp/o: {message}")


def test_the_environment_is_that_of_a_container(tmp_path: Path) -> None:
    env = "{name: A, value: one}, {name: B, value: $(A)-two}, {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}"
    command = """echo "$A $B" '$(NONE)' $(A); echo $EXTRA; command -v python; echo $ARGO_CONTAINER_NAME; pwd"""
    found = run(write(tmp_path, PODS + pod(command, env=env)), tmp_path, environment={"EXTRA": "given"})
    assert found.log("").splitlines() == [
        "one one-two $(NONE) one",
        "given",
        str(Path(sys.executable).parent / "python"),
        "main",
        "/tmp",
    ]


def test_progress_and_result_are_reported(tmp_path: Path) -> None:
    spec = """
    entrypoint: main
    templates:
    - name: main
      steps:
      - - {name: a, template: t}
      - - {name: b, template: t, when: "'{{steps.a.outputs.result}}' == 'out'"}
    - name: t
      container: {image: x, command: [sh, -c], args: ["echo 3/5 > $ARGO_PROGRESS_FILE; echo out; echo err >&2; exit 0"]}
    """
    found = run(write(tmp_path, spec), tmp_path)
    assert found.node("[0].a")["result"] == "out"
    assert found.log("[0].a") in ("out\nerr\n", "err\nout\n")
    nodes = found.workflow["status"]["nodes"].values()
    assert {n["displayName"]: n.get("progress") for n in nodes if n["type"] == "Pod"} == {"a": "5/5", "b": "5/5"}
    assert "result" not in found.node("[1].b"), "nothing refers to it"


# --- machines that forbid private mounts -----------------------------------------------------------------------------

FORBID = [
    "unshare",
    "-Ur",
    "sh",
    "-c",
    'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set -sys_admin --inh-caps -sys_admin "$@"',
    "sh",
]
WITHOUT_ROOT = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]


def engine_under(prefix: list[str], path: Path, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a workflow with fewer privileges."""
    if shutil.which(prefix[0]) is None or subprocess.run([*prefix, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip(f"{prefix[0]} cannot take privileges away here")
    command = [*prefix, sys.executable, "-c", ENGINE, str(path), str(root), "less"]
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL)


def test_a_user_namespace_will_do_without_root(tmp_path: Path) -> None:
    spec = PODS + pod(
        "echo v > /data/deep/x", mounts="{name: shared, mountPath: /data/deep}", outputs=output("/data/deep/x")
    )
    done = engine_under(WITHOUT_ROOT, write(tmp_path, spec), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "volumes" / "data" / "x").read_text() == "v\n"


@pytest.mark.parametrize(
    ("template", "path"),
    [
        (pod("true", mounts="{name: shared, mountPath: /data}"), "/data"),
        (pod("echo > /tmp/x", outputs=output("/tmp/x")), "/tmp/x"),
    ],
)
def test_where_private_mounts_are_forbidden_what_needs_one_is_refused(tmp_path: Path, template: str, path: str) -> None:
    done = engine_under(FORBID, write(tmp_path, PODS + template), tmp_path)
    assert done.returncode == 64, done.stdout + done.stderr
    assert f"templates.main needs {path} for itself, but this kernel refuses private mounts" in done.stderr
    assert not list(tmp_path.rglob("workflow.json"))


def test_where_private_mounts_are_forbidden_identity_mounts_work(tmp_path: Path) -> None:
    """A claim that is mounted at the very directory that stands for it needs no namespace: so this project's own pipeline."""
    claim = tmp_path / "volumes" / "data"
    spec = PODS + pod(
        f"echo v > {claim}/x; echo $TMPDIR",
        mounts=f"{{name: shared, mountPath: {claim}}}",
        outputs=output(f"{claim}/x"),
    )
    done = engine_under(FORBID, write(tmp_path, spec), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (claim / "x").read_text() == "v\n"
    assert (tmp_path / "workflows" / "less" / "less" / "main.log").read_text().startswith(str(tmp_path))
