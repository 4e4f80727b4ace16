"""What a task is started with: command, environment, directories, and its private view of the file system.

A volume is a directory: a claim's is given by the user, an emptyDir is in the node's own directory. A mount whose path
*is* that directory needs no view; any other does, and so do outputs in places that only the task should write.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflows.local.execution import TemplateError
from workflows.local.nodes import Node
from workflows.local.plan import Raw

PROJECT = Path(__file__).resolve().parents[3]
PROGRESS_FILE, STATUS_FILE = "ARGO_PROGRESS_FILE", "HOLDFAST_STATUS_FILE"


@dataclass(frozen=True)
class Places:
    """Directories of one workflow on this machine."""

    state: Path
    """``<root>/workflows/<name>``."""
    claims: Mapping[str, Path]
    """Claim name -> directory."""
    default_claims: Path
    """Where a claim that nobody mapped gets a directory."""

    def node(self, node_id: str) -> Path:
        return self.state / node_id


@dataclass(frozen=True)
class Sandbox:
    """A task's surroundings, ready to start in."""

    command: list[str]
    environment: dict[str, str]
    directory: str
    outputs: list[str]
    view: dict[str, Any] | None


def build(
    node: Node, template: Raw, volumes: list[Raw], places: Places, environment: Mapping[str, str], *, namespaces: bool
) -> Sandbox:
    """The surroundings for the pod of ``node``; makes its directories. ``TemplateError`` for what cannot be had here."""
    home = places.node(node.id)
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    container: Raw = template.get("container") or template.get("script") or {}
    binds = _binds(node, template, container, volumes, places)
    outputs = [
        p["valueFrom"]["path"]
        for p in (template.get("outputs") or {}).get("parameters") or ()
        if (p.get("valueFrom") or {}).get("path")
    ]
    pod = _pod_name(node, template, places)
    env = _environment(node, pod, container, home, environment, namespaces=namespaces)
    command = _command(container, template, home, env)
    if template.get("script") is not None and container.get("source"):
        # Argo hands the template to its executor in an environment variable, which Kubernetes expands
        known = {"ARGO_POD_NAME": pod, "ARGO_WORKFLOW_NAME": places.state.name}
        script = home / "script"
        script.write_text(expand_variables(container["source"], known), encoding="utf-8")
        script.chmod(0o755)
    directory = container.get("workingDir") or ("/tmp" if namespaces else str(home / "tmp"))
    if namespaces:
        view: dict[str, Any] | None = {
            "tmp": str(home / "tmp"),
            "stage": str(home / "view"),
            "keep": _keep(home, command, env),
            "binds": binds,
            "private": _private(outputs, binds) + ([directory] if not Path(directory).is_dir() else []),
        }
    else:
        view = None
        for path in needed(binds, outputs):
            raise TemplateError(f"{path} needs a private mount, which this kernel does not allow here")
    return Sandbox(command, env, directory, outputs, view)


def needed(binds: list[list[Any]], outputs: list[str]) -> list[str]:
    """The paths for which a task needs a mount namespace."""
    paths = [str(target) for source, target, read_only in binds if os.path.realpath(source) != os.path.realpath(target)]
    inside = [str(target) for _, target, _ in binds]
    return paths + [path for path in outputs if not any(_is_under(path, target) for target in inside)]


