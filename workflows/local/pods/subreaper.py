"""Starts tasks and leaves none behind. Runs as a program of its own, as ``pods.subreaper``, with the
standard library only.

    engine --(socket)--> nursery: forks a subreaper per task, nothing else
                         subreaper: a mount namespace, the task's process, its descendants, its outputs
                         `- task: the command, in a session of its own

1. The engine sends the nursery one end of a socket pair; the nursery forks, and the fork reads its request from it.
2. The subreaper adopts whatever its task leaves behind (PR_SET_CHILD_SUBREAPER), sessions of their own included.
3. When the task's main process ends, every other descendant is killed, as with a container, and the outcome is sent.
4. When the engine's end of the socket closes, for whatever reason, everything is ended: SIGTERM, two seconds, SIGKILL.

The nursery is a subreaper, too: it kills what a killed subreaper left. Messages are JSON, each after its length.
"""

# pathlib would double the time that this program takes to start:
# ruff: noqa: PTH112, PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from typing import Any, NoReturn

from .view import View, probe

ORPHAN_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when the engine is gone."""
MAX_OUTPUT = 1 << 20
"""Bytes of an output parameter's file; Argo could not store more."""
MAX_RESULT = 256 << 10
"""Bytes of standard output that become a result: the last ones, as in Argo."""

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_CHILD_SUBREAPER = 36
_DEFAULT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)
"""Those that Python or the subreaper itself handles or ignores."""


def send(channel: socket.socket, message: Any) -> None:
    """Write one message whole."""
    data = json.dumps(message).encode()
    channel.sendall(struct.pack("!I", len(data)) + data)


def receive(channel: socket.socket) -> Any:
    """Read one message whole; None at the end of the stream."""
    head = _exactly(channel, 4)
    body = _exactly(channel, struct.unpack("!I", head)[0]) if head is not None else None
    return None if body is None else json.loads(body)


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = channel.recv(count - len(data))
        if not part:
            return None
        data += part
    return data


# --- processes -----------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """The direct children of a process."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return _children_by_scan(pid) if os.path.isdir(f"/proc/{pid}") and not found else found
    except (OSError, ValueError):
        return found
    return found


def _children_by_scan(pid: int) -> list[int]:
    """The same where the kernel keeps no list of children."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{entry}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry))
    return found


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, nearest first."""
    found: list[int] = []
    pending = children(pid)
    while pending:
        found += pending
        pending = [below for child in pending for below in children(child)]
    return found


def reap() -> dict[int, int]:
    """Collect every child that has ended: pid -> wait status."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def kill_all(number: int, spare: frozenset[int] = frozenset()) -> None:
    """Send a signal to every descendant, those in ``spare`` and below them aside."""
    pending = [child for child in children(os.getpid()) if child not in spare]
    while pending:
        for pid in pending:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        pending = [below for child in pending for below in children(child)]


def end_all(spare: frozenset[int] = frozenset(), patience: float = 10.0) -> None:
    """Kill descendants until none is left; one that cannot die (a stuck system call) is given up after ``patience`` seconds."""
    deadline, pause = time.monotonic() + patience, 0.001
    while time.monotonic() < deadline:
        kill_all(signal.SIGKILL, spare)
        reap()
        if not [child for child in children(os.getpid()) if child not in spare]:
            return
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


# --- one task ------------------------------------------------------------------------------------------------------


class Task:
    """One task, from its request to its outcome."""

    def __init__(self, channel: socket.socket, request: dict[str, Any]) -> None:
        self.channel = channel
        self.request = request
        self.main = 0
        self.status: int | None = None
        self.captured = b""
        self.pipe = -1
        self.kill_at = 0.0
        self.engine_gone = False
        self.wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: self.terminate())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def run(self) -> None:
        try:
            if self.request["view"] is not None:
                View(self.request["view"])
            self.start()
        except OSError as error:
            send(self.channel, {"failed": f"{error.strerror or error}"})
            return
        send(self.channel, {"started": self.main})
        self.supervise()
        end_all()
        self.drain()
        if self.status is not None:
            send(self.channel, {"code": _exit_code(self.status), "outputs": self.outputs(), "result": self.result()})

    def start(self) -> None:
        """Start the main process; a command that cannot be executed ends with 64, as with Argo's executor."""
        command, environment = self.request["command"], self.request["environment"]
        os.environ.pop("PATH", None)
        if "PATH" in environment:
            os.environ["PATH"] = environment["PATH"]
        output = self.log
        if self.request["capture"]:
            self.pipe, output = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self.pipe, False)
        try:
            os.chdir(self.request["directory"])
            self.main = start(command, environment, output, self.log)
        except OSError as error:
            os.write(self.log, f"{command[0]}: {error.strerror}\n".encode())
            self.status = 64 << 8
        if output != self.log:
            os.close(output)

    def supervise(self) -> None:
        """Wait for the main process to end, and for orders."""
        while self.status is None:
            readable = (
                [self.wake]
                + ([] if self.engine_gone else [self.channel.fileno()])
                + ([self.pipe] if self.pipe >= 0 else [])
            )
            left = max(0.0, self.kill_at - time.monotonic()) if self.kill_at else None
            ready, _, _ = select.select(readable, [], [], left)
            if self.wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake, 4096)
            if self.pipe in ready:
                self.read_pipe()
            if self.channel.fileno() in ready:
                self.obey()
            if self.kill_at and time.monotonic() >= self.kill_at:
                self.kill_at = 0.0
                kill_all(signal.SIGKILL)
            self.status = reap().get(self.main)

    def obey(self) -> None:
        """``{"grace": seconds}`` ends the task; so does the end of the stream."""
        try:
            order = receive(self.channel)
        except ConnectionResetError:
            order = None
        self.engine_gone = order is None
        self.terminate()
        self.kill_at = time.monotonic() + (ORPHAN_GRACE if order is None else float(order["grace"]))

    def terminate(self) -> None:
        if self.main:
            with contextlib.suppress(OSError):
                os.killpg(self.main, signal.SIGTERM)

    def read_pipe(self) -> bool:
        """Copy what the task wrote to its log, and keep the end of it; False when there is no more."""
        try:
            data = os.read(self.pipe, 65536)
        except BlockingIOError:
            return False
        if data:
            os.write(self.log, data)
            self.captured = (self.captured + data)[-MAX_RESULT - 1 :]
            return True
        os.close(self.pipe)
        self.pipe = -1
        return False

    def drain(self) -> None:
        while self.pipe >= 0 and self.read_pipe():
            pass

    def result(self) -> str | None:
        if not self.request["capture"]:
            return None
        text = self.captured[:-1] if self.captured.endswith(b"\n") else self.captured
        return text[-MAX_RESULT:].decode(errors="replace")

    def outputs(self) -> dict[str, Any]:
        """The files of output parameters as this view has them: text, or ``{"error": why}``."""
        found: dict[str, Any] = {}
        for path in self.request["outputs"]:
            try:
                data = _read_file(path)
            except OSError as error:
                found[path] = {"error": (error.strerror or str(error)).lower()}
                continue
            too_long = len(data) > MAX_OUTPUT
            found[path] = {"error": f"larger than {MAX_OUTPUT} bytes"} if too_long else data.decode(errors="replace")
        return found


