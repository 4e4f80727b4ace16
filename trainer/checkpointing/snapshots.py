"""The node-local tier: a copy of each rank's state every few steps in memory-backed storage, for fast restarts.

It survives whatever the processes do (it belongs to the node's file system, not to them) and dies with the node. Each
rank keeps two generations, so that one is whole while the other is written:

    <snapshot root>/holdfast-<run>-<root>/node-<n>/rank-<r>-<0|1>     header (4096 bytes), then the tensors

The header holds what the copy is of (step, world size, rank, run, config digest, CRC-32 of the bytes). It is cleared
before the copy begins and written after it has ended, by a thread, once the checksum is known. A snapshot of step s is
taken after all ranks have agreed that step s is done (``Control.sum``), so it is never of a state that only survivors
of an abort believe in. Training resumes at the newest step that every rank holds whole.

Two things keep that step whole on every rank. A copy never goes over the newest generation that all ranks had, which
is not always the one with the higher step: a rank may be ahead of what was resumed from. And a header names the entry
into training that made it, so that parts of one step are put together only if they are of one trajectory.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.checkpointing.base import Completed, TrainingState
from trainer.checkpointing.staging import HostBuffer, layout_of
from trainer.events import EventLog
from trainer.records import RunRecord
from trainer.recovery.base import Watch
from trainer.rendezvous import Control

HEADER = 4096
GENERATIONS = 2


@dataclass(frozen=True)
class Sealing:
    """A copy that is in place, and whose checksum and header are still to come."""

    step: int
    path: Path
    buffer: HostBuffer
    header: dict[str, int | str]
    started: float


class SnapshotSlot:
    """This rank's two mapped files, and the thread that seals the newest; outlives an in-process restart."""

    def __init__(self) -> None:
        self.buffers: dict[Path, HostBuffer] = {}
        self._thread: threading.Thread | None = None

    def open(self, path: Path, size: int, *, pin: bool) -> HostBuffer:
        found = self.buffers.get(path)
        if found is not None and found.size == size:
            return found
        if found is not None:
            found.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size != size + HEADER:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, size + HEADER)
            self.buffers[path] = HostBuffer(fd, size, pin=pin, offset=HEADER)
        except OSError:  # there is no room: what was taken of it is given back
            self.buffers.pop(path, None)
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return self.buffers[path]

    def seal(self, sealing: Sealing, events: EventLog) -> None:
        """Checksum and header, in the background: the checksum of gigabytes takes longer than their copy."""
        self.join()
        self._thread = threading.Thread(target=_seal, args=(sealing, events), name="snapshot", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the newest snapshot is sealed; it always ends: it only computes and writes to memory."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _seal(sealing: Sealing, events: EventLog) -> None:
    try:
        write_header(sealing.path, sealing.header | {"crc": sealing.buffer.checksum()})
    except OSError as error:
        events.emit("save_failed", step=sealing.step, tier="snapshot", reason=str(error))
        return
    events.emit(
        "commit",
        step=sealing.step,
        tier="snapshot",
        bytes=sealing.buffer.size,
        seconds=time.monotonic() - sealing.started,
        path=str(sealing.path),
    )


class SnapshotTier:
    """Snapshots of one run on this node, as one rank of one iteration sees them."""

    def __init__(
        self,
        record: RunRecord,
        directory: Path,
        state: TrainingState,
        control: Control,
        events: EventLog,
        watch: Watch,
        slot: SnapshotSlot,
    ) -> None:
        self._interval = record.config.snapshot_interval_steps
        self._identity: dict[str, int | str] = {"digest": record.config_digest, "created": repr(record.created)}
        self._directory = directory
        self._control = control
        self._events = events
        self._watch = watch
        self._slot = slot
        self._tensors = state.tensors()
        self._layout, self._size = layout_of(self._tensors)
        self._pin = torch.cuda.is_available()
        self._broken = False
        self._entry = ""
        self._common: dict[int, str] = {}
        """Steps that every rank holds, and the entry that made them."""
        self._kept: Path | None = None
        """The generation that all ranks have, and that nothing may go over."""
        self.refused: list[str] = []  # a snapshot that is not whole is nothing to miss: the durable tier has older ones

    def _path(self, generation: int) -> Path:
        return self._directory / f"rank-{self._control.rank}-{generation}"

    def _header(self, step: int) -> dict[str, int | str]:
        """What a whole snapshot of this rank says of itself, but for its checksum."""
        return self._identity | {
            "step": step,
            "entry": self._entry,
            "world_size": self._control.world_size,
            "rank": self._control.rank,
            "size": self._size,
        }

    def _whole(self) -> dict[tuple[int, str], Path]:
        """This rank's whole generations, by step and entry."""
        found: dict[tuple[int, str], Path] = {}
        for generation in range(GENERATIONS):
            header = read_header(self._path(generation))
            if header and all(
                header.get(key) == value for key, value in self._header(0).items() if key not in ("step", "entry")
            ):
                found[int(header["step"]), str(header["entry"])] = self._path(generation)
        return found

    def candidates(self) -> Iterator[int]:
        self._slot.join()
        everywhere = self._control.gather((set(self._whole()), secrets.token_hex(8)))
        self._entry = everywhere[0][1]
        self._common = dict(sorted(set.intersection(*(whole for whole, _ in everywhere))))
        yield from sorted(self._common, reverse=True)

    def load(self, step: int) -> bool:
        path = self._whole()[step, self._common[step]]
        reason = ""
        try:
            buffer = self._slot.open(path, self._size, pin=self._pin)
            if buffer.checksum() != read_header(path)["crc"]:
                reason = "its bytes do not have the checksum of its header"
            else:
                buffer.load(self._tensors, self._layout)
        except OSError as error:
            reason = str(error)
        if reason:
            self._events.emit("checkpoint_refused", path=str(path), reason=reason)
        if not self._control.all(not reason):
            return False
        self._kept = path
        return True

    def after_step(self, completed: Completed) -> None:
        """Take a snapshot. On a full /dev/shm the tier is given up, which is recorded; training goes on."""
        if self._broken or completed.step % self._interval or completed.last or completed.stopping:
            return
        began = time.monotonic()
        self._slot.join()
        path = next(path for path in map(self._path, range(GENERATIONS)) if path != self._kept)
        header = self._header(completed.step)
        with self._watch.phase(self._watch.limits.save):
            try:
                buffer = self._slot.open(path, self._size, pin=self._pin)
                write_header(path, {})
                buffer.store(self._tensors, self._layout)
                self._slot.seal(Sealing(completed.step, path, buffer, header, began), self._events)
                self._kept = path  # (on every rank, before the next one is agreed on: see ``busy``)
            except OSError as error:
                self._broken = True
                self._events.emit("save_failed", step=completed.step, tier="snapshot", reason=str(error))
        self._events.emit("stall", step=completed.step, seconds=time.monotonic() - began, reason="snapshot")

    def busy(self, step: int) -> bool:
        """Before a step that overwrites a generation is agreed on, this rank's other one is sealed: so is every rank's
        by the time that any rank goes on, and the newest step that all hold is never lost."""
        if step % self._interval == 0:
            self._slot.join()
        return False

    def finish(self) -> None:
        self._slot.join()

    def close(self) -> None:
        """The files stay; the slot outlives this iteration."""


def read_header(path: Path) -> dict[str, int | str]:
    """What the snapshot at ``path`` is of; empty when it is not whole."""
    try:
        with path.open("rb") as file:
            text = file.read(HEADER).rstrip(b"\0")
        header = json.loads(text) if text else {}
    except (OSError, ValueError):
        return {}
    return header if isinstance(header, dict) else {}


def write_header(path: Path, header: dict[str, int | str]) -> None:
    text = json.dumps(header).encode() if header else b""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, text.ljust(HEADER, b"\0"), 0)
    finally:
        os.close(fd)
