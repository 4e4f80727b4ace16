"""The engine's side of ``subreaper.py``: start the nursery, hand it tasks, read what they report."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import DefectError, UnavailableError

_PROGRAM = f"import sys; sys.path.append({str(Path(__file__).parents[1])!r}); from pods.subreaper import main; main()"
"""Last on the path, and without the packages around it: what a program imports that is forked a thousand times counts."""


@dataclass(frozen=True)
class TaskRequest:
    """What a subreaper needs to run one task."""

    command: list[str]
    environment: dict[str, str]
    directory: str
    log: str
    capture: bool
    outputs: list[str]
    """Paths, as the task sees them, whose contents are wanted when it has ended."""
    view: dict[str, Any] | None
    """Its private view of the file system (``subreaper.View``); None: it sees the host's."""


class Channel:
    """A running task. Messages: ``started``, then ``code`` with ``outputs`` and ``result``; or ``failed``."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._data = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def messages(self) -> tuple[list[dict[str, Any]], bool]:
        """What has arrived, without waiting, and whether the other end is gone."""
        gone = False
        try:
            while True:
                part = self.socket.recv(65536)
                if not part:
                    gone = True
                    break
                self._data += part
        except BlockingIOError:
            pass
        except ConnectionResetError:
            gone = True
        found = []
        while len(self._data) >= 4:
            size = struct.unpack("!I", self._data[:4])[0]
            if len(self._data) < 4 + size:
                break
            found.append(json.loads(self._data[4 : 4 + size]))
            self._data = self._data[4 + size :]
        return found, gone

    def terminate(self, grace: float) -> None:
        """SIGTERM now, SIGKILL after ``grace`` seconds."""
        data = json.dumps({"grace": grace}).encode()
        with contextlib.suppress(OSError):
            self.socket.sendall(struct.pack("!I", len(data)) + data)

    def close(self) -> None:
        self.socket.close()


class Launcher:
    """The nursery process. Closing it, or dying, ends every task that it started."""

    def __init__(self, keep_open: list[int]) -> None:
        ours, theirs = socket.socketpair()
        handles = [theirs.fileno(), *keep_open]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, handles)],
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            close_fds=True,
        )
        theirs.close()
        self._socket = ours
        self._socket.settimeout(20.0)
        try:
            greeting = self._greeting()
        except (OSError, ValueError, struct.error) as error:
            self.close()
            raise DefectError(f"the task launcher did not start: {error}") from None
        self.namespaces_refused: str = greeting["namespaces"]
        """Why there are no private mounts here; '' if there are."""

    def _greeting(self) -> dict[str, Any]:
        size = struct.unpack("!I", self._socket.recv(4, socket.MSG_WAITALL))[0]
        greeting: dict[str, Any] = json.loads(self._socket.recv(size, socket.MSG_WAITALL))
        return greeting

    def spawn(self, request: TaskRequest) -> Channel:
        """Start a task. ``UnavailableError`` if the nursery is gone."""
        ours, theirs = socket.socketpair()
        data = json.dumps(request.__dict__).encode()
        try:
            socket.send_fds(self._socket, [b"t"], [theirs.fileno()])
            theirs.close()
            ours.settimeout(20.0)
            ours.sendall(struct.pack("!I", len(data)) + data)
        except OSError as error:
            ours.close()
            raise UnavailableError(f"the task launcher is gone ({error}); go on with --resume") from None
        ours.setblocking(False)
        return Channel(ours)

    def close(self, patience: float = 8.0) -> None:
        """End every task still running and wait for the nursery to go."""
        self._socket.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