def start(command: list[str], environment: dict[str, str], output: int, log: int) -> int:
    """Execute ``command`` in a session of its own, with the signals and standard files of a fresh process."""
    try:
        return os.posix_spawnp(
            command[0],
            command,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
            setsigdef=_DEFAULT_SIGNALS,
        )
    except NotImplementedError:  # (no sessions: a Python built for a C library of before 2017, as those that uv installs)
        return fork_and_execute(command, environment, output, log)


def fork_and_execute(command: list[str], environment: dict[str, str], output: int, log: int) -> int:
    """The same by hand. Raises what stands in the way of executing it, which the fork says in a pipe."""
    read, write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            for number in _DEFAULT_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            for target, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, log)):
                os.dup2(descriptor, target)
            os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(write, str(error.errno).encode())
        finally:
            os._exit(64)
    os.close(write)
    failure = os.read(read, 16)
    os.close(read)
    if failure:
        raise OSError(int(failure), os.strerror(int(failure)))
    return pid


def _read_file(path: str) -> bytes:
    """What is in a file, up to a byte more than is allowed. A pipe that nobody writes to must not be waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            raise OSError(errno.ESPIPE, "it is a pipe")
        return file.read(MAX_OUTPUT + 1)


def _exit_code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


# --- the nursery ---------------------------------------------------------------------------------------------------


def nursery(engine: socket.socket) -> None:
    """Fork a subreaper for every socket that arrives, until the engine is gone; then wait for them, and end what is left."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    living: set[int] = set()
    gc.disable()
    gc.freeze()
    while True:
        ready, _, _ = select.select([engine.fileno(), wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            living -= reap().keys()
            if any(child not in living for child in children(os.getpid())):
                end_all(frozenset(living), 2.0)
        if engine.fileno() in ready:
            data, handles, _, _ = socket.recv_fds(engine, 1, 1)
            if not data:
                break
            channel = socket.socket(fileno=handles[0])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for handle in (engine.fileno(), wake, wake_write):
                    os.close(handle)
                become_subreaper(channel)
            living.add(pid)
            channel.close()
    deadline = time.monotonic() + ORPHAN_GRACE + 1.0
    while living and time.monotonic() < deadline:
        living -= reap().keys()
        time.sleep(0.02)
    end_all(patience=2.0)


def become_subreaper(channel: socket.socket) -> NoReturn:
    """In the fork: look after one task and go."""
    code = 1
    try:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.setsid()
        with contextlib.suppress(BrokenPipeError):
            request = receive(channel)
            if request is not None:
                Task(channel, request).run()
        code = 0
    finally:
        end_all()
        os._exit(code)


def main() -> None:
    """Arguments: descriptors of the engine's socket, and of files (a lock) to keep open for as long as anything runs."""
    for handle in map(int, sys.argv[1:]):
        os.set_inheritable(handle, False)
    os.setsid()
    engine = socket.socket(fileno=int(sys.argv[1]))
    send(engine, {"namespaces": probe()})
    nursery(engine)
