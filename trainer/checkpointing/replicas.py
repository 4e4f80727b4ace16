"""Snapshots between nodes: from where a rank used to be, and copies on a peer node that survive a lost one.

A launcher may give a rank to another node after a restart, and a lost node takes its snapshots along. So every node
runs one small server (forked from its fork server) over its own memory-backed directory. With replicas on, node i
also keeps what the ranks of node i - 1 send to it:

    put <rank> <step> <entry> <size>   then a snapshot file: stored beside, renamed when whole, the newest two kept
    get <rank> <step> <entry>          answers the file, a replica or the rank's own

Servers are found by a file under the run's directory that holds ``host port``, written when they listen. The sending
is in a rank's background thread and never waited for by training, except before the generation it reads from is
overwritten. A peer that does not answer costs the copy, not the run.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from pathlib import Path

from trainer import environment
from trainer.checkpointing.snapshot_files import HEADER, Name, held, read_header, replica
from trainer.events import EventLog
from trainer.paths import RunPaths
from trainer.records import RunRecord, write_whole

KEPT = 2
TIMEOUT_SECONDS = 20.0
BLOCK = 1 << 20
ENTRY = re.compile(r"^[0-9a-f]+$")


def serve(*descriptors: int) -> int:
    """The server of a node; ends with its fork server."""
    env = environment.read_node()
    paths = RunPaths(env.run_directory.parent.parent, env.run_directory.name)
    directory = paths.snapshots(RunRecord.read(paths.record).config.snapshot_root, env.node)
    directory.mkdir(parents=True, exist_ok=True)
    for torn in directory.glob(".replica-*.part"):  # of a server that was killed
        torn.unlink(missing_ok=True)
    listener = socket.create_server(("", 0), backlog=64)
    address = f"{environment.address()} {listener.getsockname()[1]}"
    write_whole(paths.peer(env.attempt, env.node), address.encode())
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, directory), daemon=True).start()


def _answer(connection: socket.socket, directory: Path) -> None:
    with connection, contextlib.suppress(OSError, ValueError, LookupError):
        connection.settimeout(TIMEOUT_SECONDS)
        with connection.makefile("rb") as stream:
            verb, *numbers = stream.readline().split()
            rank, name = int(numbers[0]), (int(numbers[1]), numbers[2].decode())
            if not ENTRY.match(name[1]):
                raise ValueError("not the name of a snapshot")
            if verb == b"put":
                path = replica(directory, rank, name)
                partial = path.with_name(f".{path.name}.part")
                try:
                    with partial.open("wb") as file:
                        left = int(numbers[3])
                        while left:
                            block = stream.read(min(BLOCK, left))
                            if not block:
                                raise ValueError("the sender went away")
                            file.write(block)
                            left -= len(block)
                    partial.rename(path)
                finally:
                    partial.unlink(missing_ok=True)
                for old in sorted(directory.glob(f"replica-{rank}-*"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
                    old.unlink(missing_ok=True)
                connection.sendall(b"kept\n")
            elif verb == b"get":
                with held(directory, {})[rank, name].open("rb") as file:
                    connection.sendfile(file)


def connect(paths: RunPaths, attempt: int, node: int) -> socket.socket:
    """A connection to the server of ``node``. ``OSError`` when it is not there."""
    host, port = paths.peer(attempt, node).read_text().split()
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_SECONDS)


def put(paths: RunPaths, attempt: int, node: int, rank: int, name: Name, source: Path) -> None:
    """Send the snapshot file ``source`` to ``node``; returns when it is kept there whole."""
    with connect(paths, attempt, node) as connection, source.open("rb") as file:
        size = source.stat().st_size
        connection.sendall(f"put {rank} {name[0]} {name[1]} {size}\n".encode())
        connection.sendfile(file)
        if connection.recv(16) != b"kept\n":
            raise OSError(f"node {node} did not keep the replica of rank {rank}")


def fetch(paths: RunPaths, attempt: int, node: int, rank: int, name: Name, target: Path) -> None:
    """Bring a replica from ``node`` to ``target``, a generation of this rank's own. ``OSError`` when it does not arrive
    whole: its header comes first, and would say that it is."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.part")
    try:
        with connect(paths, attempt, node) as connection, partial.open("wb") as file:
            connection.sendall(f"get {rank} {name[0]} {name[1]}\n".encode())
            while block := connection.recv(BLOCK):
                file.write(block)
        if partial.stat().st_size != HEADER + int(read_header(partial).get("size", -1)):
            raise OSError(f"node {node} sent no whole copy of step {name[0]} of rank {rank}")
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)


class Replicator:
    """Sends this rank's sealed snapshots to the peer node, one at a time, in a thread."""

    def __init__(self, paths: RunPaths, attempt: int, peer: int, rank: int, events: EventLog) -> None:
        self._paths = paths
        self._attempt = attempt
        self._peer = peer
        self._rank = rank
        self._events = events
        self._thread: threading.Thread | None = None
        self._source: Path | None = None

    def send(self, name: Name, source: Path) -> None:
        """Start sending, unless the last copy is still on its way: then this one is left out."""
        if self._thread is not None and self._thread.is_alive():
            self._events.emit("save_skipped", step=name[0], tier="replica", reason="the last replica is on its way")
            return
        self._source = source
        self._thread = threading.Thread(target=self._run, args=(name, source), name="replica", daemon=True)
        self._thread.start()

    def _run(self, name: Name, source: Path) -> None:
        try:
            put(self._paths, self._attempt, self._peer, self._rank, name, source)
        except (OSError, ValueError) as error:
            self._events.emit("save_failed", step=name[0], tier="replica", reason=str(error))

    def release(self, source: Path) -> None:
        """Wait until ``source`` is no longer read from: it is about to be overwritten."""
        if self._source == source and self._thread is not None:
            self._thread.join(TIMEOUT_SECONDS * 2)
            self._source = None
