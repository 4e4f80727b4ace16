"""The launcher for one machine: each node is a process of its own, restarted as a Job controller restarts a pod.

With ``min_nodes`` a lost node's replacement comes after ``node_lost_seconds``, as in a cluster that has to find a
machine first, while the others go on without it. Node 0, which hosts the rendezvous, is replaced at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from steps.launcher import Launch
from trainer.errors import FINAL_CODES, ExitCode, normalise
from trainer.events import EventLog

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05
STOP_MARGIN_SECONDS = 20.0
"""What ending a node may take beyond the grace period that its ranks have to save in."""


@dataclass
class _Node:
    process: subprocess.Popen[bytes]
    pod: int = 0
    code: int | None = None
    due: float | None = None
    """When its replacement starts (monotonic), once it is lost."""


class ProcessLauncher:
    """Nodes as child processes. They end with this process: nothing is left to attach to."""

    stopped_by_user = False  # (Ctrl-C is in the supervisor's own signal)

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._nodes: list[_Node] = []
        self._port = 0

    def attach(self) -> int | None:
        return None

    def start(self, launch: Launch) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._port = free_port()
        self._nodes = [_Node(self._spawn(launch, index, 0)) for index in range(launch.config.nodes)]

    def _spawn(self, launch: Launch, index: int, pod: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                sys.executable, "-m", "steps.node", f"--run-directory={launch.paths.run}",
                f"--attempt={launch.attempt}", f"--node={index}", f"--pod={pod}",
                "--rendezvous-host=localhost", f"--rendezvous-port={self._port}", "--die-with-parent",
            ],
            start_new_session=True,
        )  # fmt: skip

    def wait(self, launch: Launch, stop: Callable[[], str | None]) -> int:
        restarts = 0
        while True:
            for index, node in enumerate(self._nodes):
                if node.due is not None and time.monotonic() >= node.due:
                    self._nodes[index] = _Node(self._spawn(launch, index, node.pod + 1), node.pod + 1)
                if node.due is not None or node.code is not None or node.process.poll() is None:
                    continue
                code = node.process.returncode
                self._end_strays()
                if code == ExitCode.DONE:
                    node.code = 0
                elif code in FINAL_CODES:
                    self._stop(launch)
                    return code
                elif stop() is not None or restarts >= launch.max_pod_restarts:
                    self._stop(launch)
                    return normalise(code)
                else:
                    restarts += 1
                    node.due = time.monotonic() + self._patience(launch, index)
                    self._events.emit("pod_restart", node_index=index, pod=node.pod + 1, exit_code=code)
                    self._events.emit("fault_detected", layer="pod", message=f"node {index} ended with {code}")
            if all(node.code == 0 or node.due is not None for node in self._nodes) and any(
                node.code == 0 for node in self._nodes
            ):
                return int(ExitCode.DONE)
            if stop() is not None:
                return self._stop(launch)
            time.sleep(POLL_SECONDS)

    def _patience(self, launch: Launch, index: int) -> float:
        """Seconds until a lost node is replaced."""
        living = sum(node.process.poll() is None for node in self._nodes)
        if index == 0 or not launch.config.min_nodes or living < launch.config.min_nodes:
            return 0.0
        return launch.config.node_lost_seconds

    def _stop(self, launch: Launch) -> int:
        """Let every node save and stop; kill what has not ended when the grace period is over."""
        for node in self._nodes:
            if node.process.poll() is None:
                node.process.terminate()
        deadline = time.monotonic() + launch.config.grace_seconds + STOP_MARGIN_SECONDS
        for node in self._nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.0, deadline - time.monotonic()))
        self.release()
        codes = [node.process.returncode for node in self._nodes]
        return int(ExitCode.DONE) if not any(codes) else int(ExitCode.STOPPED)

    def release(self) -> None:
        for node in self._nodes:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGKILL)
                node.process.wait()
        self._end_strays()

    def _end_strays(self) -> None:
        """A killed node leaves what it started to this process: end all that belongs to no living node."""
        import psutil

        me = psutil.Process()
        nodes = {node.process.pid for node in self._nodes if node.process.poll() is None}
        for child in me.children():
            if child.pid in nodes or any(node.process.pid == child.pid for node in self._nodes):
                continue
            with contextlib.suppress(psutil.Error):
                for process in [*child.children(recursive=True), child]:
                    process.kill()
                child.wait(5)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
