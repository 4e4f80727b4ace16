"""The parent's side of ``tier_worker``: a fork server, and worlds of ranks that save and load on command. Not a test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from trainer import environment, events
from trainer.config import RunConfig, build
from trainer.events import Event
from trainer.paths import RunPaths
from trainer.records import RunRecord, write_whole
from trainer.recovery.stub import request

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 60.0
"""Seconds that any answer may take: beyond them a test fails, and what it started is killed."""


class RankError(Exception):
    """A command that raised on some rank; ``code`` is the contract's exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class ForkServerProcess:
    """A fork server with the imports of training and of ``tier_worker``'s folder."""

    process: subprocess.Popen[bytes]
    address: str
    worlds: int = 0
    """Worlds that are open."""

    @classmethod
    def start(cls, folder: Path, stopped_seconds: float = 3600.0) -> ForkServerProcess:
        path = str(folder / "fork")
        place = [path, str(folder / "runs" / "server"), "1", "0", "0", str(stopped_seconds)]
        search = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.recovery.fork_server", *place],
            env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
            cwd=REPOSITORY,
        )
        return cls(process, path)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deadline = time.monotonic() + 3 * DEADLINE
        while True:
            try:
                connection.connect(self.address)
                return connection
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    connection.close()
                    raise
                time.sleep(0.05)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Member:
    """One rank of a world, as its parent sees it."""

    rank: int
    server: socket.socket
    channel: socket.socket
    pid: int = 0
    buffered: bytes = b""

    def send(self, command: str, arguments: dict[str, Any]) -> None:
        self.channel.sendall(json.dumps({"command": command, "arguments": arguments}).encode() + b"\n")

    def answer(self, seconds: float = DEADLINE) -> Any:
        """The next answer; ``RankError`` when the command raised, ``EOFError`` when the rank is gone."""
        self.channel.settimeout(seconds)
        while b"\n" not in self.buffered:
            part = self.channel.recv(65536)
            if not part:
                raise EOFError(f"rank {self.rank} is gone")
            self.buffered += part
        line, _, self.buffered = self.buffered.partition(b"\n")
        found = json.loads(line)
        if "error" in found:
            raise RankError(found["error"], found["code"])
        return found.get("value", found)


@dataclass
class World:
    """Ranks on process groups of their own. A command goes to all of them; the answers come in the order of ranks."""

    forks: ForkServerProcess
    run: Run
    members: list[Member] = field(default_factory=list)

    def start(self, size: int, *, width: int, attempt: int = 1, cycle: int = 0) -> None:
        self.forks.worlds += 1
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        for rank in range(size):
            ours, theirs = socket.socketpair()
            variables = environment.mapping() | {
                environment.RUN_DIRECTORY: str(self.run.paths.run), environment.ATTEMPT: str(attempt),
                environment.NODE: "0", environment.POD: "0", environment.NODE_PID: str(os.getpid()),
                environment.FORK_SERVER: self.forks.address, "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(cycle), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            server = self.forks.connect()
            log = os.open(self.run.paths.run / f"rank-{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
            with open(os.devnull) as nothing:  # noqa: PTH123 - a device
                descriptors = [nothing.fileno(), log, log, theirs.fileno()]
                request(server, "worker", "tier_worker:main", [str(width)], variables, str(REPOSITORY), descriptors)
            os.close(log)
            theirs.close()
            self.members.append(Member(rank, server, ours))
        for member in self.members:
            member.pid = member.answer()["pid"]
        self.all("enter")

    def begin(self, command: str, **arguments: Any) -> None:
        """Give a command to all ranks without waiting."""
        for member in self.members:
            member.send(command, arguments)

    def answers(self, seconds: float = DEADLINE) -> list[Any]:
        """Every rank's answer; the first error is raised when all have answered."""
        found: list[Any] = []
        for member in self.members:
            try:
                found.append(member.answer(seconds))
            except RankError as error:
                found.append(error)
        for answer in found:
            if isinstance(answer, RankError):
                raise answer
        return found

    def all(self, command: str, **arguments: Any) -> list[Any]:
        self.begin(command, **arguments)
        return self.answers()

    def one(self, command: str, **arguments: Any) -> Any:
        """Rank 0's answer, where all ranks give the same."""
        found = self.all(command, **arguments)
        assert all(answer == found[0] for answer in found), found
        return found[0]

    def workers(self) -> list[psutil.Process]:
        pids = {member.pid for member in self.members}
        return [child for child in self.forks.children() if child.pid in pids]

    def writers(self) -> list[psutil.Process]:
        """The writer processes: what the fork server has forked besides the ranks."""
        pids = {member.pid for member in self.members}
        return [child for child in self.forks.children() if child.pid not in pids and child.is_running()]

    def close(self) -> None:
        """Kill the ranks (their writers go with them) and wait until they are gone."""
        for member in self.members:
            if member.pid:  # (it is known from its first answer; 0 would be this process's own group)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
            member.channel.close()
        wait_until(lambda: not self.workers(), "the ranks of a world are gone")
        self.forks.worlds -= 1
        if not self.forks.worlds:
            wait_until(lambda: not self.forks.children(), "the writers of a world are gone with their ranks")
        for member in self.members:
            member.server.close()
        self.members = []


@dataclass
class Run:
    """A run's record and folder without a training behind it."""

    paths: RunPaths
    config: RunConfig
    forks: ForkServerProcess
    width: int = 32

    @classmethod
    def make(
        cls, forks: ForkServerProcess, root: Path, *, width: int = 32, created: float = 1.0, **values: object
    ) -> Run:
        chosen: dict[str, object] = {
            "run_id": "drill", "root": root, "snapshot_root": root / "memory", "gpus_per_node": 1, "checkpoint_interval_steps": 1,
            "snapshot_interval_steps": 0, "max_steps": 1000, "save_timeout_seconds": 20, "heartbeat_timeout_seconds": 10,
        }  # fmt: skip
        config = build(chosen | values)
        paths = RunPaths(root, config.run_id)
        (root / "memory").mkdir(parents=True, exist_ok=True)
        record = RunRecord(
            config=config, config_digest=config.digest("data"), dataset="", dataset_digest="data", versions={}, hardware={}, created=created
        )  # fmt: skip
        record.write(paths.record)
        run = cls(paths, config, forks, width)
        run.fence(1)
        return run

    def fence(self, attempt: int) -> None:
        write_whole(self.paths.fence, str(attempt).encode())

    @contextmanager
    def world(self, size: int = 1, *, attempt: int = 1, cycle: int = 0) -> Iterator[World]:
        world = World(self.forks, self)
        try:
            world.start(size, width=self.width, attempt=attempt, cycle=cycle)
            yield world
        finally:
            world.close()

    def events(self, *names: str) -> list[Event]:
        return [event for event in events.read(self.paths.events) if event.event in names]

    def committed(self) -> list[int]:
        """The steps of the checkpoints that have their final names."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.paths.checkpoints.glob("step-*"))


def wait_until(holds: Callable[[], bool], what: str, seconds: float = DEADLINE, pause: float = 0.005) -> None:
    """Return once it holds; ``AssertionError`` naming it when it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"in {seconds:g} s it did not happen that {what}"
        time.sleep(pause)
