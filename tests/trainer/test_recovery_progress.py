"""The count of restarts that got a run nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_writer_faults import mounted, root_only

from trainer.errors import NoProgressError
from trainer.paths import RunPaths
from trainer.progress import Ledger, newest_attempt, newest_commit, read_entries, read_now


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path, "run")
    found.run.mkdir(parents=True)
    return found


def enter(paths: RunPaths, limit: int = 3, world_size: int = 2) -> Ledger:
    """As a new process does."""
    ledger = Ledger(paths)
    ledger.enter(limit, world_size)
    return ledger


def test_restarts_without_a_step_or_a_commit_are_counted(paths: RunPaths) -> None:
    enter(paths).completed(5, 1.0, 10.0)
    enter(paths)  # five steps further than at the entry before
    enter(paths)
    enter(paths)
    with pytest.raises(NoProgressError, match=r"3 restarts in a row got no further than step 5 \(newest commit: -1\)"):
        enter(paths)
    assert read_entries(paths) == 5


@pytest.mark.parametrize("advance", ["step", "commit"])
def test_progress_of_either_kind_begins_the_count_anew(paths: RunPaths, advance: str) -> None:
    enter(paths).completed(5, 1.0, 10.0)
    for _ in range(3):
        ledger = enter(paths)
    if advance == "step":
        ledger.completed(6, 1.0, 10.0)
    else:
        paths.checkpoint(4).mkdir(parents=True)
    for _ in range(3):
        enter(paths)
    with pytest.raises(NoProgressError):
        enter(paths)


def test_nodes_that_come_one_after_another_do_not_end_the_run(paths: RunPaths) -> None:
    for world_size in range(2, 20, 2):
        enter(paths, world_size=world_size)
    for _ in range(2):
        enter(paths, world_size=18)
    with pytest.raises(NoProgressError):
        enter(paths, world_size=18)


def test_steps_that_were_done_before_are_no_progress(paths: RunPaths) -> None:
    enter(paths).completed(5, 1.0, 10.0)
    enter(paths)
    for _ in range(2):
        enter(paths).completed(4, 1.0, 10.0)
    with pytest.raises(NoProgressError):
        enter(paths)
    assert read_now(paths).furthest == 5 and read_now(paths).step == 4


def test_only_final_names_are_commits(paths: RunPaths) -> None:
    assert newest_commit(paths) == -1
    for name in ("step-00000010", ".tmp-00000030-1-ab-1", ".old-step-00000020", "step-40", "step-00000050.bak"):
        (paths.checkpoints / name).mkdir(parents=True)
    assert newest_commit(paths) == 10


@pytest.mark.parametrize("content", ["", "{", "[]", '{"furthest": "x"}', "\0" * 256])
def test_torn_files_read_as_nothing(paths: RunPaths, content: str) -> None:
    for path in (paths.furthest, paths.progress, paths.fence):
        path.write_text(content)
    assert read_now(paths).step == -1 and read_entries(paths) == 0 and newest_attempt(paths) == 0
    enter(paths)


@root_only
def test_a_full_disk_does_not_end_training(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k"):
        paths = RunPaths(tmp_path / "disk", "run")
        paths.run.mkdir(parents=True)
        ledger = enter(paths)
        with (paths.run / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space left"):
            for _ in range(100):
                ballast.write(b"\1" * 4096)
        ledger.completed(1, 1.0, 10.0)
        ledger.enter(3, 2)
        assert read_entries(paths) == 1  # what could not be written has not torn what was
