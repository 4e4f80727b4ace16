"""Copies of snapshots on a peer node: whole or not there, whoever dies while they are sent."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tier_world import REPOSITORY, Run, wait_until

from trainer import environment
from trainer.checkpointing.replicas import KEPT, connect, fetch, put
from trainer.checkpointing.snapshot_files import HEADER, Name, held, read_header, replica, write_header
from trainer.recovery.stub import request

MakeRun = Callable[..., Run]

NODE = 1
RANK = 0
SIZE = 3 << 20


def name(step: int) -> Name:
    return step, f"{step:x}e"


def snapshot(path: Path, step: int) -> Path:
    """A whole snapshot of ``step`` at ``path``."""
    content = os.urandom(SIZE)
    header = {"rank": RANK, "step": step, "entry": name(step)[1], "size": SIZE, "crc": zlib.crc32(content)}
    path.write_bytes(json.dumps(header).encode().ljust(HEADER, b"\0") + content)
    return path


@contextmanager
def served(run: Run) -> Iterator[Path]:
    """The directory of a node whose snapshots are served, as ``steps.node`` has them served; at the end it is killed."""
    address = run.paths.peer(1, NODE)
    address.unlink(missing_ok=True)
    variables = environment.mapping() | {
        environment.RUN_DIRECTORY: str(run.paths.run), environment.ATTEMPT: "1", environment.NODE: str(NODE),
    }  # fmt: skip
    with run.forks.connect() as server:
        target = "trainer.checkpointing.replicas:serve"
        request(server, "snapshots", target, [], variables, str(REPOSITORY), [0, 1, 2])
        wait_until(address.exists, "the server of snapshots listens")
        yield run.paths.snapshots(run.config.snapshot_root, NODE)
    wait_until(lambda: not run.forks.children(), "the server of snapshots is gone")


def send(run: Run, source: Path, step: int) -> None:
    put(run.paths, 1, NODE, RANK, name(step), source)


def send_half(run: Run, source: Path, step: int) -> None:
    """As ``put`` does it, up to the middle; then nothing more comes."""
    with connect(run.paths, 1, NODE) as connection:
        connection.sendall(f"put {RANK} {step} {name(step)[1]} {HEADER + SIZE}\n".encode())
        connection.sendall(source.read_bytes()[: SIZE // 2])
        time.sleep(60)


@contextmanager
def half_sent(run: Run, directory: Path, source: Path, step: int) -> Iterator[int]:
    """A process that has sent half a snapshot, and would go on; at the end it is killed."""
    sender = multiprocessing.get_context("fork").Process(target=send_half, args=(run, source, step))
    sender.start()
    try:
        wait_until(lambda: any(path.stat().st_size for path in directory.glob(".*.part")), "something has arrived")
        assert sender.pid is not None
        yield sender.pid
    finally:
        sender.kill()
        sender.join()


def test_what_was_put_is_fetched_and_the_newest_are_kept(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    with served(run) as directory:
        sources = {step: snapshot(tmp_path / f"rank-0-{step}", step) for step in range(1, KEPT + 3)}
        for step, source in sources.items():
            send(run, source, step)
        newest = [replica(directory, RANK, name(step)) for step in sorted(sources)[-KEPT:]]
        assert sorted(directory.iterdir()) == newest
        target = tmp_path / "another" / "rank-0-0"
        fetch(run.paths, 1, NODE, RANK, name(KEPT + 2), target)
        assert target.read_bytes() == sources[KEPT + 2].read_bytes()


def test_a_sender_that_is_killed_in_the_middle_leaves_what_was_there_before(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    source = snapshot(tmp_path / "rank-0-0", 2)
    with served(run) as directory:
        send(run, snapshot(tmp_path / "rank-0-1", 1), 1)
        with half_sent(run, directory, source, 2) as sender:
            assert set(held(directory, {})) == {(RANK, name(1))}, "a torn copy counts as one"
            os.kill(sender, signal.SIGKILL)
            wait_until(lambda: not list(directory.glob(".*")), "the torn copy is removed")
        assert set(held(directory, {})) == {(RANK, name(1))}
        send(run, source, 2)  # and the next sender is served
        assert set(held(directory, {})) == {(RANK, name(1)), (RANK, name(2))}


def test_a_server_that_is_killed_in_the_middle_leaves_nothing_to_its_successor(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    source = snapshot(tmp_path / "rank-0-0", 1)
    with served(run) as directory, half_sent(run, directory, source, 1):
        (server,) = run.forks.children()
        server.kill()
        server.wait()
    assert list(directory.glob(".*.part"))
    with served(run):
        assert list(directory.iterdir()) == []


def test_a_copy_that_ends_early_is_not_kept(make_run: MakeRun, tmp_path: Path) -> None:
    """Its header, which comes first, says that it is whole. What the fetching rank had under that name stays."""
    run = make_run()
    target = snapshot(tmp_path / "rank-0-0", 3)
    before = target.read_bytes()
    with served(run) as directory:
        send(run, snapshot(tmp_path / "rank-0-1", 1), 1)
        os.truncate(replica(directory, RANK, name(1)), SIZE // 2)
        with pytest.raises(OSError, match="node 1 sent no whole copy of step 1 of rank 0"):
            fetch(run.paths, 1, NODE, RANK, name(1), target)
        with pytest.raises(OSError, match="node 1 sent no whole copy of step 9 of rank 0"):
            fetch(run.paths, 1, NODE, RANK, name(9), target)
    assert target.read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))


def test_a_peer_that_is_not_there_costs_the_copy_and_no_time(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    source = snapshot(tmp_path / "rank-0-0", 1)
    began = time.monotonic()
    with pytest.raises(OSError, match="No such file"):
        send(run, source, 1)
    with served(run):
        pass
    with pytest.raises(OSError, match="refused"):
        send(run, source, 1)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("line", [b"", b"put 0\n", b"get 0 1 ../x\n", b"put 0 1 ../../x 4\nabcd", b"put 0 1 a -1\n", b"drop 0 1 a\n"])
def test_a_request_that_is_none_is_not_answered(make_run: MakeRun, line: bytes) -> None:
    run = make_run()
    with served(run) as directory:
        with connect(run.paths, 1, NODE) as connection:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(16) == b""
        assert list(directory.iterdir()) == []


def test_a_replica_without_a_checksum_is_none(make_run: MakeRun, tmp_path: Path) -> None:
    """It came over a network; a rank's own file is whole from the moment its header says so, and gets its checksum later."""
    run = make_run()
    with served(run) as directory:
        source = snapshot(tmp_path / "rank-0-0", 1)
        header = read_header(source)
        del header["crc"]
        write_header(source, header)
        send(run, source, 1)
        assert replica(directory, RANK, name(1)).exists() and not held(directory, {})
    assert set(held(tmp_path, {})) == {(RANK, name(1))}
