"""The background writer dies, is stuck, errs, or has no room: noticed in time, recorded, and the next save commits."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tier_world import RankError, Run, World, wait_until

from trainer.checkpointing.removal import discard

MakeRun = Callable[..., Run]

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system: needs root")


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """A tmpfs at ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=10)


def save(world: World, step: int, **options: bool) -> float:
    """The longest that a rank waited in the call, seconds."""
    world.all("fill", step=step)
    return max(world.all("save", step=step, **options))


def commit_next(run: Run, world: World, step: int) -> None:
    """A save after the trouble commits, and what it holds is whole."""
    save(world, step)
    assert all(world.all("settle")), "the save after the failed one goes on and on"
    assert step in run.committed()
    saved = world.one("digest")
    world.all("enter")
    assert world.one("resume") == [step, "durable"]
    assert world.one("digest") == saved


def stuck(run: Run, world: World, step: int, number: int = 0) -> psutil.Process:
    """Freeze one rank's writer, and give it a save."""
    if not world.writers():  # the first save also starts the writers
        save(world, 1)
        assert all(world.all("settle"))
    writer = world.writers()[number]
    writer.suspend()
    save(world, step)
    return writer


def frozen_while_writing(run: Run, world: World, step: int) -> list[psutil.Process]:
    """Begin a save, and freeze all writers when its directory is there."""
    save(world, 1)
    assert all(world.all("settle"))
    world.all("fill", step=step)
    writers = world.writers()
    world.begin("save", step=step)
    wait_until(lambda: any(run.paths.checkpoints.glob(".tmp-*/__*")), "a writer has begun", pause=0.0)
    for writer in writers:
        writer.suspend()
    world.answers()
    assert run.committed() == [1], "too fast: choose a larger width"
    return writers


@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_writer_is_noticed_at_once(make_run: MakeRun, size: int) -> None:
    run = make_run(width=256)
    with run.world(size) as world:
        victim, *others = frozen_while_writing(run, world, 2)
        victim.kill()
        for other in others:
            other.resume()
        began = time.monotonic()
        assert all(world.all("settle", seconds=10))
        assert time.monotonic() - began < 5
        assert run.committed() == [1]
        assert "died" in " ".join(event.data["reason"] for event in run.events("save_failed"))
        commit_next(run, world, 3)
    assert [path.name for path in run.paths.checkpoints.iterdir() if not path.name.startswith("step-")] == []


def test_a_stuck_writer_is_given_up_and_saves_meanwhile_are_skipped(make_run: MakeRun) -> None:
    run = make_run(save_timeout_seconds=3, heartbeat_timeout_seconds=2)
    with run.world(2) as world:
        frozen = stuck(run, world, 2)
        began = time.monotonic()
        assert save(world, 3) < 1  # the loop goes on
        assert save(world, 4) < 1
        assert [event.data["step"] for event in run.events("save_skipped")] == [3, 4]
        assert all(world.all("settle", seconds=20))
        assert time.monotonic() - began < 3 + 5
        assert run.events("save_failed")[0].data["step"] == 2
        wait_until(lambda: not frozen.is_running(), "the stuck writer is killed")
        commit_next(run, world, 5)
        assert run.committed() == [1, 5]


def test_at_most_one_save_is_in_flight_and_none_waits_for_it(make_run: MakeRun) -> None:
    run = make_run()
    with run.world(2) as world:
        slow = stuck(run, world, 2)
        assert save(world, 3) < 1
        slow.resume()
        assert all(world.all("settle"))
        assert run.committed() == [1, 2]
        assert not run.events("save_failed")
        assert [event.data["step"] for event in run.events("save_skipped")] == [3]
        slow.suspend()
        assert save(world, 4) < 1
        world.begin("save", step=5, last=True)  # the last one is never skipped: it waits
        time.sleep(0.5)
        slow.resume()
        world.answers()
        assert run.committed() == [2, 4, 5]  # three are kept


