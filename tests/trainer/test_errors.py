"""What the operating system says, in the contract's codes: what can be tried again is never called a defect."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from test_writer_faults import mounted, root_only
from whole_run import REPOSITORY

from trainer.config import RunConfig
from trainer.errors import DataError, code_of, exit_with
from trainer.paths import RunPaths
from trainer.records import RunRecord


def of(number: int, path: str | None = "/fsx/runs/a/file") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    "name", ["ENOSPC", "EDQUOT", "EIO", "ESTALE", "ENOTCONN", "ESHUTDOWN", "ETIMEDOUT", "EHOSTDOWN"]
)
def test_storage_that_is_full_or_away_is_tried_again(name: str) -> None:
    assert code_of(of(getattr(errno, name))) == 69


@pytest.mark.parametrize("name", ["EACCES", "EPERM", "EROFS"])
def test_what_may_not_be_written_is_denied(name: str) -> None:
    assert code_of(of(getattr(errno, name))) == 77


@pytest.mark.parametrize(
    "error", [of(errno.ENOENT), of(errno.EISDIR), of(errno.EBADF), TimeoutError("late"), OSError("odd"), ValueError()]
)
def test_anything_else_is_a_defect(error: Exception) -> None:
    assert code_of(error) == 70


def test_ours_and_an_interrupt_keep_their_codes() -> None:
    assert code_of(DataError("torn")) == 65
    assert code_of(KeyboardInterrupt()) == 130


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (of(errno.ENOSPC), 69, "/fsx/runs/a/file: No space left on device; make room"),
        (of(errno.ESTALE), 69, "/fsx/runs/a/file: Stale file handle; see that its server answers"),
        (of(errno.EROFS), 77, "permission denied: /fsx/runs/a/file: Read-only file system"),
        (of(errno.ENOSPC, None), 69, "No space left on device; make room"),
        (DataError("torn"), 65, "torn"),
    ],
)
def test_one_line_says_which_file_and_what_to_do(
    error: Exception, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        exit_with(fail)
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


def test_a_defect_shows_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise of(errno.EBADF)

    with pytest.raises(SystemExit) as ended:
        exit_with(fail)
    assert ended.value.code == 70
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "please report it" in said.splitlines()[-1]


@root_only
@pytest.mark.parametrize("counted", [True, False], ids=["the count of pods", "the events"])
def test_a_pod_on_a_full_disk_ends_with_a_code_that_is_tried_again(tmp_path: Path, counted: bool) -> None:
    root = tmp_path / "disk"
    paths = RunPaths(root, "full")
    with mounted(root, "size=256k,nr_inodes=24"):
        RunRecord(
            config=RunConfig(run_id="full", root=root), config_digest="", dataset="", dataset_digest="", versions={},
            hardware={}, created=0.0,
        ).write(paths.record)  # fmt: skip
        with suppress(OSError):
            for number in itertools.count():
                (root / f"ballast-{number}").touch()
        command = [sys.executable, "-m", "steps.node", "--run-directory", str(paths.run), "--attempt", "1", "--node", "0"]
        done = subprocess.run(
            command if counted else [*command, "--pod", "1"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 69, done.stderr
    (line,) = done.stderr.splitlines()
    where = paths.run / "pods" if counted else paths.events
    assert line.startswith(f"error: {where}: No space left on device; make room")
