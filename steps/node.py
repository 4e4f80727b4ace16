"""Inside each training pod (or its stand-in on a laptop): one node of one attempt.

    python -m steps.node --run-directory DIR --attempt N [--node I] [--pod P] --rendezvous-host HOST

1. In a pod: check this machine (``steps.check_node``), since one bad node costs all the others their time. Wait for the
   rendezvous host's name, with a deadline: a headless Service's names can take tens of seconds.
2. Start the fork server, which has the imports, and have it fork the launcher (ft_launcher or torchrun), which asks
   it for the workers.
3. Forward: SIGTERM writes the attempt's stop file, so that all ranks save and stop at the end of a step; when the grace
   period is over the launcher is ended.
4. Translate: launchers end with 1 whatever their workers said, so the workers' outcome files decide the exit code; one
   that no restart of workers can change (it is of the contract, and not 1) ends the launcher at once.
5. Under torchrun (recovery none, in-process): a launcher that fails closes the rendezvous, and one whose worker hangs does
   not notice. A node that is turned away says so in a file, and the node of the rendezvous ends, for all to meet anew.

This process takes in orphans (it is their subreaper), so that ending it ends everything of the node.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from trainer import environment
from trainer.config import OneLineParser, RunConfig
from trainer.errors import FINAL_CODES, DefectError, ExitCode, UnavailableError, exit_with, normalise
from trainer.events import EventLog
from trainer.paths import RunPaths
from trainer.records import Outcome, RunRecord, write_whole
from trainer.recovery.base import Limits
from trainer.recovery.fork_server import STARTED

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NAME_DEADLINE_SECONDS = 300.0
POLL_SECONDS = 0.1
SIGNAL_SECONDS = 3.0


@dataclass(frozen=True)
class Place:
    """Which node of which attempt this is."""

    attempt: int
    node: int
    pod: int
    host: str
    port: int
    shm_gib: int = 0
    """What /dev/shm has in a pod; 0: this is no pod, and there is nothing to check."""


def parse(argv: list[str] | None) -> tuple[Path, Place]:
    parser = OneLineParser(prog="steps.node", description=__doc__.splitlines()[0])
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int, default=int(os.environ.get("JOB_COMPLETION_INDEX", "0")))
    parser.add_argument("--pod", type=int, default=-1, help="restarts of this node before (default: counted in the run)")
    parser.add_argument("--die-with-parent", action="store_true", help="SIGTERM this node when its parent dies")
    parser.add_argument("--rendezvous-host", default="localhost")
    parser.add_argument("--rendezvous-port", type=int, default=29500)
    parser.add_argument("--shm-gib", type=int, default=0, help="check this node first; its /dev/shm has so much [no check]")
    options = parser.parse_args(argv)
    if options.die_with_parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    directory = options.run_directory.absolute()
    pod = options.pod if options.pod >= 0 else count_pod(directory, options.attempt, options.node)
    host, port = options.rendezvous_host, options.rendezvous_port
    return directory, Place(options.attempt, options.node, pod, host, port, options.shm_gib)


def count_pod(directory: Path, attempt: int, node: int) -> int:
    """How many pods of this node and attempt there were before; a Job does not tell its pods."""
    pods = directory / "pods"
    pods.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            (pods / f"{attempt}-{node}-{number}").touch(exist_ok=False)
            return number
        except FileExistsError:
            number += 1


def wait_for_name(host: str, deadline_seconds: float) -> None:
    """Return once ``host`` resolves; ``UnavailableError`` (69) when it does not in time."""
    deadline = time.monotonic() + deadline_seconds
    pause = 0.2
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the name {host} of node 0 did not appear within {deadline_seconds:g} s ({error}); "
                    "check that the headless Service publishes not-ready addresses and that DNS works in the pod"
                ) from None
            time.sleep(pause)
            pause = min(pause * 2, 5.0)


def reap_orphans(own: int) -> None:
    """Take the exit codes that nobody waits for, of orphans that came to this process: each would stay in the table of
    processes, a few for every restart, until the pod may have no more. That of ``own`` (0: none) is left to who waits for it."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != own:
            os.waitpid(ended.si_pid, os.WNOHANG)