@root_only
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_full_disk_in_the_middle_of_a_save(make_run: MakeRun, mode: str) -> None:
    run = make_run(checkpoint_mode=mode, width=64, keep_checkpoints=2)
    with mounted(run.paths.checkpoints, "size=4m"), run.world(2) as world:
        save(world, 1)
        assert all(world.all("settle"))
        assert run.committed() == [1]
        ballast = run.paths.checkpoints / "ballast"
        room = os.statvfs(run.paths.checkpoints)
        ballast.write_bytes(b"\1" * (room.f_bavail * room.f_frsize - (200 << 10)))
        assert save(world, 2) < 10
        assert all(world.all("settle"))
        assert run.committed() == [1]
        failed = run.events("save_failed")
        assert {event.data["step"] for event in failed} == {2}
        assert any("No space left" in event.data["reason"] for event in failed), [event.data for event in failed]
        ballast.unlink()
        commit_next(run, world, 3)


@root_only
def test_the_last_save_on_a_full_disk_ends_with_a_code_that_is_tried_again(make_run: MakeRun) -> None:
    run = make_run(width=64)
    with mounted(run.paths.checkpoints, "size=4m"), run.world(2) as world:
        save(world, 1)
        assert all(world.all("settle"))
        room = os.statvfs(run.paths.checkpoints)
        ballast = run.paths.checkpoints / "ballast"
        ballast.write_bytes(b"\1" * (room.f_bavail * room.f_frsize - (200 << 10)))
        with pytest.raises(RankError, match="the last checkpoint, of step 2, could not be written") as raised:
            save(world, 2, last=True)
        assert raised.value.code == 69
        assert len({event.data["step"] for event in run.events("save_failed")}) == 1
        ballast.unlink()
        save(world, 3, last=True)
        assert run.committed() == [1, 3]


def test_a_file_size_limit_is_an_error_like_another(make_run: MakeRun) -> None:
    """What a full disk is to those who cannot mount one: the writer errs in the middle of its file."""
    run = make_run(width=64)
    with run.world(1) as world:
        save(world, 1)
        assert all(world.all("settle"))
        (writer,) = world.writers()
        before = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (100 << 10, resource.RLIM_INFINITY))
        save(world, 2)
        assert all(world.all("settle"))
        assert run.committed() == [1]
        assert run.events("save_failed")[0].data["step"] == 2
        if writer.is_running():  # (it may have been killed by SIGXFSZ)
            resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, before)
        commit_next(run, world, 3)


@root_only
def test_a_file_system_that_turns_read_only(make_run: MakeRun) -> None:
    run = make_run()
    with mounted(run.paths.checkpoints, "size=64m"), run.world(2) as world:
        save(world, 1)
        assert all(world.all("settle"))
        subprocess.run(["mount", "-o", "remount,ro", str(run.paths.checkpoints)], check=True, timeout=10)
        save(world, 2)
        assert all(world.all("settle"))
        assert "Read-only file system" in " ".join(event.data["reason"] for event in run.events("save_failed"))
        world.all("enter")  # what is there can be resumed from
        assert world.one("resume") == [1, "durable"]
        subprocess.run(["mount", "-o", "remount,rw", str(run.paths.checkpoints)], check=True, timeout=10)
        commit_next(run, world, 3)


def test_a_save_cut_in_two_by_a_restart_does_not_block_the_next(make_run: MakeRun) -> None:
    """Rank 0 has begun a save, rank 1 has been thrown out of the step before it could: no time-out is waited for."""
    run = make_run()
    with run.world(2) as world:
        save(world, 1)
        assert all(world.all("settle"))
        world.all("fill", step=2)
        world.all("half_a_save", step=2, ranks=[0])
        world.all("enter")
        began = time.monotonic()
        assert world.one("resume") == [1, "durable"]
        assert all(world.all("settle"))
        assert time.monotonic() - began < 10  # (the deadline of a save is 20)
        commit_next(run, world, 2)


