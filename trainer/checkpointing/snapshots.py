"""The node-local tier: a copy of each rank's state every few steps in memory-backed storage, for fast restarts.

It survives whatever the processes do (it belongs to the node's file system, not to them) and dies with the node. Each
rank keeps two generations, so that one is whole while the other is written:

    <snapshot root>/holdfast-<run>-<root>/node-<n>/rank-<r>-<0|1>     header (4096 bytes), then the tensors

The header holds what the copy is of (step, world size, rank, run, config digest). It is cleared before the copy begins and
written by a thread once it has ended; when the thread has computed it, the CRC-32 of the bytes is added, which seals the snapshot.
From a GPU the copy runs beside the next step's forward and backward passes, and it and its header are waited for before that
step's update: so a fault never costs more steps than lie between two snapshots. A snapshot of step s is taken after all ranks
have agreed that step s is done (``Control.sum``), so it is never of a state that only survivors of an abort believe in.
Training resumes at the newest step that every rank holds whole.

Two things keep that step whole on every rank. A copy never goes over the newest generation that all ranks had, which
is not always the one with the higher step: a rank may be ahead of what was resumed from. And a header names the entry
into training that made it, so that parts of one step are put together only if they are of one trajectory.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpointing.base import Completed, TrainingState
from trainer.checkpointing.replicas import Replicator, fetch
from trainer.checkpointing.snapshot_files import HEADER, Name, held, read_header, write_header
from trainer.checkpointing.staging import HostBuffer, Warming, layout_of
from trainer.checkpointing.transfer import Copying
from trainer.events import EventLog
from trainer.paths import RunPaths
from trainer.records import RunRecord
from trainer.recovery.base import Watch
from trainer.rendezvous import Control

GENERATIONS = 2


@dataclass(frozen=True)
class Sealing:
    """A copy that has begun, and whose checksum and header are still to come."""

    step: int
    path: Path
    buffer: HostBuffer
    copying: Copying
    header: dict[str, int | str]
    started: float


class SnapshotSlot:
    """This rank's two mapped files, and the thread that seals the newest; outlives an in-process restart."""

    def __init__(self) -> None:
        self.buffers: dict[Path, HostBuffer] = {}
        self.replicator: Replicator | None = None
        self._warming = Warming()
        self._thread: threading.Thread | None = None
        self._copying: Copying | None = None
        self._placed = threading.Event()
        """The newest snapshot's copy has ended, and its header says so unless it could not be written."""

    def warm(self, paths: list[Path], size: int) -> None:
        """Begin to make the generations in the background."""

        def make() -> None:
            for path in paths:
                self._open(path, size).populate()

        self._warming.begin(make)

    def open(self, path: Path, size: int) -> HostBuffer:
        """The mapped file at ``path``, made where it is not there. Raises ``OSError`` when there is no room."""
        self._warming.wait()
        return self._open(path, size)

    def _open(self, path: Path, size: int) -> HostBuffer:
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
            self.buffers[path] = HostBuffer(fd, size, offset=HEADER)
        except OSError:  # there is no room: what was taken of it is given back
            self.buffers.pop(path, None)
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return self.buffers[path]

    def forget(self, path: Path) -> None:
        """Unmap ``path``: another file is about to take its name."""
        self._warming.wait()
        found = self.buffers.pop(path, None)
        if found is not None:
            found.close()

    def seal(self, sealing: Sealing, events: EventLog) -> None:
        """Header and checksum, in the background: the checksum of gigabytes takes longer than their copy. ``OSError`` when the
        machine has no room for a thread."""
        self.join()
        self._copying, self._placed = sealing.copying, threading.Event()
        self._thread = threading.Thread(
            target=_seal, args=(sealing, self._placed, events, self.replicator), name="snapshot", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def fence(self) -> None:
        """Return once the state may change: the newest snapshot's copy is in place, and training can resume from it."""
        copying, self._copying = self._copying, None  # (one that failed is not to fail after each restart)
        if copying is not None:
            copying.wait()
            # (A restart may have come before the thread was started; and it cannot interrupt a wait without an end.)
            while not self._placed.wait(0.1) and self._thread is not None and self._thread.is_alive():
                pass

    def join(self) -> None:
        """Wait until the newest snapshot is sealed; it always ends: it only computes and writes to memory."""
        if self._thread is not None:
            if self._thread.ident is not None:  # (else a restart came before it was started)
                self._thread.join()
            self._thread = None


def _seal(sealing: Sealing, placed: threading.Event, events: EventLog, replicator: Replicator | None) -> None:
    try:
        try:
            sealing.copying.wait()
            write_header(sealing.path, sealing.header)
        finally:
            placed.set()
        write_header(sealing.path, sealing.header | {"crc": sealing.buffer.checksum()})
    except Exception as error:  # (of the copy it is raised in ``fence``, too)
        events.emit("save_failed", step=sealing.step, tier="snapshot", reason=f"{type(error).__name__}: {error}"[:500])
        return
    events.emit(
        "commit",
        step=sealing.step,
        tier="snapshot",
        bytes=sealing.buffer.size,
        seconds=time.monotonic() - sealing.started,
        path=str(sealing.path),
    )
    if replicator is not None:
        replicator.send((sealing.step, str(sealing.header["entry"])), sealing.path)


@dataclass(frozen=True)
class Peers:
    """What a rank needs to know to find the replicas of its snapshots."""

    paths: RunPaths
    attempt: int
    node: int


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
        peers: Peers | None = None,
    ) -> None:
        self._peers = peers
        self._interval = record.config.snapshot_interval_steps
        self._identity: dict[str, int | str] = {"digest": record.config_digest, "created": repr(record.created)}
        self._directory = directory
        self._control = control
        self._events = events
        self._watch = watch
        self._slot = slot
        self._tensors = state.tensors()
        self._layout, self._size = layout_of(self._tensors)
        self._broken = False
        self._entry = ""
        self._common: dict[int, str] = {}
        """Steps that every rank holds, and the entry that made them."""
        self._local: set[int] = set()
        """The ranks of this node; once a step is taken, no others' files are of use here."""
        self._holders: dict[tuple[int, Name], int] = {}
        """Which node has a replica of a rank's snapshot."""
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

    def _common_identity(self) -> dict[str, int | str]:
        """What the snapshots of all ranks that can be resumed from together say of themselves."""
        return self._identity | {"world_size": self._control.world_size}

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
        here = set(held(self._directory, self._common_identity())) if self._peers else set()
        node = self._peers.node if self._peers else 0
        everywhere = self._control.gather((set(self._whole()), secrets.token_hex(8), node, here))
        self._entry = everywhere[0][1]
        self._local = {rank for rank, (_, _, there, _) in enumerate(everywhere) if there == node}
        self._holders = {copy: holder for _, _, holder, copies in everywhere for copy in copies}
        reachable = [
            whole | {name for holder_rank, name in self._holders if holder_rank == rank}
            for rank, (whole, *_) in enumerate(everywhere)
        ]
        self._common = dict(sorted(set.intersection(*reachable)))
        yield from sorted(self._common, reverse=True)

    def load(self, step: int) -> bool:
        name = (step, self._common[step])
        path = self._whole().get(name, self._path(0))
        reason = ""
        try:
            if name not in self._whole():
                path = self._fetch(name)
            buffer = self._slot.open(path, self._size)
            with ThreadPoolExecutor(1) as pool:  # (both take a moment for gigabytes, and a restart waits for them)
                checksum = pool.submit(buffer.checksum)
                buffer.load(self._tensors, self._layout)
            found, header = checksum.result(), read_header(path)
            if (header.get("step"), header.get("entry")) != name:
                reason = "its header is gone"
            elif header.get("crc", found) != found:  # (none where a fault came before it was sealed)
                reason = "its bytes do not have the checksum of its header"
        except (OSError, ValueError) as error:
            reason = str(error)
        if reason:
            self._events.emit("checkpoint_refused", path=str(path), reason=reason)
        if not self._control.all(not reason):
            return False
        self._kept = path
        return True

    def _fetch(self, name: Name) -> Path:
        """Bring this rank's snapshot back from the node that holds its replica. Raises ``OSError`` or ``ValueError``."""
        assert self._peers is not None
        rank, target = self._control.rank, self._path(0)
        holder = self._holders[rank, name]
        self._slot.forget(target)
        fetch(self._peers.paths, self._peers.attempt, holder, rank, name, target)
        if self._whole().get(name) != target:
            raise ValueError(f"the replica of step {name[0]} on node {holder} is not whole")
        return target

    def after_step(self, completed: Completed) -> None:
        """Take a snapshot. On a full /dev/shm the tier is given up, which is recorded; training goes on."""
        if not self._broken:
            self._slot.warm([self._path(generation) for generation in range(GENERATIONS)], self._size)
        if self._broken or completed.step % self._interval or completed.last or completed.stopping:
            return
        began = time.monotonic()
        self._slot.join()
        self._tidy()
        path = next(path for path in map(self._path, range(GENERATIONS)) if path != self._kept)
        header = self._header(completed.step)
        with self._watch.phase(self._watch.limits.save):
            if self._slot.replicator is not None:
                self._slot.replicator.release(path)
            try:
                buffer = self._slot.open(path, self._size)
                write_header(path, {})
                copying = buffer.store(self._tensors, self._layout)
                self._slot.seal(Sealing(completed.step, path, buffer, copying, header, began), self._events)
                self._kept = path  # (on every rank, before the next one is agreed on: see ``busy``)
            except OSError as error:
                self._broken = True
                self._events.emit("save_failed", step=completed.step, tier="snapshot", reason=str(error))
        self._events.emit("stall", step=completed.step, seconds=time.monotonic() - began, reason="snapshot")

    def _tidy(self) -> None:
        """Give back the memory of ranks that a restart has moved to another node, once, after all have resumed."""
        local, self._local = self._local, set()
        if not local or self._control.rank != min(local):
            return
        for path in self._directory.glob("r*-*"):
            kind, rank, *_ = path.name.split("-")
            if (kind == "rank") != (int(rank) in local):
                path.unlink(missing_ok=True)

    def busy(self, step: int) -> bool:
        """Before a step that overwrites a generation is agreed on, this rank's other one is sealed: so is every rank's
        by the time that any rank goes on, and the newest step that all hold is never lost."""
        self._slot.fence()
        if step % self._interval == 0:
            self._slot.join()
        return False

    def finish(self) -> None:
        self._slot.join()

    def close(self) -> None:
        """The files stay; the slot outlives this iteration."""
