"""Helpers: run a workflow written in a test, and look at what became of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_outcomes import Outcome, of_workflow

from workflows import local

PROJECT = Path(__file__).resolve().parents[3]
HEAD = "apiVersion: argoproj.io/v1alpha1\nkind: Workflow\nmetadata: {generateName: t-}\nspec:\n"
END = """
- name: end
  inputs: {parameters: [{name: code, default: "0"}]}
  container: {image: x, command: [sh, -c], args: ["exit {{inputs.parameters.code}}"]}
"""


def write(directory: Path, spec: str, *templates: str) -> Path:
    """A workflow file with ``spec``, whose templates come last in it and are followed by ``templates``."""
    body = textwrap.dedent(spec).strip("\n") + "\n" + "".join(textwrap.dedent(t).strip("\n") + "\n" for t in templates)
    path = directory / "workflow.yaml"
    path.write_text(HEAD + textwrap.indent(body, "  "))
    return path


@dataclass(frozen=True)
class Run:
    """A workflow that was run."""

    result: local.Result
    workflow: dict[str, Any]

    @property
    def outcome(self) -> Outcome:
        return of_workflow(self.workflow)

    @property
    def phases(self) -> dict[str, str]:
        """Path below the workflow -> phase."""
        return {node["path"].removeprefix("WF").lstrip("."): node["phase"] for node in self.outcome["nodes"]}

    def node(self, path: str) -> dict[str, Any]:
        return next(node for node in self.outcome["nodes"] if node["path"] == f"WF{path}")

    def log(self, path: str) -> str:
        name = self.workflow["metadata"]["name"]
        node = next(n for n in self.workflow["status"]["nodes"].values() if n["name"] == name + path)
        return (self.result.workflow_json.parent / node["id"] / "main.log").read_text()


def run(path: Path, root: Path, parameters: dict[str, str] | None = None, **options: Any) -> Run:
    """Run a file to its end in this process."""
    result = local.run(local.load(path, parameters or {}), local.Options(root=root, **{"display": "quiet", **options}))
    return Run(result, json.loads(result.workflow_json.read_text()))


ENGINE = """
import sys
from pathlib import Path
from workflows import local
from trainer.errors import exit_with
def main():
    options = local.Options(root=Path(sys.argv[2]), name=sys.argv[3], display="plain")
    if sys.argv[1] == "--resume":
        return local.resume(options.root, options.name, options).exit_code
    return local.run(local.load(Path(sys.argv[1]), {}), options).exit_code
exit_with(main)
"""


def start(path: Path | str, root: Path, name: str, **options: Any) -> subprocess.Popen[str]:
    """Run a file (or ``--resume``) in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with (root / f"{name}.out").open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(path), str(root), name],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, text=True, env=env, **options,
        )  # fmt: skip


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for a condition; fail the test if it does not come."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.05)


def processes_with(mark: str) -> list[int]:
    """The processes whose command line contains ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
