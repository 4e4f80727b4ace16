"""The node-local tier: two generations, whole on every rank, of one trajectory, and given up where there is no room."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_writer_faults import mounted, root_only
from tier_world import Run

from trainer.checkpointing import SnapshotSlot
from trainer.checkpointing.snapshot_files import read_header, write_header
from trainer.checkpointing.staging import AnonymousBuffer
from trainer.checkpointing.transfer import Copying

MakeRun = Callable[..., Run]


def generations(run: Run) -> list[Path]:
    return sorted(run.paths.snapshots(run.config.snapshot_root, 0).iterdir())


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def make_snapshots(make_run: MakeRun) -> MakeRun:
    return lambda **values: make_run(**({"checkpoint_mode": "off", "snapshot_interval_steps": 1} | values))


def test_a_step_that_not_every_rank_holds_is_not_resumed(make_snapshots: MakeRun) -> None:
    run = make_snapshots()
    with run.world(2) as world:
        world.all("fill", step=1)
        first = world.one("digest")
        world.all("save", step=1)
        world.all("fill", step=2)
        world.all("save_alone", step=2, ranks=[0])  # rank 1 died before it could
        world.all("join")
    with run.world(2, cycle=1) as world:
        assert world.one("resume") == [1, "snapshot"]
        assert world.one("digest") == first


def test_the_step_that_all_have_is_never_overwritten_before_the_next_is_whole(make_snapshots: MakeRun) -> None:
    """Rank 0 was a snapshot ahead when rank 1 died. Resumed from the older one, rank 0 must not write over just that."""
    run = make_snapshots()
    with run.world(2) as world:
        world.all("fill", step=1)
        first = world.one("digest")
        world.all("save", step=1)
        world.all("fill", step=2)
        world.all("save_alone", step=2, ranks=[0])
        world.all("join")
    with run.world(2, cycle=1) as world:
        assert world.one("resume") == [1, "snapshot"]
        world.all("fill", step=2)
        world.all("save_alone", step=2, ranks=[0])  # and the same again
        world.all("join")
    with run.world(2, cycle=2) as world:
        assert world.one("resume") == [1, "snapshot"]
        assert world.one("digest") == first


def test_parts_of_two_trajectories_are_never_put_together(make_snapshots: MakeRun) -> None:
    """Rank 0 holds step 2 of the first pass, rank 1 of the second (on GPUs their bits differ)."""
    run = make_snapshots()
    with run.world(2) as world:
        world.all("fill", step=1)
        first = world.one("digest")
        world.all("save", step=1)
        world.all("fill", step=1002)
        world.all("save_alone", step=2, ranks=[0])
        world.all("join")
    with run.world(2, cycle=1) as world:
        assert world.one("resume") == [1, "snapshot"]
        world.all("fill", step=2)
        world.all("save_alone", step=2, ranks=[1])
        world.all("join")
    with run.world(2, cycle=2) as world:
        assert world.one("resume") == [1, "snapshot"]
        assert world.one("digest") == first


def test_a_damaged_generation_falls_back_to_the_other(make_snapshots: MakeRun) -> None:
    run = make_snapshots()
    digests: list[str] = []
    with run.world(2) as world:
        for step in (1, 2):
            world.all("fill", step=step)
            digests.append(world.one("digest"))
            world.all("save", step=step)
        world.all("join")
    flip(run.paths.snapshots(run.config.snapshot_root, 0) / "rank-1-1", 8192)
    with run.world(2, cycle=1) as world:
        assert world.one("resume") == [1, "snapshot"]
        assert world.one("digest") == digests[0]
        assert "checksum" in run.events("checkpoint_refused")[0].data["reason"]
    for path in generations(run):
        flip(path, 8192)
    with run.world(2, cycle=2) as world:
        assert world.one("resume") == [0, "none"]  # there is no durable tier in this test


def test_a_snapshot_counts_once_its_copy_has_ended_though_its_checksum_has_not_been_computed(make_snapshots: MakeRun) -> None:
    run = make_snapshots()
    with run.world(2) as world:
        for step in (1, 2):
            world.all("fill", step=step)
            world.all("save", step=step)
        newest = world.one("digest")
        world.all("join")
    for path in generations(run):  # as a fault leaves them that comes in the moment between the two
        header = read_header(path)
        assert header.pop("crc")
        write_header(path, header)
    with run.world(2, cycle=1) as world:
        assert world.one("resume") == [2, "snapshot"]
        assert world.one("digest") == newest
        assert not run.events("checkpoint_refused")


@pytest.mark.parametrize("content", [b"", b"\xff" * 4096, b"[1]", b'{"step": 1}', b'{"step": "x", "entry": 1}'])
def test_headers_of_garbage_are_no_snapshots(make_snapshots: MakeRun, content: bytes) -> None:
    run = make_snapshots()
    with run.world(1) as world:
        world.all("save", step=1)
        world.all("join")
    for path in generations(run):
        with path.open("r+b") as file:
            file.write(content.ljust(4096, b"\0"))
    with run.world(1) as world:
        assert world.one("resume") == [0, "none"]


def test_another_run_of_the_same_name_is_another_run(make_snapshots: MakeRun, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    run = make_snapshots(snapshot_root=memory)
    with run.world(1) as world:
        world.all("save", step=1)
        world.all("join")
    elsewhere = Run.make(run.forks, tmp_path / "b", checkpoint_mode="off", snapshot_interval_steps=1, snapshot_root=memory)
    with elsewhere.world(1) as world:
        assert world.one("resume") == [0, "none"]
        world.all("save", step=5)
    with run.world(1) as world:
        assert world.one("resume") == [1, "snapshot"]
    shutil.rmtree(run.paths.run)  # begun anew under the same root: what is in memory is of the run before
    again = make_snapshots(snapshot_root=memory, created=2.0)
    with again.world(1) as world:
        assert world.one("resume") == [0, "none"]


def test_a_newer_durable_checkpoint_wins_and_a_tie_goes_to_memory(make_run: MakeRun) -> None:
    run = make_run(snapshot_interval_steps=2, checkpoint_interval_steps=3)
    with run.world(1) as world:
        world.all("train_on", first=1, last=3)
        assert world.one("resume") == [3, "durable"]
        world.all("train_on", first=4, last=4)
        world.all("join")
        assert world.one("resume") == [4, "snapshot"]
        world.all("train_on", first=5, last=6)
        world.all("join")
        assert world.one("resume") == [6, "snapshot"]


@root_only
def test_memory_that_fills_up_costs_the_tier_and_nothing_else(make_run: MakeRun, tmp_path: Path) -> None:
    memory = tmp_path / "small"
    run = make_run(snapshot_root=memory, snapshot_interval_steps=1, checkpoint_interval_steps=2, width=64)
    with mounted(memory, "size=3m"):
        room = os.statvfs(memory)
        (memory / "ballast").write_bytes(b"\1" * (room.f_bavail * room.f_frsize - (300 << 10)))
        with run.world(1) as world:
            world.all("train_on", first=1, last=4)
            failed = run.events("save_failed")
            assert [(event.data["step"], event.data["tier"]) for event in failed] == [(1, "snapshot")]
            assert "No space left" in failed[0].data["reason"]
            assert run.committed() == [2, 4]
            left = os.statvfs(memory)
            assert left.f_bavail * left.f_frsize >= 250 << 10  # what did not fit is given back
            (memory / "ballast").unlink()
            world.all("enter")  # the next entry tries again
            assert world.one("resume") == [4, "durable"]
            world.all("train_on", first=5, last=5)
            world.all("join")
            assert world.one("resume") == [5, "snapshot"]


def test_a_restart_before_the_seal_has_begun_leaves_nothing_to_wait_for() -> None:
    """NVRx raises its exception in the main thread wherever that is: here, before the thread that seals was started."""
    slot = SnapshotSlot()
    slot._copying, slot._thread = Copying(), threading.Thread(target=print)
    began = time.monotonic()
    slot.fence()
    slot.join()
    slot.fence()
    assert time.monotonic() - began < 2


def test_memory_that_is_mapped_beforehand_keeps_no_other_thread_from_mapping_some() -> None:
    """As an abort does again and again. In parts of 64 MiB one of the two could take place for each part."""
    staging = AnonymousBuffer(512 << 20)
    thread = threading.Thread(target=staging.buffer.populate)
    mapped = 0
    thread.start()
    try:
        began = time.monotonic()
        while thread.is_alive():
            mmap.mmap(-1, 1 << 20).close()
            mapped += 1
        took = time.monotonic() - began
    finally:
        thread.join()
        staging.close()
    if took < 0.02:
        pytest.skip(f"512 MiB were mapped in {took:.3f} s: this kernel has no MADV_POPULATE_WRITE")
    assert mapped > 50
