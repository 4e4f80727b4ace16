"""One process per node that has the imports and forks launchers, workers and checkpoint writers from itself.

Imports of torch are half of a restart. This process pays them once, before the first launch; a restarted worker
starts with everything imported (facts: SIGKILL to first step 2.2 s with imports, 0.6 s forked, no model).

    python -m trainer.recovery.fork_server SOCKET RUN_DIRECTORY ATTEMPT NODE POD STOPPED_SECONDS

1. Listen on SOCKET at once, so that clients queue while the imports run.
2. Import what workers need, and what the compiler would compute again in each (``remember``). No thread may be started here and no CUDA call made: both do not survive a fork.
   (``torch._inductor`` asks for devices on import; NVML answers without CUDA when PYTORCH_NVML_BASED_CUDA_CHECK=1.)
3. For each request fork: the child takes the client's environment, directory and standard files and calls TARGET
   (``module:function``); its code goes to the client as one line when it ends.
4. A client's bytes are signals for its child. When a client goes away, its child is killed; with a worker go the
   writers it asked for. When this process dies, the kernel kills its children.
5. A worker that was killed, but has not ended, counts as ended: to give back its GPU and gigabytes of memory takes the
   kernel a second, in which the launcher can do its part. Its successor is told whom to wait for.
6. After a worker that ended with a code of the contract (and has left an outcome that says why), no other is started: no
   restart can change it, and a launcher that is restarting already may swallow the signal by which the node ends it. What it
   asks for waits for that end.
7. A worker that is stopped (SIGSTOP, a debugger, a freezer) for STOPPED_SECONDS is killed. NVRx's monitors do not do it for a
   stopped rank 0: they ask the store that it hosts.

It records ``worker_exit`` and ``worker_stop``, so that the detection of a fault does not depend on any launcher.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trainer import environment
from trainer.errors import ExitCode, PipelineError, code_of, exit_with
from trainer.events import EventLog
from trainer.paths import RunPaths

PRELOAD = (
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.checkpoint", "torch.distributed.checkpoint.default_planner", "torch.distributed.run",
    "torch._dynamo", "trainer.loop", "trainer.checkpointing", "trainer.recovery",
    "trainer.checkpointing.writer", "trainer.recovery.nvrx", "trainer.recovery.in_job", "trainer.recovery.in_process",
    "trainer.model", "trainer.clock", "trainer.data", "trainer.optim", "trainer.parallel", "trainer.faults", "trainer.pretrained",
    "trainer.rendezvous", "psutil", "nvidia_resiliency_ext.fault_tolerance.launcher",
)  # fmt: skip
PRELOAD_GPU = (
    "torch._inductor.compile_fx", "torch._dynamo.backends.cudagraphs", "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor", "torch._dynamo.backends.onnxrt", "torch._dynamo.backends.tensorrt",
    "torch._dynamo.backends.torchxla", "torch._dynamo.backends.tvm", "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compiler_bisector", "torch._export.db.logging", "torch.export._trace", "torch.export._unlift",
    "torch.fx.experimental.validator", "torch.distributed.tensor.experimental._attention",
)  # fmt: skip
"""What the compiler imports when it is first used."""
TRACED = ("trainer.model", "torch.nn.functional", "torch.nn.modules.linear")

PR_SET_PDEATHSIG = 1
READ_LIMIT = 1 << 24
LOOK_SECONDS = 0.05
HOLD_SECONDS = 30.0
STARTED = "started"
"""Beside the socket, once a worker was started."""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel for ``number`` when this process's parent dies (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


@dataclass
class Child:
    """A forked process and the client that asked for it."""

    pid: int
    kind: str
    connection: socket.socket
    local_rank: int
    owner: int = 0
    """Of a writer: the worker it writes for."""
    stopping: set[int] = field(default_factory=set)
    answered: bool = False
    """Whether the client has been told how it ended."""
    stopped_at: float = 0.0
    """Since when it is stopped; 0: it is not."""


class ForkServer:
    """The loop of the server. ``serve`` returns when the node asks for the end (SIGTERM) or dies."""

    def __init__(self, listener: socket.socket, events: EventLog, stopped_seconds: float) -> None:
        self._listener = listener
        self._stopped_seconds = stopped_seconds
        self._started = Path(listener.getsockname()).with_name(STARTED)
        self._events = events
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}
        self._ended = False
        self._decisive = 0
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> int:
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._selector.register(self._wake_read, selectors.EVENT_READ, "signal")
        while not self._ended:
            working = any(child.kind == "worker" and not child.answered for child in self._children.values())
            for key, _ in self._selector.select(LOOK_SECONDS if working else None):
                if key.data == "listener":
                    self._accept()
                elif key.data == "signal":
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                elif not key.data.answered:
                    self._from_client(key.data)
            self._look()
        for child in list(self._children.values()):
            self._kill(child)
        return 0

    def _look(self) -> None:
        """Answer for the workers that are ending by a signal, and kill those that are stopped for too long. (One that ends
        with a code of its own has left an outcome, which may decide that there is no restart: whoever reads it needs the
        time.)"""
        for child in list(self._children.values()):
            if child.kind != "worker" or child.answered:
                continue
            state, code = condition(child.pid)
            if code < 0:
                self._answer(child, code)
            elif state != "T":
                child.stopped_at = 0.0
            elif not child.stopped_at:
                child.stopped_at = time.monotonic()
            elif time.monotonic() - child.stopped_at > self._stopped_seconds:
                self._kill(child)

    def _end(self, number: int, frame: object) -> None:
        self._ended = True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            wanted, descriptors = receive(connection)
        except (OSError, ValueError):
            connection.close()
            return
        variables = wanted["environment"]
        local_rank = int(variables.get("LOCAL_RANK", "-1"))
        if wanted["kind"] == "worker":
            before = [c.pid for c in self._children.values() if c.kind == "worker" and c.local_rank == local_rank]
            variables[environment.PREDECESSOR] = str(before[-1] if before else 0)
            if self._decisive:
                wanted |= {"target": "trainer.recovery.fork_server:hold", "argv": [str(self._decisive)]}
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or no process more: who asked sees its connection closed, and the others go on
            print(f"the fork server could not make a {wanted['kind']}: {error.strerror}", file=sys.stderr, flush=True)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.close()
            return
        if pid == 0:
            die_with_parent()
            if os.getppid() != server:  # it died before it could be died with
                os._exit(75)
            self._become(wanted, descriptors, connection)
        for descriptor in descriptors:
            os.close(descriptor)
        if wanted["kind"] == "worker":
            self._started.touch()
        child = Child(pid, wanted["kind"], connection, local_rank, int(variables.get("HOLDFAST_OWNER", "0")))
        self._children[pid] = child
        self._selector.register(connection, selectors.EVENT_READ, child)

    def _become(self, wanted: dict[str, Any], descriptors: list[int], connection: socket.socket) -> NoReturn:
        """In the child: shed the server, become what was asked for, and end with its code."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._selector.close()
            self._listener.close()
            connection.close()
            for child in self._children.values():
                child.connection.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._events.close()
            os.setsid()
            os.chdir(wanted["directory"])
            os.environ.clear()
            os.environ.update(wanted["environment"])
            for target, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, target)
            for descriptor in descriptors[:3]:
                if descriptor > 2:
                    os.close(descriptor)
            reopen_standard_streams()
            module, _, function = wanted["target"].partition(":")
            sys.argv = [module, *wanted["argv"]]
            code = call(module, function, descriptors[3:])
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code & 0xFF)

    def _from_client(self, child: Child) -> None:
        try:
            numbers = child.connection.recv(64)
        except OSError:
            numbers = b""
        if not numbers:
            self._selector.unregister(child.connection)
            self._kill(child)
            return
        for number in numbers:
            if child.kind == "worker" and number not in child.stopping:
                child.stopping.add(number)
                self._events.emit("worker_stop", local_rank=child.local_rank, signal=number)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)
                if number == signal.SIGTERM:  # a stopped process would keep its launcher waiting for half a minute
                    os.kill(child.pid, signal.SIGCONT)

    def _kill(self, child: Child) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None:
                continue
            if not child.answered:
                self._answer(child, os.waitstatus_to_exitcode(status))

    def _answer(self, child: Child, code: int) -> None:
        """Tell the client how its child ended, and end what belonged to it."""
        child.answered = True
        if child.kind == "worker":
            self._events.emit("worker_exit", local_rank=child.local_rank, exit_code=code)
            if code in set(ExitCode) - {ExitCode.DONE}:
                self._decisive = code
        for other in self._children.values():
            if other.owner == child.pid:
                self._kill(other)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(child.connection)
        with contextlib.suppress(OSError):
            child.connection.sendall(f"{code}\n".encode())
        child.connection.close()