def _is_under(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _binds(node: Node, template: Raw, container: Raw, volumes: list[Raw], places: Places) -> list[list[Any]]:
    known = {volume.get("name"): volume for volume in [*volumes, *(template.get("volumes") or ())]}
    binds = []
    for mount in container.get("volumeMounts") or ():
        volume = known.get(mount.get("name"))
        if volume is None:
            raise TemplateError(f"volume '{mount.get('name')}' not found in workflow spec")
        source = volume_directory(volume, node.id, places)
        if mount.get("subPath"):
            source = source / mount["subPath"]
        target = os.path.normpath(mount.get("mountPath") or "/")
        if not target.startswith("/") or target == "/":
            raise TemplateError(f"mountPath '{mount.get('mountPath')}' must be an absolute path below /")
        if target == "/tmp" and volume.get("emptyDir") is not None:
            continue  # what every task has
        if not source.is_file():
            source.mkdir(parents=True, exist_ok=True)
        read_only = bool(mount.get("readOnly")) or bool((volume.get("persistentVolumeClaim") or {}).get("readOnly"))
        binds.append([str(source), target, read_only])
    return binds


def volume_directory(volume: Raw, node_id: str, places: Places) -> Path:
    """The directory that stands for a volume."""
    if volume.get("persistentVolumeClaim") is not None:
        claim = (volume["persistentVolumeClaim"] or {}).get("claimName") or ""
        return Path(places.claims.get(claim) or places.default_claims / claim)
    if volume.get("hostPath") is not None:
        return Path((volume["hostPath"] or {}).get("path") or "/")
    return places.node(node_id) / "volumes" / str(volume.get("name"))


def _private(outputs: list[str], binds: list[list[Any]]) -> list[str]:
    """Directories of outputs outside of /tmp and the volumes: what a task leaves there must not meet another's."""
    found: list[str] = []
    for path in outputs:
        directory = str(Path(path).parent)
        taken = _is_under(path, "/tmp") or any(_is_under(path, target) for _, target, _ in binds)
        if (
            not taken
            and directory not in found
            and (not Path(directory).is_dir() or len(list(Path(directory).iterdir())) <= 64)
        ):
            found.append(directory)
    return found


def _keep(home: Path, command: list[str], environment: Mapping[str, str]) -> list[str]:
    """Paths under /tmp that a task sees all the same: this program, its state, and files that its arguments name."""
    wanted = [
        str(home),
        str(PROJECT),
        sys.prefix,
        sys.base_prefix,
        str(Path.cwd()),
        *sys.path,
        environment.get("HOME", ""),
    ]
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"):
        wanted += environment.get(name, "").split(os.pathsep)
    for argument in command:
        match = re.fullmatch(r"(?:--?[\w-]+=)?(?:file://)?(/tmp/\S+)", argument)
        if match:
            wanted.append(match.group(1))
    real = {os.path.normpath(path) for path in wanted if path}
    return sorted(path for path in real if path.startswith("/tmp/") and Path(path).exists())


def _pod_name(node: Node, template: Raw, places: Places) -> str:
    workflow = places.state.name
    return workflow if node.name == workflow else f"{workflow}-{template.get('name')}-{node.id.rpartition('-')[2]}"


def _environment(
    node: Node, pod: str, container: Raw, home: Path, inherited: Mapping[str, str], *, namespaces: bool
) -> dict[str, str]:
    env = dict(inherited)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH") or os.defpath])
    env["TMPDIR"] = "/tmp" if namespaces else str(home / "tmp")
    own: dict[str, str] = {}
    for raw in container.get("env") or ():
        value = _env_value(raw, pod)
        if value is not None:
            own[str(raw.get("name"))] = expand_variables(value, own)
    env |= own
    return env | {
        "ARGO_CONTAINER_NAME": "main",
        "ARGO_NODE_ID": node.id,
        PROGRESS_FILE: str(home / "progress"),
        STATUS_FILE: str(home / "status.json"),
    }


def _env_value(raw: Raw, pod: str) -> str | None:
    source = raw.get("valueFrom")
    if source is None:
        return str(raw.get("value") or "")
    field = (source.get("fieldRef") or {}).get("fieldPath")
    if field == "metadata.name":
        return pod
    if field is not None:
        raise TemplateError(f"env {raw.get('name')}: fieldPath '{field}' is not known here")
    return None  # optional secrets and configuration maps; others were refused when the workflow was read


def expand_variables(text: str, variables: Mapping[str, str]) -> str:
    """Kubernetes' ``$(NAME)``; ``$$`` is a dollar, an unknown name stays."""

    def replace(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "$"
        return variables.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^()]*)\)", replace, text)


def _command(container: Raw, template: Raw, home: Path, env: Mapping[str, str]) -> list[str]:
    own = {
        str(raw.get("name")): env[str(raw.get("name"))]
        for raw in container.get("env") or ()
        if str(raw.get("name")) in env
    }
    words = [
        expand_variables(word, own) for word in [*(container.get("command") or ()), *(container.get("args") or ())]
    ]
    if template.get("script") is not None and container.get("source"):
        words.append(str(home / "script"))
    if not words:
        raise TemplateError("there is no command; the entrypoint of an image is not known here")
    return words


def clean(home: Path) -> None:
    """Remove what only the task needed; its log, progress and status stay."""
    for name in ("tmp", "view", "volumes"):
        path = home / name
        try:
            path.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