class Node:
    """The processes of this node, from the launcher's start to the exit code."""

    def __init__(self, record: RunRecord, paths: RunPaths, place: Place) -> None:
        self._record = record
        self._config: RunConfig = record.config
        self._paths = paths
        self._place = place
        self._events = EventLog(
            paths.events, paths.run_id, "node", attempt=place.attempt, node=place.node, pod=place.pod
        )
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-node-")
        self._socket = str(Path(self._folder.name) / "fork")
        self._stop_at: float | None = None
        self._decisive: Outcome | None = None
        """The first outcome of a worker that no restart of workers can change."""
        self._server: subprocess.Popen[bytes] | None = None
        self._snapshots: socket.socket | None = None
        self._closed = self._closed_now()

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._asked_to_stop)
        signal.signal(signal.SIGINT, self._asked_to_stop)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if self._is_trained():
            return int(ExitCode.DONE)
        if self._place.shm_gib and (code := self._check()):
            return code
        wait_for_name(self._place.host, NAME_DEADLINE_SECONDS)
        self._events.emit(
            "launcher_start",
            nodes=self._config.nodes,
            processes=self._config.gpus_per_node,
            recovery=self._config.recovery,
        )
        self._start_server()
        try:
            code = self._translate(self._launch())
            if code and not self._has_started():
                code = int(ExitCode.DONE) if self._is_trained() else code
                self._complain(code)
        finally:
            self._end_everything()
        self._events.emit("launcher_end", exit_code=code)
        self._folder.cleanup()
        return code

    def _check(self) -> int:
        """Check this machine in a process of its own, which may take GPUs; returns the contract's code for it."""
        config = self._config
        arguments = ["--root", str(config.root), "--profile", config.profile, "--shm-gib", str(self._place.shm_gib)]
        process = subprocess.Popen([sys.executable, "-m", "steps.check_node", *arguments])
        while process.poll() is None:
            if self._stop_at is not None:
                process.kill()
                process.wait()
                return int(ExitCode.STOPPED)
            time.sleep(POLL_SECONDS)
        return normalise(process.returncode)

    def _environment(self) -> dict[str, str]:
        place = self._place
        return environment.mapping() | {
            environment.RUN_DIRECTORY: str(self._paths.run),
            environment.ATTEMPT: str(place.attempt),
            environment.NODE: str(place.node),
            environment.POD: str(place.pod),
            environment.NODE_PID: str(os.getpid()),
            environment.FORK_SERVER: self._socket,
            # One thread per library until the worker sets its share: pools do not survive a fork.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            # Devices are counted without the CUDA runtime, after which no fork could use CUDA.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # The fork server would start processes that compile, which its forks cannot use.
            "TORCH_WARM_POOL": "0",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            # torchrun would lend the ranks its own store, in which an earlier round has left its keys.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # NVRx 0.7 takes the nodes that stand for a cluster's on one machine for a mistake, and ends the rendezvous.
            "NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1",
            # Polls of a store that nothing has happened to are not worth ten lines a second.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
        }

    def _start_server(self) -> None:
        place = self._place
        arguments = [self._socket, str(self._paths.run), str(place.attempt), str(place.node), str(place.pod)]
        arguments.append(str(Limits.of(self._config).in_job))
        self._server = subprocess.Popen(
            [sys.executable, "-m", "trainer.recovery.fork_server", *arguments],
            env=self._environment(),
        )

    def _launch(self) -> int:
        """Have the launcher forked, and wait for its end; returns its code, negative for a signal."""
        from trainer.recovery import nvrx
        from trainer.recovery.stub import request

        place = self._place
        arguments = nvrx.launcher_arguments(
            self._config,
            nvrx.Rendezvous(place.host, place.port, place.node == 0, f"{self._config.run_id}-{place.attempt}"),
            self._socket,
        )
        connection = self._connect()
        assert self._server is not None
        if self._config.snapshot_interval_steps and self._config.nodes > 1:
            self._snapshots = self._serve_snapshots()
        target = nvrx.launcher_target(self._config)
        request(connection, "launcher", target, arguments, self._environment(), str(self._paths.run), [0, 1, 2])
        connection.settimeout(POLL_SECONDS)
        answer, terminated, signalled = b"", 0.0, 0.0
        while not answer.endswith(b"\n"):
            with contextlib.suppress(TimeoutError):
                part = connection.recv(64)
                if not part:
                    return -signal.SIGKILL
                answer += part
            reap_orphans(self._server.pid)
            now = time.monotonic()
            if now - signalled > SIGNAL_SECONDS and self._must_end():
                # Again, should it go on: a launcher that is just restarting its workers may swallow what the signal raises.
                terminated, signalled = terminated or now, now
                with contextlib.suppress(OSError):  # (it ended meanwhile)
                    connection.sendall(bytes([signal.SIGTERM]))
            if terminated and time.monotonic() - terminated > 15:
                return -signal.SIGKILL
        return int(answer)

    def _serve_snapshots(self) -> socket.socket:
        """Have the server of this node's snapshots forked; it lives as long as the connection that is returned."""
        from trainer.recovery.stub import request

        connection = self._connect()
        request(
            connection, "snapshots", "trainer.checkpointing.replicas:serve", [], self._environment(), "/", [0, 1, 2]
        )
        return connection

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deadline = time.monotonic() + self._config.startup_timeout_seconds
        while True:
            try:
                connection.connect(self._socket)
                return connection
            except OSError:
                if self._server is None or self._server.poll() is not None:
                    code = self._server.poll() if self._server else None
                    kind = UnavailableError if code == ExitCode.UNAVAILABLE else DefectError
                    raise kind("the fork server of this node did not start; its error is above") from None
                if time.monotonic() > deadline:
                    raise UnavailableError("the fork server of this node did not start in time") from None
                time.sleep(0.05)

    def _asked_to_stop(self, number: int, frame: object) -> None:
        """SIGTERM, possibly several times: ask the ranks to save and stop, and give them the grace period."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._config.grace_seconds
            place = self._place
            with contextlib.suppress(OSError):  # (a full disk: the ranks are ended when the grace period is over)
                stop = self._paths.stop_file(place.attempt, place.node, place.pod)
                write_whole(stop, signal.Signals(number).name.encode())

    def _must_end(self) -> bool:
        if self._stop_at is not None and time.monotonic() > self._stop_at:
            return True
        if not self._place.node and self._meets_again() and self._closed_now() != self._closed:
            return True
        if not self._has_started() and self._is_trained():
            return True
        for outcome in self._outcomes():
            if outcome.exit_code not in (ExitCode.DONE, 1):
                self._decisive = self._decisive or outcome
        return self._decisive is not None

    def _has_started(self) -> bool:
        """Whether a worker of this node was ever started."""
        return Path(self._socket).with_name(STARTED).exists()

    def _is_trained(self) -> bool:
        """Whether a rank of this attempt has finished all steps, which is when all have, and the last one is durable: the
        others went on without this node (``--min-nodes``), and nobody is left to meet."""
        paths = sorted(self._paths.outcomes.glob(f"{self._place.attempt}-*.json"))
        return any(Outcome.read(path).exit_code == ExitCode.DONE for path in paths)

    def _meets_again(self) -> bool:
        """Whether the rendezvous ends with the launcher that failed: ft_launcher opens it again by itself."""
        return self._config.nodes > 1 and self._config.recovery in ("none", "in-process")

    def _closed_now(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._paths.closed_file(self._place.attempt).read_bytes()
        return b""

    def _complain(self, code: int) -> None:
        """Tell the node of the rendezvous that this one was turned away: its launcher failed, and started no worker."""
        if code and self._place.node and self._meets_again() and self._stop_at is None:
            with contextlib.suppress(OSError):
                write_whole(self._paths.closed_file(self._place.attempt), str(time.time_ns()).encode())

    def _outcomes(self) -> list[Outcome]:
        place = self._place
        paths = sorted(self._paths.outcomes.glob(f"{place.attempt}-{place.node}-{place.pod}-*.json"))
        return [Outcome.read(path) for path in paths]

    def _translate(self, code: int) -> int:
        """The contract's code of this node: its workers' own where they said one."""
        outcomes = self._outcomes()
        if self._decisive is not None:  # (a worker started since then may have ended with another code)
            outcomes.insert(0, self._decisive)
        for outcome in outcomes:
            if outcome.exit_code in FINAL_CODES:
                print(f"error: rank {outcome.rank}: {outcome.message}", file=sys.stderr)
                return outcome.exit_code
        if code == 0:
            return int(ExitCode.DONE)
        if self._stop_at is not None:
            return int(ExitCode.STOPPED)
        for outcome in outcomes:
            if outcome.exit_code not in (ExitCode.DONE, 1):
                return normalise(outcome.exit_code)
        return int(ExitCode.STOPPED)

    def _end_everything(self) -> None:
        """End the fork server and, with it, all that it forked; then whatever else was left to this process."""
        if self._server is not None and self._server.poll() is None:
            self._server.kill()
            self._server.wait()
        import psutil

        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            children = psutil.Process().children(recursive=True)
            living = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
            for child in living:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            reap_orphans(0)
            if not living:
                return
            time.sleep(0.02)


def main(argv: list[str] | None = None) -> int:
    directory, place = parse(argv)
    paths = RunPaths(directory.parent.parent, directory.name)
    return Node(RunRecord.read(paths.record), paths, place).run()


if __name__ == "__main__":
    exit_with(main)
