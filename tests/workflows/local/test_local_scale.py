"""Large workflows: the engine's own time and memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from local_runs import ENGINE, PROJECT


def dag_of(count: int, path: Path) -> Path:
    """A DAG of ``true`` in which each task waits for up to three of the hundred before it."""
    tasks = []
    for number in range(count):
        task = {"name": f"t{number}", "template": "t"}
        if number >= 50:
            before = sorted({number - 1 - (number * step) % 50 for step in (7, 11, 13)})
            task["depends"] = " && ".join(f"t{n}" for n in before)
        tasks.append(task)
    templates = [
        {"name": "main", "dag": {"tasks": tasks}},
        {"name": "t", "container": {"image": "x", "command": ["true"]}},
    ]
    head = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"generateName": "big-"}}
    path.write_text(yaml.safe_dump({**head, "spec": {"entrypoint": "main", "templates": templates}}))
    return path


def pss_of_tree(pid: int) -> int:
    """Proportional memory of a process and everything below it, bytes."""
    total, pending = 0, [pid]
    while pending:
        current = pending.pop()
        try:
            for line in Path(f"/proc/{current}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
            for task in Path(f"/proc/{current}/task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, ValueError):
            continue
    return total


def run_measured(path: Path, root: Path) -> tuple[float, int, float]:
    """Run in a process of its own: seconds, peak memory of the whole tree in bytes, CPU seconds of the engine and its helpers."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(path), str(root), "big"],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    peak = 0
    while engine.poll() is None:
        peak = max(peak, pss_of_tree(engine.pid))
        time.sleep(0.2)
    seconds = time.monotonic() - started
    assert engine.returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, peak, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def check(path: Path, root: Path, count: int) -> None:
    status = json.loads((root / "workflows" / "big" / "workflow.json").read_text())["status"]
    assert status["phase"] == "Succeeded" and status["progress"] == f"{count}/{count}"
    assert len(status["nodes"]) == count + 1


def test_a_thousand_tasks_cost_little_beyond_themselves(tmp_path: Path) -> None:
    """Under 20 s of overhead. Measured as CPU time, over all processes, since the machine may be busy with other things."""
    path = dag_of(1000, tmp_path / "big.yaml")
    _, peak, cpu = run_measured(path, tmp_path)
    check(path, tmp_path, 1000)
    assert cpu < 30, "two cores: less than 20 s of overhead, the thousand processes themselves aside"
    assert peak < 300 * 2**20


@pytest.mark.drill
def test_five_thousand_tasks_need_less_than_500_mib(tmp_path: Path) -> None:
    path = dag_of(5000, tmp_path / "big.yaml")
    _, peak, _ = run_measured(path, tmp_path)
    check(path, tmp_path, 5000)
    assert peak < 500 * 2**20
