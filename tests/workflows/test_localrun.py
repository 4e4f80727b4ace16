"""What ``run.py local`` decides before and after the engine: which run is meant, whether it may start, what it says."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.config import RunConfig
from trainer.errors import ConfigurationError
from trainer.paths import RunPaths
from trainer.records import FaultReport, RunRecord, RunReport, ValidationReport
from workflows import local, localrun
from workflows.summary import summary_line, summary_table


def config_of(root: Path, **changes: object) -> RunConfig:
    return RunConfig.model_validate({"root": root, "run_id": "mine", "launcher": "local"} | changes)


def record_of(config: RunConfig) -> RunRecord:
    return RunRecord(
        config=config,
        config_digest=config.digest("d"),
        dataset="d",
        dataset_digest="d",
        versions={},
        hardware={},
        created=1.0,
    )


def fault_of(kind: str, recovered_by: str) -> FaultReport:
    return FaultReport.model_validate({
        "step": 12, "rank": 1, "kind": kind, "injected": True, "message": "", "recovered_by": recovered_by, "time": 5.0,
        "detection_seconds": 0.5, "recovery_seconds": 1.5, "phases": {}, "lost_steps": 2,
    })  # fmt: skip


def report_of(config: RunConfig, *, complete: bool = True, faults: tuple[FaultReport, ...] = ()) -> RunReport:
    return RunReport.model_validate({
        "run_id": config.run_id, "config": config, "versions": {}, "complete": complete,
        "incomplete_reason": "" if complete else "it was stopped",
        "steps_completed": 100 if complete else 40, "wall_seconds": 60.0,
        "breakdown_seconds": {
            "startup": 6, "productive": 48, "replay": 1, "checkpoint_stall": 1, "detection": 1, "recovery": 3, "other": 0,
        },
        "training_goodput": 0.8, "infrastructure_goodput": 0.93, "effective_goodput": None, "faults": faults,
        "lost_steps": 7, "committed_steps_lost": 0, "restarts": {}, "checkpoints": {"committed": 10}, "snapshots": {},
        "validation": {"valid": 3}, "final_loss": 2.5, "data_continuity": {"repeated": 0, "skipped": 0},
        "throughput": {
            "tokens_per_second": 1, "tokens_per_second_per_gpu": 1, "mfu": None, "median_step_seconds": 1,
        },
    })  # fmt: skip


def finish(config: RunConfig, *, complete: bool = True) -> RunPaths:
    """A run on disk as the steps leave it."""
    run = RunPaths(config.root, config.run_id)
    record_of(config).write(run.record)
    report_of(config, complete=complete).write(run.report("json"))
    ValidationReport(run_id=config.run_id, verdicts=(), newest_valid_step=100).write(run.validation)
    return run


# --- the same run, or another one --------------------------------------------------------------------------------------


def test_a_run_id_with_another_trajectory_is_refused_by_name(tmp_path: Path) -> None:
    run = finish(config_of(tmp_path))
    with pytest.raises(ConfigurationError, match="--max-steps 100, not 200"):
        localrun.check_same_run(run, config_of(tmp_path, max_steps=200))


def test_what_does_not_change_the_trajectory_may_change(tmp_path: Path) -> None:
    run = finish(config_of(tmp_path))
    changed = config_of(tmp_path, keep_checkpoints=9, recovery="in-job", nodes=2, gpus_per_node=1)
    localrun.check_same_run(run, changed)


def test_only_a_complete_run_of_the_same_data_is_complete(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run = finish(config)
    assert localrun.complete_report(run, config) is not None
    assert localrun.complete_report(run, config_of(tmp_path, dataset_uri="file:///elsewhere")) is None
    ValidationReport(run_id=config.run_id, verdicts=(), newest_valid_step=None).write(run.validation)
    assert localrun.complete_report(run, config) is None, "what it trained is gone"
    run.validation.unlink()
    assert localrun.complete_report(run, config) is None
    finish(config, complete=False)
    assert localrun.complete_report(run, config) is None


def test_a_complete_run_is_said_to_be_and_nothing_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    finish(config)
    before = sorted(tmp_path.rglob("*"))
    assert localrun.run_pipeline("training", config, local.Options(root=tmp_path, display="plain")) == 0
    said = capsys.readouterr().out
    assert "run 'mine' is complete" in said
    assert str(RunPaths(tmp_path, "mine").report("html")) in said
    assert sorted(set(tmp_path.rglob("*")) - set(before)) == [RunPaths(tmp_path, "mine").pipeline_lock]


def test_paths_mean_the_same_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step runs in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    given = {
        "root": "fsx",
        "tokenizer": "tok.json",
        "init_from": "weights",
        "snapshot_root": "memory",
        "launcher": "auto",
    }
    config = localrun.resolve(RunConfig.model_validate(given))
    assert config.root == tmp_path / "fsx"
    assert config.snapshot_root == tmp_path / "memory"
    assert (config.tokenizer, config.init_from) == (str(tmp_path / "tok.json"), str(tmp_path / "weights"))
    assert config.launcher == "local"
    kept = localrun.resolve(RunConfig.model_validate(given | {"tokenizer": "byte", "init_from": ""}), chosen=True)
    assert (kept.tokenizer, kept.init_from, kept.launcher) == ("byte", "", "auto")


# --- one at a time -----------------------------------------------------------------------------------------------------

HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def held_by_another(lock: Path, seconds: float) -> subprocess.Popen[str]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_pipeline_of_a_run_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with held_by_another(RunPaths(tmp_path, "mine").pipeline_lock, 60) as other:
        with pytest.raises(ConfigurationError, match="'mine' is being worked on"):
            localrun.run_pipeline("training", config, local.Options(root=tmp_path))
        other.kill()
    assert not (tmp_path / "workflows").exists()


def test_another_run_is_not_in_the_way(tmp_path: Path) -> None:
    with held_by_another(RunPaths(tmp_path, "other").pipeline_lock, 60) as other:
        with localrun.hold(RunPaths(tmp_path, "mine").pipeline_lock, "mine"):
            pass
        other.kill()


def test_a_dying_supervisor_is_waited_for(tmp_path: Path) -> None:
    lock = RunPaths(tmp_path, "mine").lock
    with held_by_another(lock, 1.0):
        started = time.monotonic()
        localrun.wait_for_release(lock, "mine", 30)
        assert 0.2 < time.monotonic() - started < 20


def test_a_living_supervisor_is_not_waited_for_long(tmp_path: Path) -> None:
    lock = RunPaths(tmp_path, "mine").lock
    with held_by_another(lock, 60) as other:
        with pytest.raises(ConfigurationError, match="'mine' is being trained"):
            localrun.wait_for_release(lock, "mine", 0.5)
        other.kill()


def test_the_lock_is_free_afterwards(tmp_path: Path) -> None:
    lock = RunPaths(tmp_path, "mine").pipeline_lock
    with localrun.hold(lock, "mine"):
        pass
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- what it says ------------------------------------------------------------------------------------------------------


def test_the_summary_counts_what_happened(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    faults = (fault_of("hang", "in_job"), fault_of("exception", "in_process"), fault_of("hang", "in_job"))
    table = summary_table(report_of(config, faults=faults), RunPaths(tmp_path, "mine"))
    assert "mine, complete: 100 of 100 steps" in table
    assert "80.0% training, 93.0% infrastructure" in table
    assert "3 (1 exception, 2 hang), all recovered" in table
    assert "7 trained again, 0 of them committed before" in table
    assert table.splitlines()[-1].endswith("report.html")


def test_the_summary_hides_no_failure(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    report = report_of(config, complete=False, faults=(fault_of("node", "none"),))
    table = summary_table(report, RunPaths(tmp_path, "mine"))
    assert "not complete (it was stopped): 40 of 100 steps" in table
    assert "1 not recovered" in table


def test_the_summary_as_json_is_one_line(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    line = summary_line(report_of(config, faults=(fault_of("oom", "pod"),)), RunPaths(tmp_path, "mine"), "done")
    assert "\n" not in line
    assert json.loads(line).items() >= {"summary": "mine", "message": "done", "faults": 1, "lost_steps": 7}.items()
    assert json.loads(summary_line(None, RunPaths(tmp_path, "mine")))["summary"] == "mine"


# --- any workflow file -------------------------------------------------------------------------------------------------


def test_any_workflow_file_runs_with_its_parameters(tmp_path: Path) -> None:
    file = tmp_path / "hello.yaml"
    file.write_text(
        "apiVersion: argoproj.io/v1alpha1\nkind: Workflow\nmetadata: {name: hello}\n"
        "spec:\n  entrypoint: main\n  arguments: {parameters: [{name: code, value: '0'}]}\n  templates:\n"
        "  - name: main\n    container:\n      image: any\n      command: [sh, -c]\n"
        "      args: ['exit {{workflow.parameters.code}}']\n"
    )
    run = [sys.executable, str(localrun.PROJECT / "workflows" / "run.py"), "local", "--file", str(file), "--quiet"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    first = subprocess.run([*run, "--root", str(tmp_path / "a")], env=environment, timeout=200)
    assert first.returncode == 0
    second = subprocess.run([*run, "--root", str(tmp_path / "b"), "-p", "code=65"], env=environment, timeout=200)
    assert second.returncode == 65
