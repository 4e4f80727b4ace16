"""The fork server and its stub: a fork is what a program would have been, and ends with whoever asked for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tier_world import REPOSITORY, ForkServerProcess, wait_until

from trainer.recovery.fork_server import condition

STUB = REPOSITORY / "trainer" / "recovery" / "stub.py"

Start = Callable[..., subprocess.Popen[str]]


@contextmanager
def stubs(server: ForkServerProcess) -> Iterator[Start]:
    """Starts stubs as a launcher does; kills what a failed test leaves."""
    server.connect().close()  # it listens
    started: list[subprocess.Popen[str]] = []

    def run(target: str, *argv: str, **options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-E", str(STUB), server.address, f"fork_target:{target}", *argv]
        environment = {"PATH": os.environ["PATH"], "LOCAL_RANK": "3", "COLOUR": "green"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
        )  # type: ignore[call-overload]
        started.append(process)
        return process  # type: ignore[no-any-return]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def start(forks: ForkServerProcess) -> Iterator[Start]:
    """Starts stubs of the server that all tests share: no worker may end with a code of the contract here."""
    with stubs(forks) as run:
        yield run


@pytest.fixture
def start_alone(tmp_path: Path) -> Iterator[Start]:
    """Starts stubs of a server of the test's own."""
    server = ForkServerProcess.start(tmp_path, stopped_seconds=2)
    try:
        with stubs(server) as run:
            yield run
    finally:
        server.stop()


def worker(path: Path) -> psutil.Process:
    wait_until(lambda: path.exists() and bool(path.read_text()), "the worker has said its process id", 150)
    return psutil.Process(int(path.read_text()))


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("3", 3), ("raise", 1), ("exit", 1), ("kill", -signal.SIGKILL)])
def test_the_stub_ends_as_the_worker_ended(start: Start, tmp_path: Path, how: str, code: int) -> None:
    """And the next worker is started, whatever it was."""
    stub = start("end", how)
    output, errors = stub.communicate(timeout=150)
    assert stub.returncode == code, errors
    assert ("as told" in errors) == (how == "raise") and ("a message" in errors) == (how == "exit")
    assert output == ""
    start("idle", str(tmp_path / "pid"))
    assert worker(tmp_path / "pid").is_running()


