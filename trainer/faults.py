"""Faults on purpose: a schedule that follows from the configuration, and what fires it.

1. ``schedule`` deals steps, ranks and kinds; the same configuration gives the same faults, before and after a restart.
2. ``Injector.maybe_fire`` is called once in each step, after the backward pass. A fault that is due is first claimed on the
   shared file system (a file made exclusively), so that each fires once in the life of a run, then recorded as an event,
   and only then strikes.

The kinds: ``exception`` is raised; ``hang`` is a Python loop or a stopped process, in turn; ``sigkill`` ends this process;
``oom`` allocates until it is refused; ``node`` ends every process of this node and loses its snapshots.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from trainer import environment
from trainer.config import RunConfig
from trainer.errors import DefectError
from trainer.events import EventLog
from trainer.paths import RunPaths
from trainer.records import fsync_directory

OOM_BLOCK = 64 << 20
OOM_ROOM = 288 << 20
"""Bytes that a CPU process may grow by before it is refused: no whole number of blocks, so that the other threads of the
process still get small pieces while it lasts."""
OOM_GPU_BLOCK = 1 << 30

CLEAN_SCANS = 3
"""Looks at the process table in a row that find nothing new: more than a daemon takes to be born (it forks twice)."""

HANG_VARIANTS = ("loop", "stop")


class InjectedFault(RuntimeError):
    """The fault ``exception``. Not one of ours (``PipelineError``): it stands for any error of a training step."""


@dataclass(frozen=True)
class PlannedFault:
    """A fault that strikes ``rank`` in step ``step``."""

    index: int
    step: int
    rank: int
    kind: str
    variant: str = ""
    """Of a hang: ``loop`` or ``stop``."""


def schedule(config: RunConfig) -> tuple[PlannedFault, ...]:
    """The faults of a run in the order of their steps.

    Distinct steps are drawn after ``fault_first_step``, unless ``fault_steps`` names them. Ranks are drawn among all but rank 0 unless ``fault_ranks`` deals
    them (a list) or lets rank 0 in (``all``). Kinds are dealt in order, and so are the two ways to hang.
    """
    draw = random.Random(config.fault_seed)
    steps = sorted(draw.sample(range(config.fault_first_step + 1, config.max_steps + 1), config.fault_count))
    if config.fault_steps:
        steps = [int(step) for step in config.fault_steps.split(",")]
    kinds = config.fault_kinds.split(",")
    faults: list[PlannedFault] = []
    hangs = 0
    for index, step in enumerate(steps):
        kind = kinds[index % len(kinds)]
        variant = HANG_VARIANTS[hangs % 2] if kind == "hang" else ""
        hangs += kind == "hang"
        faults.append(PlannedFault(index, step, _rank(config, index, draw), kind, variant))
    return tuple(faults)


def _rank(config: RunConfig, index: int, draw: random.Random) -> int:
    if config.fault_ranks == "all":
        return draw.randint(0, config.world_size - 1)
    if config.fault_ranks:
        listed = config.fault_ranks.split(",")
        return int(listed[index % len(listed)])
    return draw.randint(1, config.world_size - 1) if config.world_size > 1 else 0


class Injector:
    """Fires the faults that are planned for ``rank``."""

    def __init__(self, config: RunConfig, paths: RunPaths, rank: int, events: EventLog) -> None:
        self._paths = paths
        self._snapshot_root = config.snapshot_root
        self._events = events
        self._planned = {fault.step: fault for fault in schedule(config) if fault.rank == rank}

    def maybe_fire(self, step: int) -> None:
        """Strike, if a fault is due at ``step`` on this rank and has never fired in this run. It may not return."""
        fault = self._planned.get(step)
        if fault is None or not self._claim(fault):
            return
        self._events.emit(
            "fault_injected", index=fault.index, step=step, rank=fault.rank, kind=fault.kind, variant=fault.variant
        )
        self._strike(fault)

    def _claim(self, fault: PlannedFault) -> bool:
        """Whether this call is the first of the run to fire ``fault``; durable before it returns."""
        directory = self._paths.faults_fired
        directory.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(directory / str(fault.index), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        fsync_directory(directory)
        return True

    def _strike(self, fault: PlannedFault) -> None:
        message = f"injected {fault.kind}: fault {fault.index} at step {fault.step} on rank {fault.rank}"
        match fault.kind, fault.variant:
            case "exception", _:
                raise InjectedFault(message)
            case "hang", "loop":
                while True:
                    time.sleep(0.1)
            case "hang", _:
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sigkill", _:
                os.kill(os.getpid(), signal.SIGKILL)
            case "oom", _:
                exhaust_memory(message)
            case "node", _:
                node = environment.read(local_rank=0).node  # its own may be hidden from NVRx
                snapshots = self._paths.snapshots(self._snapshot_root, node)
                lose_node(environment.node_pid(), snapshots)
            case _:
                raise DefectError(f"there is no fault of kind {fault.kind}")


def exhaust_memory(message: str) -> NoReturn:
    """Allocate until it is refused, give everything back, and raise what the allocator raised.

    On a GPU its memory runs out (``torch.cuda.OutOfMemoryError``). On a CPU the address space of this process is limited to
    a little more than it has (``MemoryError``), so that the kernel kills nobody; the limit is lifted again.
    """
    if environment.has_gpu():
        _exhaust_gpu_memory()
    blocks: list[bytes] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + OOM_ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        while len(blocks) * OOM_BLOCK <= OOM_ROOM:  # where the kernel enforces no limit, end by count
            blocks.append(b"\1" * OOM_BLOCK)
    except MemoryError:
        pass
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        blocks.clear()
    raise MemoryError(message)


def _exhaust_gpu_memory() -> NoReturn:
    import torch

    blocks: list[torch.Tensor] = []
    try:
        while True:
            blocks.append(torch.empty(OOM_GPU_BLOCK, dtype=torch.uint8, device="cuda"))
    finally:
        blocks.clear()  # the traceback would keep them
        torch.cuda.empty_cache()


def lose_node(node_pid: int, snapshots: Path) -> NoReturn:
    """End all processes of the node whose first process is ``node_pid``, this one last, and remove its snapshots.

    All are stopped before one is killed: a process that still ran could fork, or write a snapshot after its removal.
    Where ``node_pid`` is process 1 of a container, it ignores signals from inside, and sees its children die.
    """
    stopped: dict[int, psutil.Process] = {}
    clean = 0
    while clean < CLEAN_SCANS:
        new = [process for process in node_processes(node_pid) if process.pid not in {os.getpid(), *stopped}]
        clean = 0 if new else clean + 1
        for process in new:
            stopped[process.pid] = process
            with suppress(psutil.Error):
                process.suspend()
    shutil.rmtree(snapshots, ignore_errors=True)
    for process in stopped.values():
        with suppress(psutil.Error):  # it ended by itself
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def node_processes(node_pid: int) -> list[psutil.Process]:
    """The process ``node_pid``, all its descendants, and those of them that a parent's end has orphaned.

    Orphans and daemons have no ancestor to be found by, but they still carry the environment that names their node.
    """
    mark = str(node_pid)
    parents = {process.pid: process for process in psutil.process_iter(["ppid"])}
    found: list[psutil.Process] = []
    for pid, process in parents.items():
        ancestor = pid
        while ancestor in parents and ancestor != node_pid:
            ancestor = parents[ancestor].info["ppid"] or 0
        try:
            if ancestor == node_pid or process.environ().get(environment.NODE_PID) == mark:
                found.append(process)
        except psutil.Error:  # it ended meanwhile, or belongs to another user
            continue
    return found
