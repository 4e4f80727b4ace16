"""The benchmark pipeline on this machine, from the table to the comparison."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_support import PROJECT

from steps.comparison_record import Comparison
from trainer import paths
from trainer.paths import RunPaths
from trainer.records import RunReport

TABLE = Path(__file__).with_name("experiments.yaml")


def run(table: Path, root: Path) -> subprocess.CompletedProcess[str]:
    """The benchmark ``short`` over a table, to its end."""
    command = [sys.executable, str(PROJECT / "workflows" / "run.py"), "local", "--pipeline=benchmark"]
    command += [f"--experiments={table}", f"--root={root}", "--run-id=short", "--quiet"]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300)


def test_arms_run_one_after_another_and_are_compared(tmp_path: Path) -> None:
    done = run(TABLE, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs are complete" in done.stdout

    found = Comparison.read(paths.comparison(tmp_path, "short", "json"))
    assert [arm.run for arm in found.arms] == ["short-bare", "short-baseline"]
    bare, baseline = (RunReport.read(RunPaths(tmp_path, arm.run).report("json")) for arm in found.arms)
    for report in (bare, baseline):
        assert sum(report.breakdown_seconds.model_dump().values()) == pytest.approx(report.wall_seconds, rel=0.01)

    # A save takes at least 1.5 times five steps of the bare run's, on storage that is that slow for this arm only.
    slow = 1.5 * 5 * bare.throughput.median_step_seconds
    assert baseline.checkpoints.mean_stall_seconds >= 0.95 * slow
    assert baseline.config.storage_bytes_per_second > 0 == bare.config.storage_bytes_per_second

    (fault,) = baseline.faults
    assert (fault.kind, fault.step, fault.recovered_by, fault.resumed_step) == ("hang", 8, "pod", 5)
    assert 2.5 < fault.detection_seconds < 15, "the heartbeat of the other arms is this arm's process-group timeout"
    assert fault.phases["load"] >= 0.5 * slow, "loads go through the same bucket"


def test_an_arm_that_fails_keeps_nothing_from_running_and_fails_the_benchmark(tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    table.write_text(
        "title: One that cannot learn\n"
        "common: {model: tiny, sequence-length: 64, warmup-steps: 0, max-steps: 12, checkpoint-mode: 'off', checkpoint-interval-steps: 5}\n"
        "arms:\n"
        "  - {name: broken, learning-rate: 1e30}\n"
        "  - {name: after, learning-rate: 1e-3}\n"
    )
    done = run(table, tmp_path / "fsx")
    assert done.returncode == 70, done.stdout + done.stderr
    assert "1 of 2 runs" in done.stdout
    found = Comparison.read(paths.comparison(tmp_path / "fsx", "short", "json"))
    assert [(arm.run, arm.complete) for arm in found.arms] == [("short-broken", False), ("short-after", True)]