def hold() -> int:
    """In place of a worker that no restart can help: wait for the end of the launcher, which takes this process along."""
    time.sleep(HOLD_SECONDS)
    return int(sys.argv[1])


def condition(pid: int) -> tuple[str, int]:
    """The state of a process as the kernel names it (T: stopped), and the exit code of one that is ending, else 0.

    Its first thread is a zombie as soon as it is killed; its parent is told only when its last thread is gone, and with it
    the memory. The code is the last field of its stat.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] in "ZX" else 0


def call(module: str, function: str, descriptors: list[int]) -> int:
    """Run ``module.function()`` as a program: its value or ``SystemExit`` becomes the code."""
    target = getattr(importlib.import_module(module), function)
    try:
        value = target(*descriptors)
    except SystemExit as error:
        value = error.code
        if isinstance(value, str):
            print(value, file=sys.stderr)
            value = 1
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        value = code_of(error)
    return int(value or 0)


def remember() -> None:
    """Compute what torch's compiler computes once in a process, so that no fork has to: saves a second of a restart.

    The hashes of torch's and triton's sources are part of every key of the compile cache; the positions of functions in
    the files that a block's code lies in are part of every trace. (To compile for show would call CUDA.)
    """
    from torch._inductor.codecache import torch_key

    torch_key()
    with contextlib.suppress(ImportError, AttributeError):  # where these lie depends on the versions
        importlib.import_module("torch._inductor.runtime.triton_compat").triton_key()
    with contextlib.suppress(ImportError, AttributeError):
        get_funcname = importlib.import_module("torch._dynamo.funcname_cache").get_funcname
        for name in TRACED:
            get_funcname(sys.modules[name].__file__, 1)


def reopen_standard_streams() -> None:
    """Text streams over descriptors 0-2 anew: the old ones may hold what the server buffered."""
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        setattr(sys, name, os.fdopen(number, mode, buffering=1, closefd=False))
        setattr(sys, f"__{name}__", getattr(sys, name))


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One request as ``stub.request`` sends it, with its file descriptors."""
    connection.settimeout(10)
    first, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(16 * 4))
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
            descriptors = list(received)
    if len(first) < 4:
        raise ValueError("the client went away")
    size = int.from_bytes(first, "big")
    if size > READ_LIMIT:
        raise ValueError("request too large")
    body = b""
    while len(body) < size:
        part = connection.recv(size - len(body))
        if not part:
            raise ValueError("the client went away")
        body += part
    connection.settimeout(None)
    return json.loads(body), descriptors


def main(argv: list[str] | None = None) -> int:
    socket_path, run_directory, attempt, node, pod, stopped_seconds = argv or sys.argv[1:]
    die_with_parent()
    path = Path(socket_path)
    path.unlink(missing_ok=True)  # a stale file of a killed server
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(64)
    run = Path(run_directory)
    paths = RunPaths(run.parents[1], run.name)
    events = EventLog(paths.events, run.name, "node", attempt=int(attempt), node=int(node), pod=int(pod))
    for name in PRELOAD:
        importlib.import_module(name)
    if environment.has_gpu():  # (which the forks know from now on)
        for name in PRELOAD_GPU:
            with contextlib.suppress(ImportError):  # (not in every version of torch)
                importlib.import_module(name)
        remember()
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, the pages that the forks share
    return ForkServer(listener, events, float(stopped_seconds)).serve()


if __name__ == "__main__":
    exit_with(main)
