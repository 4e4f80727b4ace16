"""The command line as a person meets it: a process, its exit code, and one line that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import RunConfig
from trainer.paths import RunPaths
from trainer.records import RunRecord
from workflows.run import COMMANDS

PROJECT = Path(__file__).resolve().parent.parent.parent
RUN = PROJECT / "workflows" / "run.py"


def run(*words: str, cwd: Path = PROJECT, script: bool = True) -> subprocess.CompletedProcess[str]:
    how = [str(RUN)] if script else ["-m", "workflows.run"]
    return subprocess.run(
        [sys.executable, *how, *words], cwd=cwd, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )


def refused(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line on standard error of a command that ended with ``code`` and did nothing else."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def test_without_a_command_it_lists_them() -> None:
    result = run()
    assert result.returncode == 0
    assert [line.split()[0] for line in result.stdout.splitlines()[2:]] == list(COMMANDS)


def test_it_runs_from_anywhere_and_as_a_module(tmp_path: Path) -> None:
    assert run(cwd=tmp_path).returncode == 0
    assert run(script=False).returncode == 0


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0, result.stderr
    assert f"usage: run.py {command}" in result.stdout


def test_an_unknown_command_is_named() -> None:
    assert "'frob'" in refused(run("frob"), 64)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--frob", "1"], "--frob"),
        (["--model", "gpt-5"], "llama-3.1-8b"),
        (["--nodes", "many"], "--nodes"),
        (["--max-steps", "0"], "--max-steps"),
        (["--run-id", "Not/An/Id"], "--run-id"),
        (["--global-batch-size", "7"], "the nearest that is: 8"),
        (["--fault-kinds", "exception,flood"], "'flood'"),
        (["--fault-count", "5", "--max-steps", "12"], "fault_count 5"),
        (["-p", "x=1"], "--file"),
        (["--file", "nothing-here.yaml"], "nothing-here.yaml"),
        (["--file", "x.yaml", "--resume", "x"], "--resume"),
        (["--volume", "fsx"], "NAME=VALUE"),
    ],
)
def test_a_wrong_flag_starts_nothing(flags: list[str], said: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert said in refused(run("local", "--root", str(root), *flags), 64)
    assert not root.exists()


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not a directory" in refused(run("local", "--root", str(tmp_path / "file")), 64)


def test_a_root_that_cannot_be_written_is_denied() -> None:
    """/proc takes no directory from anyone, root included."""
    assert "not writable" in refused(run("local", "--root", "/proc/holdfast"), 77)


def test_compile_check_shows_what_differs_and_writes_nothing(tmp_path: Path) -> None:
    assert run("compile", "--directory", str(tmp_path)).returncode == 0
    file = tmp_path / "training.yaml"
    changed = file.read_text().replace("onExit: release", "onExit: nothing")
    file.write_text(changed)
    result = run("compile", "--check", "--directory", str(tmp_path))
    assert result.returncode == 64
    assert "-  onExit: nothing" in result.stdout
    assert "+  onExit: release" in result.stdout
    assert result.stderr.startswith("error: training.yaml differ")
    assert file.read_text() == changed


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A root with a run whose processes have printed something."""
    config = RunConfig.model_validate({"root": tmp_path, "run_id": "mine"})
    run = RunPaths(tmp_path, "mine")
    RunRecord(
        config=config, config_digest="c", dataset="d", dataset_digest="d", versions={}, hardware={}, created=1.0
    ).write(run.record)
    for rank in (0, 1):
        log = run.logs("train", 1) / f"rank-{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(f"rank {rank} line {number}\n" for number in range(20_000)))
    return tmp_path


def test_runs_are_listed(trained: Path) -> None:
    assert json.loads(run("list", "--root", str(trained), "--json").stdout)[0]["run_id"] == "mine"
    assert "mine" in run("list", "--root", str(trained)).stdout


def test_a_run_has_a_status(trained: Path) -> None:
    status = json.loads(run("status", "mine", "--root", str(trained), "--json").stdout)
    assert (status["summary"]["run_id"], status["summary"]["max_steps"]) == ("mine", 100)
    assert "0 of 100" in run("status", "mine", "--root", str(trained)).stdout


def test_logs_are_found_by_rank(trained: Path) -> None:
    one = run(
        "logs", "mine", "--root", str(trained), "--rank", "1", "--step", "train", "--attempt", "1", "--lines", "2"
    )
    assert one.stdout == "rank 1 line 19998\nrank 1 line 19999\n"
    both = run("logs", "mine", "--root", str(trained), "--lines", "1").stdout.splitlines()
    assert both[1::2] == ["rank 0 line 19999", "rank 1 line 19999"]
    assert "no such log" in refused(run("logs", "mine", "--root", str(trained), "--rank", "7"), 64)


def test_a_reader_that_leaves_is_no_error(trained: Path) -> None:
    command = [sys.executable, str(RUN), "logs", "mine", "--root", str(trained)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(200) == 141
        assert process.stderr.read() == b""


@pytest.mark.parametrize("command", ["status", "logs"])
def test_a_run_that_is_not_there_is_named(command: str, tmp_path: Path) -> None:
    assert "there is no run 'other'" in refused(run(command, "other", "--root", str(tmp_path)), 64)


def test_submit_refuses_what_the_profile_cannot_do() -> None:
    flags = [
        "--argo-server",
        "http://127.0.0.1:9",
        "--profile",
        "p5",
        "--gpus-per-node",
        "4",
        "--global-batch-size",
        "16",
    ]
    assert "use --gpus-per-node 8" in refused(run("submit", *flags), 64)


def test_submit_says_that_a_server_does_not_answer() -> None:
    assert "did not answer" in refused(run("submit", "--argo-server", "http://127.0.0.1:9"), 69)


def test_submit_wants_an_address() -> None:
    assert "http://" in refused(run("submit", "--argo-server", "argo.example:2746"), 64)
