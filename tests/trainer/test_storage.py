"""The emulated storage: one rate for all processes, whatever happens to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from trainer.checkpointing.storage import PIECE_SECONDS, Storage

MEGABYTE = 1_000_000


def elapsed(began: float) -> float:
    return time.monotonic() - began


def test_bytes_take_their_time(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "bucket", 2 * MEGABYTE)
    began = time.monotonic()
    for _ in range(3):
        storage.transfer(MEGABYTE // 5)
    assert 0.29 <= elapsed(began) < 2


def test_storage_that_is_not_emulated_takes_none_and_leaves_nothing(tmp_path: Path) -> None:
    began = time.monotonic()
    Storage(tmp_path / "bucket", 0.0).transfer(1 << 50)
    assert elapsed(began) < 0.1
    assert list(tmp_path.iterdir()) == []


def test_processes_share_one_rate(tmp_path: Path) -> None:
    """Two at once take as long as both one after the other, and each about as long as the other: they take turns."""
    storage = Storage(tmp_path / "bucket", MEGABYTE)
    both = [multiprocessing.get_context("fork").Process(target=storage.transfer, args=(MEGABYTE // 4,)) for _ in range(2)]
    began = time.monotonic()
    for process in both:
        process.start()
    ends = []
    for process in both:
        process.join(30)
        ends.append(elapsed(began))
    assert [process.exitcode for process in both] == [0, 0]
    assert 0.49 <= max(ends) < 3
    assert min(ends) > 0.35


@pytest.mark.parametrize("left", ["", "torn", "1e3"])
def test_what_is_in_the_bucket_is_no_obstacle(tmp_path: Path, left: str) -> None:
    """Empty, unreadable, or long ago."""
    bucket = tmp_path / "bucket"
    bucket.write_text(left)
    began = time.monotonic()
    Storage(bucket, MEGABYTE).transfer(MEGABYTE // 10)
    assert 0.09 <= elapsed(began) < 2


@pytest.mark.parametrize("ahead", [3600.0, float("inf")])
def test_a_clock_that_was_set_back_is_not_waited_for(tmp_path: Path, ahead: float) -> None:
    """The bucket says until when it is taken by the clock of before; what is asked for now takes its time, and no more."""
    bucket = tmp_path / "bucket"
    bucket.write_text(f"{time.time() + ahead:<32.6f}")
    asking = multiprocessing.get_context("fork").Process(target=Storage(bucket, MEGABYTE).transfer, args=(MEGABYTE // 10,))
    began = time.monotonic()
    asking.start()
    asking.join(10)
    took = elapsed(began)
    asking.kill()
    assert 0.09 <= took < 5
    assert float(bucket.read_text().split()[0]) < time.time() + 1


def test_a_queue_of_seconds_is_waited_for(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.write_text(f"{time.time() + 1:<32.6f}")
    began = time.monotonic()
    Storage(bucket, MEGABYTE).transfer(MEGABYTE // 10)
    assert elapsed(began) > 1


def test_a_killed_process_leaves_nothing_to_wait_for(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "bucket", MEGABYTE)
    victim = multiprocessing.get_context("fork").Process(target=storage.transfer, args=(100 * MEGABYTE,))
    victim.start()
    deadline = time.monotonic() + 10
    while not storage.bucket.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(10)
    assert float(storage.bucket.read_text() or 0) <= time.time() + 2 * PIECE_SECONDS
    began = time.monotonic()
    storage.transfer(MEGABYTE // 10)
    assert elapsed(began) < 2
