"""The durable tier: sharded DCP checkpoints on the shared file system, committed by a rename.

Saving: the state is copied into a staging buffer of our own, and written, hashed and committed in the background
(``writer``). From a GPU the copy runs beside the next step's forward and backward passes; before that step's update it is
waited for, and the writer told. The save plan is made once per process group; after that a save needs no collective.
Synchronous mode runs the same job in this process.

Loading: only directories with their final name and a manifest of this run are looked at. The ranks share the checking
of hashes (``loading``), and each reads its part, at whatever world size; they agree after every step. A checkpoint that fails
twice is moved to quarantine and the next older one is tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from trainer import environment
from trainer.checkpointing.base import Completed, TrainingState
from trainer.checkpointing.catalog import Catalog
from trainer.checkpointing.loading import Reading, Refused, shares
from trainer.checkpointing.removal import discard
from trainer.checkpointing.staging import Layout, layout_of
from trainer.checkpointing.storage import Storage
from trainer.checkpointing.transfer import Copying
from trainer.checkpointing.writer import Commit, Fenced, Job, SaveFailed, leave, run
from trainer.checkpointing.writer_slot import WriterSlot
from trainer.config import RunConfig
from trainer.errors import DataError, PipelineError, StoppedError, UnavailableError
from trainer.events import EventLog
from trainer.paths import MANIFEST, RunPaths
from trainer.progress import newest_attempt
from trainer.records import CheckpointManifest, RunRecord
from trainer.recovery.base import Watch
from trainer.rendezvous import Control

T = TypeVar("T")


class DurableTier:
    """Checkpoints of one run, as one rank of one iteration sees them."""

    def __init__(
        self,
        record: RunRecord,
        paths: RunPaths,
        attempt: int,
        state: TrainingState,
        control: Control,
        events: EventLog,
        watch: Watch,
        slot: WriterSlot,
    ) -> None:
        self._config: RunConfig = record.config
        self._digest = record.config_digest
        self._paths = paths
        self._attempt = attempt
        self._state = state
        self._control = control
        self._events = events
        self._watch = watch
        self._slot = slot
        self._storage = Storage(paths.storage_bucket, record.config.storage_bytes_per_second)
        self._layout: tuple[dict[str, Tensor], Layout, int] | None = None
        self._plan: tuple[SavePlan, Metadata | None, str] | None = None
        self._saved = -1
        self._committed = -1
        self._saves = 0
        self._catalog = Catalog(record, paths, events)
        self.refused: list[str] = []

    # -- resuming

    def candidates(self) -> Iterator[int]:
        self._reconcile()
        tried: set[int] = set()
        while True:  # a save still in flight may commit meanwhile, and its retention remove what was seen before
            saving = self._slot.in_flight
            busy = saving.directory if saving else None
            mine = self._catalog.survey(self._attempt, busy) if self._control.rank == 0 else None
            steps, refused = self._control.from_rank_0(mine)
            self.refused += [reason for reason in refused if reason not in self.refused]
            new = [step for step in steps if step not in tried]
            if not new:
                return
            tried.update(new)
            yield from new

    def _reconcile(self) -> None:
        """A restart may have come while a save began: one that has not begun on every rank can never be whole."""
        slot = self._slot
        if slot.copying is not None:
            try:
                self._launch()
            except PipelineError:
                raise
            except Exception:  # of a copy that failed: it has been told, and the restart was for it
                pass
        if slot.starting:
            slot.starting = False
            slot.queue.close()
            if slot.in_flight is not None:
                self._failed(SaveFailed("a restart came while it began"))
        if slot.in_flight is not None and slot.queue.idle:  # a restart came between its end and our knowing of it
            slot.queue.close()
            self._settle(SaveFailed("a restart came while its end was read"))
        scheduled = self._control.gather(slot.scheduled)
        job = slot.in_flight
        if job is not None and job.commit is not None:
            for rank, name in enumerate(scheduled):
                if name != job.directory.name:
                    with contextlib.suppress(OSError):
                        leave(job.directory / f".failed-{rank}", b"a restart came before it began")

    def load(self, step: int) -> bool:
        path = self._paths.checkpoint(step)
        for last_try in (False, True):
            self._watch.enter(self._watch.limits.startup)
            reasons = self._load(path)
            if not reasons:
                self._saved = self._committed = step
                return True
            if self._control.sum(float(not path.exists()))[0]:
                self.refused.append(f"{path.name}: it was removed while it was read")
                return False  # by retention: a newer one was committed
            if last_try:
                self.refused.append(f"{path.name}: {reasons[0]}")
                if self._control.rank == 0:
                    self._catalog.quarantine(path, reasons[0])
                self._control.all(True)
        return False

    def _load(self, path: Path) -> list[str]:
        """Plan, check, read, each on all ranks before the next; what is wrong with the checkpoint, or nothing.

        A fault of a rank (its GPU, its way to the storage) is no fault of a checkpoint: it is raised.
        """
        reading: Reading | None = None

        def prepare() -> dict[str, int]:
            nonlocal reading
            reading = Reading.prepare(path, self._state.tensors(), self._storage)
            return reading.wanted

        wanted, reasons = self._everywhere(path, prepare)
        if reasons:
            return reasons
        assert reading is not None
        mine = shares(wanted)[self._control.rank]
        return (
            self._everywhere(path, lambda: reading.check(mine, self._storage))[1]
            or self._everywhere(path, lambda: reading.read(mine, self._storage))[1]
        )

    def _everywhere(self, path: Path, act: Callable[[], T]) -> tuple[list[T], list[str]]:
        """What ``act`` returned on every rank; or what was wrong with the checkpoint, on those where it found something."""
        value, reason = None, ""
        try:
            value = act()
        except Refused as error:
            reason = str(error)
            self._events.emit("checkpoint_refused", path=str(path), reason=reason)
        answers = self._control.gather((value, reason))
        return [value for value, _ in answers], [reason for _, reason in answers if reason]

    # -- saving

    def busy(self, step: int) -> bool:
        """Look after a save in flight: start it once its copy is in place, report its end, whatever it is.

        A GPU has work meanwhile, so the plan of the first save, a third of a second for a 1B model, is made here, where only
        a CPU waits for it.
        """
        if self._plan is None and self._due(step):
            began = time.monotonic()
            with self._watch.phase(self._watch.limits.save):
                self._planned()
            if not environment.has_gpu():
                self._events.emit("stall", step=step, seconds=time.monotonic() - began, reason="save")
        return self._in_flight()

    def _due(self, step: int) -> bool:
        return step % self._config.checkpoint_interval_steps == 0 or step == self._config.max_steps

    def _in_flight(self) -> bool:
        slot = self._slot
        if slot.copying is not None:
            self._launch()
        if slot.in_flight is None:
            return False
        try:
            value = slot.queue.poll()
        except SaveFailed as error:
            self._failed(error)
            return False
        if value is None:
            return True
        self._done(value)
        return False

    def _done(self, value: int) -> None:
        job, self._slot.in_flight = self._slot.in_flight, None
        assert job is not None
        if job.commit is not None:
            self._committed = self._slot.step
            self._events.emit(
                "commit",
                step=self._slot.step,
                tier="durable",
                bytes=value,
                seconds=time.monotonic() - self._slot.started,
                path=str(self._paths.checkpoint(self._slot.step)),
            )

    def _failed(self, error: SaveFailed) -> None:
        """A save came to nothing: record it, tell rank 0's writer by a file, and let the next save start afresh."""
        if isinstance(error, Fenced):
            self._slot.in_flight = None
            self._events.emit("fenced", newest=newest_attempt(self._paths))
            raise StoppedError(f"a newer attempt of this run has started ({error})")
        self._settle(error)

    def _settle(self, error: SaveFailed) -> None:
        """The save in flight is over, by ``error`` unless its writer was faster: what has a checkpoint's name is one."""
        job = self._slot.in_flight
        assert job is not None
        if job.commit is not None:
            discard(job.directory)
            with contextlib.suppress(OSError, DataError):
                manifest = CheckpointManifest.read(self._paths.checkpoint(self._slot.step) / MANIFEST)
                if manifest.created == job.commit.manifest.created:
                    self._done(sum(file.size for file in manifest.files))
                    return
        self._slot.in_flight = None
        self._gave_up(self._slot.step, job.directory, error)

    def _gave_up(self, step: int, directory: Path, error: Exception) -> None:
        self._events.emit("save_failed", step=step, tier="durable", reason=str(error))
        if self._control.rank:
            with contextlib.suppress(OSError):  # (our writer may not have begun)
                directory.mkdir(parents=True, exist_ok=True)
                leave(directory / f".failed-{self._control.rank}", str(error).encode())

    def after_step(self, completed: Completed) -> None:
        if self._slot.cold:
            self._slot.warm(self._laid_out()[2])
        forced = completed.last or completed.stopping
        if not (self._due(completed.step) or forced) or completed.step == self._saved:
            return
        if completed.busy and not forced:
            if self._control.rank == 0:
                self._events.emit("save_skipped", step=completed.step, reason="a save is in flight")
            return
        if completed.busy:
            self.finish()
        if forced:
            self._save_for_sure(completed.step, completed.last)
        else:
            self._save(completed.step, self._config.checkpoint_mode)

    def _save_for_sure(self, step: int, last: bool) -> None:
        """A save that nothing comes after: when it comes to nothing it is made once more, in this process."""
        for mode in (self._config.checkpoint_mode, "sync"):
            self._save(step, mode)
            self.finish()
            if self._control.all(self._control.rank != 0 or self._committed == step):
                return
        if last:
            raise UnavailableError(
                f"the last checkpoint, of step {step}, could not be written to {self._paths.checkpoints}; "
                "the reason is in the events (save_failed); once there is room, another attempt goes on from the one before"
            )

    def _save(self, step: int, mode: str) -> None:
        began = time.monotonic()
        if self._control.rank == 0:
            self._events.emit("save_start", step=step, mode=mode, tier="durable")
        with self._watch.phase(self._watch.limits.save * 1.5):
            self._saved = step
            if (staged := self._stage(step, mode)) is not None:
                slot = self._slot
                slot.starting = True
                slot.in_flight, slot.step, slot.started, slot.scheduled = staged[0], step, began, ""
                slot.starting, slot.copying = False, staged[1]
                if staged[1].done or mode == "sync":
                    self._launch()
            if mode == "sync":
                self._control.all(True)  # nobody goes on before the commit
        self._events.emit("stall", step=step, seconds=time.monotonic() - began, reason="save")

    def _launch(self) -> None:
        """Wait for the copy of the save in flight, and have it written."""
        slot = self._slot
        job, copying = slot.in_flight, slot.copying
        assert job is not None and copying is not None
        try:
            copying.wait()
        except Exception as error:
            slot.copying = None  # (one that failed is not to fail after each restart)
            self._failed(SaveFailed(f"{type(error).__name__}: {error}"))
            raise
        slot.starting, slot.copying = True, None
        try:
            if job.staged is not None:
                self._done(run(job))
            else:
                slot.queue.start(job)
                slot.scheduled = job.directory.name
        except PipelineError:
            raise
        except Exception as error:  # torch's writer raises what it likes, and a save is not worth a training
            slot.queue.close()
            self._failed(error if isinstance(error, SaveFailed) else SaveFailed(f"{type(error).__name__}: {error}"))
        slot.starting = False

    def _laid_out(self) -> tuple[dict[str, Tensor], Layout, int]:
        """The live tensors, and where each lies in the staging buffer; looked up once."""
        if self._layout is None:
            tensors = self._state.tensors()
            self._layout = (tensors, *layout_of(tensors))
        return self._layout

    def _stage(self, step: int, mode: str) -> tuple[Job, Copying] | None:
        """Describe the save, and begin to copy the state; None where there is no memory for a copy."""
        tensors, layout, size = self._laid_out()
        plan, metadata, nonce = self._planned()
        self._saves += 1  # (the same on every rank: a directory is never used twice)
        directory = self._paths.checkpoints / f".tmp-{step:08d}-{nonce}-{self._saves}"
        try:
            staging = self._slot.buffer(size)
        except OSError as error:
            self._gave_up(step, directory, error)
            return None
        copying = staging.buffer.store(tensors, layout)
        commit = None
        if metadata is not None:
            manifest = CheckpointManifest(
                run_id=self._config.run_id,
                step=step,
                world_size=self._control.world_size,
                config_digest=self._digest,
                next_sample=step * self._config.global_batch_size,
                attempt=self._attempt,
                files=(),
                created=time.time(),
            )
            replace = self._paths.checkpoint(step).name in self._catalog.replace
            commit = Commit(metadata, manifest, self._paths, self._config.keep_checkpoints, replace)
        job = Job(
            directory=directory,
            rank=self._control.rank,
            plan=plan,
            buffer=staging.path,
            size=size,
            layout=layout,
            deadline=self._config.save_timeout_seconds,
            commit=commit,
            storage=self._storage,
            staged=staging.buffer.flat if mode == "sync" else None,
        )
        return job, copying

    def _planned(self) -> tuple[SavePlan, Metadata | None, str]:
        """This rank's plan, on rank 0 the metadata, and a name common to all ranks; made once per process group."""
        if self._plan is None:
            planner = DefaultSavePlanner()
            planner.set_up_planner(dict(self._laid_out()[0]), is_coordinator=self._control.rank == 0)
            plans = self._control.gather((planner.create_local_plan(), os.urandom(4).hex()))
            merged, metadata = planner.create_global_plan([plan for plan, _ in plans])
            rank = self._control.rank
            plan = _with_prefix(merged[rank], rank)
            nonce = f"{self._attempt}-{plans[0][1]}"
            self._plan = (planner.finish_plan(plan), metadata if rank == 0 else None, nonce)
        return self._plan

    def finish(self) -> None:
        began = time.monotonic()
        with self._watch.phase(self._watch.limits.save * 1.5):
            while self._in_flight():
                time.sleep(0.005)
            self._control.all(True)
        self._events.emit("stall", step=self._slot.step, seconds=time.monotonic() - began, reason="drain")

    def close(self) -> None:
        """Nothing of an iteration is held here: the slot outlives it."""


def _with_prefix(plan: SavePlan, rank: int) -> SavePlan:
    """The plan with the file names of its rank, as torch's writer makes them from a global plan."""
    return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))