def test_the_worker_has_the_stubs_surroundings_and_nothing_of_the_servers(start: Start, tmp_path: Path) -> None:
    stub = start("show", "a", "b c", cwd=tmp_path)
    output, errors = stub.communicate(timeout=150)
    assert output == f"{tmp_path} green ['a', 'b c'] none\n", errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_passed_on_and_tells_the_stubs_end(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    stub = start("idle", str(tmp_path / "pid"))
    fork = worker(tmp_path / "pid")
    stub.send_signal(number)
    assert stub.wait(10) == -number
    wait_until(lambda: not fork.is_running(), "the worker is gone")


def test_a_stopped_worker_can_be_ended(start: Start, tmp_path: Path) -> None:
    stub = start("idle", str(tmp_path / "pid"))
    worker(tmp_path / "pid").suspend()
    stub.terminate()
    assert stub.wait(10) == -signal.SIGTERM


def test_a_killed_stub_takes_its_worker_along(start: Start, tmp_path: Path) -> None:
    stub = start("idle", str(tmp_path / "pid"))
    fork = worker(tmp_path / "pid")
    began = time.monotonic()
    stub.kill()
    wait_until(lambda: not fork.is_running(), "the worker is gone", 10)
    assert time.monotonic() - began < 5


def test_a_stopped_worker_can_be_killed(start: Start, tmp_path: Path) -> None:
    stub = start("idle", str(tmp_path / "pid"))
    fork = worker(tmp_path / "pid")
    fork.suspend()
    stub.kill()
    wait_until(lambda: not fork.is_running(), "the worker is gone", 10)


def test_a_dead_server_takes_all_its_forks_along(tmp_path: Path) -> None:
    """And a stale socket, as a killed server leaves it, is no obstacle for the next."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "fork"))
    server = ForkServerProcess.start(tmp_path)
    try:
        command = [sys.executable, "-S", "-E", str(STUB), server.address, "fork_target:idle", str(tmp_path / "pid")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as stub:
            fork = worker(tmp_path / "pid")
            server.process.kill()
            _, errors = stub.communicate(timeout=20)
            assert stub.returncode == 75 and "the fork server of this node ended" in errors
            wait_until(lambda: not fork.is_running(), "the worker is gone", 10)
    finally:
        server.stop()


def test_without_a_server_the_stub_gives_up(tmp_path: Path) -> None:
    """(Its patience is two minutes: here it only has to go on trying, and to be stoppable.)"""
    command = [sys.executable, "-S", "-E", str(STUB), str(tmp_path / "nobody"), "fork_target:idle"]
    with subprocess.Popen(command) as stub:
        with pytest.raises(subprocess.TimeoutExpired):
            stub.wait(1)
        stub.terminate()
        assert stub.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("how", ["kill", "code 3", "code 0"])
def test_a_process_that_is_ending_is_known_by_its_code(how: str) -> None:
    """A zombie that nobody has waited for stands for one whose memory the kernel is still giving back."""
    program = f"import sys; sys.stdin.read(); sys.exit({how.partition(' ')[2] or 0})"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE) as child:
        assert condition(child.pid)[1] == 0
        if how == "kill":
            child.kill()
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert condition(child.pid)[1] == {"kill": -signal.SIGKILL, "code 3": 3, "code 0": 0}[how]
    assert condition(child.pid)[1] == 0


def test_a_worker_is_told_whose_place_it_takes(start: Start, tmp_path: Path) -> None:
    """Usually the one before is gone by then, which is nobody to wait for; never is it some other rank's."""
    first = start("idle", str(tmp_path / "first"))
    before = worker(tmp_path / "first")
    before.kill()
    assert first.wait(20) == -signal.SIGKILL
    second = start("predecessor")
    assert second.communicate(timeout=20)[0].strip() in ("0", str(before.pid))


@pytest.mark.parametrize("code", ["70", "75"])
def test_where_no_restart_helps_no_worker_is_started(start_alone: Start, tmp_path: Path, code: str) -> None:
    assert start_alone("end", code).wait(150) == int(code)
    held = start_alone("idle", str(tmp_path / "pid"))
    with pytest.raises(subprocess.TimeoutExpired):
        held.wait(1)
    assert not (tmp_path / "pid").exists()
    held.terminate()
    assert held.wait(10) == -signal.SIGTERM


def test_a_worker_that_is_stopped_for_too_long_is_killed(start_alone: Start, tmp_path: Path) -> None:
    stub = start_alone("idle", str(tmp_path / "pid"))
    fork = worker(tmp_path / "pid")
    fork.suspend()
    time.sleep(0.5)
    fork.resume()  # (for a moment it may be)
    with pytest.raises(subprocess.TimeoutExpired):
        stub.wait(3)
    fork.suspend()
    assert stub.wait(10) == -signal.SIGKILL


def test_a_fork_that_is_refused_ends_who_asked_and_nobody_else(start_alone: Start, tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/pids/holdfast-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of its own for a test: {error}")
    try:
        first = start_alone("idle", str(tmp_path / "first"))
        running = worker(tmp_path / "first")
        (group / "cgroup.procs").write_text(str(running.ppid()))
        (group / "pids.max").write_text((group / "pids.current").read_text())
        refused = start_alone("end", "0")
        assert refused.wait(60) == 75
        (group / "pids.max").write_text("max")
        assert start_alone("end", "3").wait(60) == 3
        assert running.is_running() and first.poll() is None
        first.terminate()
        first.wait(60)
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(process)
        group.rmdir()
