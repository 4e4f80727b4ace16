"""The exit handler, against real files and a real HTTP server."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from steps import release
from trainer.config import RunConfig
from trainer.paths import RunPaths
from trainer.records import RunRecord, RunReport


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, object]]]]:
    """The address of a server that keeps what is posted to it."""
    received: list[dict[str, object]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/hook" else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", received
    server.shutdown()
    thread.join()
    server.server_close()


def a_run(root: Path, *, complete: bool) -> tuple[RunPaths, Path]:
    """A run on disk, its report, and a snapshot in what stands for memory; returns its paths and the snapshots'."""
    config = RunConfig.model_validate({"root": root, "run_id": "mine", "snapshot_root": root / "memory"})
    run = RunPaths(root, "mine")
    RunRecord(
        config=config, config_digest="c", dataset="d", dataset_digest="d", versions={}, hardware={}, created=1.0
    ).write(run.record)
    RunReport.model_validate({
        "run_id": "mine", "config": config, "versions": {}, "complete": complete, "steps_completed": 100 if complete else 40,
        "wall_seconds": 1.0, "breakdown_seconds": dict.fromkeys(
            ("startup", "productive", "replay", "checkpoint_stall", "detection", "recovery", "other"), 0.0
        ),
        "training_goodput": 0.75, "infrastructure_goodput": 0.9, "effective_goodput": None, "faults": (), "lost_steps": 3,
        "committed_steps_lost": 0, "restarts": {}, "checkpoints": {}, "snapshots": {}, "validation": {}, "final_loss": None,
        "data_continuity": {"repeated": 0, "skipped": 0}, "throughput": {
            "tokens_per_second": 1, "tokens_per_second_per_gpu": 1, "mfu": None, "median_step_seconds": 1,
        },
    }).write(run.report("json"))  # fmt: skip
    snapshots = run.snapshots(root / "memory", 0)
    snapshots.mkdir(parents=True)
    (snapshots / "rank-0").write_bytes(b"x")
    return run, snapshots


def end(root: Path, status: str, *runs: str, hook: str = "") -> subprocess.CompletedProcess[str]:
    """Run the step as Argo would."""
    command = [sys.executable, "-m", "steps.release", f"--root={root}", "--run-id=mine", "--launcher=local"]
    return subprocess.run(
        [*command, f"--status={status}", "--workflow=wf-1", *runs],
        env={"HOLDFAST_WEBHOOK": hook, "PATH": ""}, cwd=Path(release.__file__).parent.parent,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_the_runs_of_a_benchmark_are_released_with_it(tmp_path: Path) -> None:
    """The benchmark itself is no run; of its arms one never began."""
    run, snapshots = a_run(tmp_path, complete=True)
    run.run.rename(run.run.with_name("arm"))
    snapshots.parent.rename(RunPaths(tmp_path, "arm").snapshots(tmp_path / "memory", 0).parent)
    done = end(tmp_path, "Succeeded", "never-began", "arm")
    assert done.returncode == 0, done.stderr
    assert not RunPaths(tmp_path, "arm").snapshots(tmp_path / "memory", 0).exists()


def test_files_that_cannot_be_read_fail_nothing(tmp_path: Path) -> None:
    """As on a mount that does not answer: the nodes were ended before it was asked."""
    run, _ = a_run(tmp_path, complete=True)
    run.record.unlink()
    run.record.mkdir()
    done = end(tmp_path, "Failed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("ended with their supervisor") < done.stdout.index("cannot be read")


def test_a_complete_run_leaves_nothing_in_memory(tmp_path: Path) -> None:
    _, snapshots = a_run(tmp_path, complete=True)
    assert end(tmp_path, "Succeeded").returncode == 0
    assert not snapshots.exists()
    assert (tmp_path / "memory").exists()


def test_a_run_that_may_be_resumed_keeps_its_snapshots(tmp_path: Path) -> None:
    _, snapshots = a_run(tmp_path, complete=False)
    assert release.main([f"--root={tmp_path}", "--run-id=mine", "--launcher=local", "--status=Succeeded"]) == 0
    assert (snapshots / "rank-0").exists()


def test_a_run_that_never_began_is_no_error(tmp_path: Path) -> None:
    result = end(tmp_path, "Failed")
    assert result.returncode == 0, result.stderr
    assert "never began" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_gets_the_report_it_did_not_come_to(tmp_path: Path) -> None:
    run, _ = a_run(tmp_path, complete=False)
    run.report("json").unlink()
    run.events.mkdir()
    result = end(tmp_path, "Failed")
    assert result.returncode == 0, result.stderr
    assert not RunReport.read(run.report("json")).complete
    assert run.report("html").exists()


def test_the_webhook_hears_how_it_ended(tmp_path: Path, webhook: tuple[str, list[dict[str, object]]]) -> None:
    a_run(tmp_path, complete=True)
    url, received = webhook
    result = end(tmp_path, "Succeeded", hook=url)
    assert result.returncode == 0
    assert len(received) == 1
    said = received[0]
    assert said.items() >= {"run_id": "mine", "status": "Succeeded", "workflow": "wf-1", "lost_steps": 3}.items()
    assert said["text"] == "run mine: Succeeded, 100 of 100 steps, goodput 75.0%, 0 faults, 3 steps trained again"
    assert url not in result.stdout + result.stderr, "the address is a secret"


@pytest.mark.parametrize("hook", ["http://127.0.0.1:9/closed", "ftp://example.invalid/x", "http://[broken"])
def test_a_webhook_that_fails_fails_nothing(tmp_path: Path, hook: str) -> None:
    a_run(tmp_path, complete=True)
    result = end(tmp_path, "Succeeded", hook=hook)
    assert result.returncode == 0, result.stderr
    assert hook not in result.stdout + result.stderr


def test_a_webhook_that_refuses_fails_nothing(tmp_path: Path, webhook: tuple[str, list[dict[str, object]]]) -> None:
    a_run(tmp_path, complete=True)
    result = end(tmp_path, "Succeeded", hook=webhook[0].replace("/hook", "/other"))
    assert result.returncode == 0
    assert "did not answer" in result.stdout


def test_without_a_cluster_the_kubernetes_launcher_cannot_be_released(tmp_path: Path) -> None:
    """The one failure that counts: GPUs might go on. The rest is done all the same."""
    _, snapshots = a_run(tmp_path, complete=True)
    command = [sys.executable, "-m", "steps.release", f"--root={tmp_path}", "--run-id=mine", "--launcher=kubernetes"]
    result = subprocess.run(
        [*command, "--status=Succeeded"], env={"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)},
        cwd=Path(release.__file__).parent.parent, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert result.returncode == 64, result.stderr
    assert not snapshots.exists()