def test_a_fenced_attempt_does_not_commit(make_run: MakeRun) -> None:
    run = make_run()
    with run.world(1) as world:
        save(world, 1)
        assert all(world.all("settle"))
        slow = stuck(run, world, 2)
        run.fence(2)  # the next attempt's number is taken
        slow.resume()
        with pytest.raises(RankError, match="attempt 2") as raised:
            world.all("settle")
        assert raised.value.code == 75
        assert run.committed() == [1]
        assert [event.data for event in run.events("fenced")] == [{"newest": 2}]


def test_a_late_attempt_leaves_alone_what_its_successor_is_writing(make_run: MakeRun) -> None:
    run = make_run(width=256)
    run.fence(2)
    with run.world(1, attempt=2) as successor:
        (writer,) = frozen_while_writing(run, successor, 2)
        with run.world(1, attempt=1) as late:
            assert late.one("resume") == [1, "durable"]
        writer.resume()
        assert all(successor.all("settle"))
        assert not run.events("save_failed")
        assert run.committed() == [1, 2]


def test_a_restart_anywhere_in_the_end_of_a_save_leaves_none_in_flight(make_run: MakeRun) -> None:
    """One bytecode after another. A save that nobody ends would have every later one skipped."""
    run = make_run(keep_checkpoints=3)
    with run.world(1) as world:
        world.begin("restart_at_the_end_of_saves", first=1, last=200, stride=3)
        assert world.answers(seconds=120) == [[]]
        commit_next(run, world, 500)


def test_a_copy_that_failed_costs_its_save_and_one_restart(make_run: MakeRun) -> None:
    run = make_run()
    with run.world(2) as world:
        world.all("break_copy", step=1)
        for _ in range(2):
            world.all("enter")
            assert world.one("resume") == [0, "none"]
        assert ["nothing to pin" in str(event.data["reason"]) for event in run.events("save_failed")] == [True, True]
        commit_next(run, world, 2)


def test_memory_that_one_rank_is_refused_costs_the_save_and_nothing_else(make_run: MakeRun) -> None:
    run = make_run(width=64)
    with run.world(2) as world:
        world.all("limit_files", size=64 << 10, ranks=[1])
        began = time.monotonic()
        save(world, 1)
        assert all(world.all("settle"))
        assert time.monotonic() - began < 10, "rank 0 was not told"
        assert run.committed() == []
        assert {event.rank: "File too large" in str(event.data["reason"]) for event in run.events("save_failed")} == {0: True, 1: True}
        world.all("limit_files", size=-1, ranks=[1])
        commit_next(run, world, 2)


def test_a_rank_whose_writer_cannot_begin_is_not_waited_for(make_run: MakeRun) -> None:
    """The save of a stop must come to its end, or be made in another way, within the grace period."""
    run = make_run()
    with run.world(2) as world:
        (address, _) = world.all("fork_at", address="/nowhere", ranks=[1])
        began = time.monotonic()
        save(world, 1)
        assert all(world.all("settle"))
        assert time.monotonic() - began < 10, "rank 0 was not told"
        save(world, 2, stopping=True)
        assert run.committed() == [2], "in the process itself"
        world.all("fork_at", address=address, ranks=[1])
        commit_next(run, world, 3)


def test_what_a_save_leaves_is_removed_whole_or_becomes_a_checkpoint_whole(tmp_path: Path) -> None:
    """Its writer may be about to rename it, after it was given up."""
    kept = 0
    for number in range(60):
        directory, final = tmp_path / f".tmp-00000001-1-{number}", tmp_path / f"step-{number:08d}"
        directory.mkdir()
        for name in range(40):
            (directory / str(name)).touch()
        begin = threading.Barrier(2)

        def commit(number: int = number, directory: Path = directory, final: Path = final, begin: threading.Barrier = begin) -> None:
            begin.wait()
            time.sleep(number % 3 * 2e-3)
            with contextlib.suppress(FileNotFoundError):
                directory.rename(final)

        thread = threading.Thread(target=commit)
        thread.start()
        begin.wait()
        time.sleep(1e-3)
        discard(directory)
        thread.join()
        if final.exists():
            kept += 1
            assert len(list(final.iterdir())) == 40
        assert not directory.exists() and not list(tmp_path.glob(".old-*"))
    assert 0 < kept < 60, "the one was always first"
