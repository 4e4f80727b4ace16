"""Facts, one JSON line each, in one append-only file per process. Steps derive every number from them.

A process opens its own file exclusively and only appends whole lines, so that a killed process loses at most the line
it was writing, and no two processes ever write one file.

    ``events/<host>-<role>-<pid>-<start ns>.jsonl``

The events, by role, with what their ``data`` holds (times in seconds):

supervisor (steps.train)
    supervisor_start   attempt's number, attached (bool: found a living Job), launcher, workflow (name of the Workflow)
    supervisor_end     exit_code, message (the signal, if it was asked to stop), workflow, by_user (argo stop)
node (steps.node, one per node and pod; also the parent that forks the workers)
    launcher_start     nodes, processes, recovery     -- the clock of the run starts at the first one
    launcher_end       exit_code
    worker_exit        local_rank, exit_code (negative: signal)
    worker_stop        local_rank, signal             -- the launcher asked a worker to stop
    pod_restart        pod, exit_code                 -- the Job (or the local launcher) starts the node again
trainer (one per worker process; rank and world size in the envelope)
    process_start      spawned_at (wall; when the launcher asked for the process)
    imports_done
    entry              the training function begins; envelope's iteration > 0 after an in-process restart
    process_group_ready, model_ready
    loaded             step (0: from scratch), tier (none | durable | snapshot), path
    step_start         step
    step_end           step, loss, grad_norm, tokens (of the whole step, all ranks), learning_rate, compute_seconds
                       (this rank's own, without what it waits for others)
    samples            step, ids (this rank's sample indices)
    save_start         step, mode (async | sync), tier
    stall              step, seconds, reason (save | poll | drain | snapshot)   -- the loop waited for a checkpoint
    save_skipped       step, reason
    commit             step, tier, bytes, seconds (from save_start to durable), path
    save_failed        step, tier, reason
    checkpoint_refused path, reason                    -- not whole, of another run, unreadable: an older one is used
    quarantined        path, reason
    fault_injected     index, step, rank, kind, variant
    fault_detected     layer (in_process | in_job | pod | workflow), message
    non_finite         step, loss, grad_norm
    stop_requested     reason
    fenced             newest (attempt)
    finished           step

Detection of a fault is the first ``fault_detected`` (or ``worker_stop``/``worker_exit`` that is not of the fault's
own making) after it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

Role = Literal["supervisor", "node", "trainer"]


class Event(BaseModel):
    """One line of an event file: an envelope that says who and when, and the event's own data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    event: str
    time: float = Field(description="wall clock, seconds since the epoch")
    monotonic: float = Field(description="the host's monotonic clock, seconds; comparable within one boot_id")
    boot_id: str = Field(description="names a boot of a host")
    run_id: str
    host: str
    role: Role
    pid: int
    attempt: int = Field(0, description="number of the supervisor's start that this process belongs to, from 1")
    node: int = Field(-1, description="index of the node, -1 for the supervisor")
    pod: int = Field(0, description="how many times this node has been started again within the attempt")
    cycle: int = Field(0, description="in-job restarts before this process")
    iteration: int = Field(0, description="in-process restarts before this entry")
    rank: int = Field(-1, description="global rank, -1 where there is none")
    world_size: int = 0
    data: dict[str, JsonValue] = {}


def boot_id() -> str:
    """A name for this boot of this host (Linux), or the host's name where the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class EventLog:
    """Appends events to this process's own file.

    Every line is one ``write`` of an ``O_APPEND`` descriptor: whole, or (when the process dies in it) torn at the end.
    ``envelope`` holds the fields that all events of this process share; ``update`` changes them after a restart.
    """

    def __init__(self, directory: Path, run_id: str, role: Role, **envelope: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        host, pid = socket.gethostname(), os.getpid()
        self.path = directory / f"{host}-{role}-{pid}-{time.time_ns()}.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._envelope: dict[str, Any] = {
            "schema_version": 1, "boot_id": boot_id(), "run_id": run_id, "host": host, "role": role, "pid": pid,
        } | envelope  # fmt: skip

    def update(self, **envelope: Any) -> None:
        self._envelope |= envelope

    def emit(self, event: str, **data: Any) -> None:
        """Append one event. A full disk must not end training: the event is lost, and that is said on stderr."""
        line = {"event": event, "time": time.time(), "monotonic": time.monotonic(), **self._envelope, "data": data}
        try:
            os.write(self._fd, (json.dumps(line, default=str) + "\n").encode())
        except OSError as error:
            os.write(2, f"event {event} could not be written to {self.path}: {error.strerror}\n".encode())

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class EventFile:
    """What one process left: its events, and how many lines are none (torn, or of another version)."""

    name: str
    events: tuple[Event, ...]
    unreadable: int


def read_files(directory: Path) -> list[EventFile]:
    """The event files of a run, by name."""
    found = []
    for path in sorted(directory.glob("*.jsonl")):
        events: list[Event] = []
        unreadable = 0
        for line in path.read_bytes().split(b"\n"):
            if line:
                try:
                    events.append(Event.model_validate_json(line))
                except ValidationError:
                    unreadable += 1
        found.append(EventFile(path.name, tuple(events), unreadable))
    return found


def in_order(files: Iterable[EventFile]) -> list[Event]:
    """The events of ``files`` in the order of their wall clock."""
    return sorted((event for file in files for event in file.events), key=lambda e: (e.time, e.monotonic))


def read(directory: Path) -> Iterator[Event]:
    """All events of a run in the order of their wall clock. Torn last lines are skipped.

    A line in the middle of a file that is not an event is skipped too: it can only come from a full disk.
    """
    yield from in_order(read_files(directory))
