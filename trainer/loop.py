"""The worker: one process of one rank. ``main`` is its entry, ``Session.train`` the one training loop.

    main: environment, run.json, event file, watch  ->  recovery.run(session.train)  ->  outcome file, exit code

``train`` is called once, and again after each in-process restart. It reads rank and world size afresh and then:

1. joins the process groups of this iteration, builds the sharded model on the meta device and its optimizer,
2. loads the newest step that all ranks can load, or draws the weights,
3. for every step: batch by f(seed, step) -> forward, backward -> clip -> agree -> update -> save,
4. waits for the last save.

What can outlive a restart inside the process is in ``Session``: the mapped dataset, compiled code, the staging and
snapshot buffers, the writer process.

Agreement (over gloo, ``Control.sum``) comes after the gradients of a step are reduced and before the update: the
loss, whether a number was not finite, whether to stop, whether a save is in flight. A step counts as completed on
this rank only after that, so a survivor of an abort can never complete a step that a peer did not reach.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from trainer import environment
from trainer.errors import DefectError, StoppedError
from trainer.events import EventLog
from trainer.outcome import record_outcome
from trainer.paths import MANIFEST, RunPaths
from trainer.progress import Ledger, newest_attempt
from trainer.records import RunRecord
from trainer.recovery.base import Limits, Spent, Watch, await_end

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.checkpointing import Tiers, TrainingState
    from trainer.clock import ComputeClock
    from trainer.data import TokenDataset
    from trainer.faults import Injector
    from trainer.rendezvous import Control, Meeting

T = TypeVar("T")

FRUITLESS_IN_PROCESS = 2
"""Restarts in a row that advanced nothing after which the one above an in-process restart is tried: what is wrong with this
process, a new one is without."""
NON_FINITE_LIMIT = 3
"""Steps in a row without a finite loss and gradient after which a run stops."""


@dataclass
class Session:
    """One worker process: what its iterations share."""

    env: environment.WorkerEnvironment
    record: RunRecord
    paths: RunPaths
    events: EventLog
    watch: Watch
    meeting: Meeting
    last_step: int = 0
    kept: dict[str, object] = field(default_factory=dict)
    """What an iteration made and the next can use again, by name."""

    def train(self, iteration: int) -> int:
        """Train from the newest resumable step to the last; returns the last. Raises what a restart is for."""
        self.env = env = environment.read(local_rank=self.env.local_rank)
        self.watch.enter(self.watch.limits.startup)
        self.events.update(rank=env.rank, world_size=env.world_size, iteration=iteration)
        self.events.emit("entry")
        if env.rank == 0 and iteration:  # (``main`` has counted the first)
            fruitless = self.ledger().enter(self.record.config.no_progress_restarts, env.world_size)
            if fruitless >= FRUITLESS_IN_PROCESS and self.record.config.recovery == "combined":
                raise Spent(f"{fruitless} restarts in a row got no further; a new process may")
        newest = newest_attempt(self.paths)
        if newest > env.attempt:
            self.events.emit("fenced", newest=newest)
            raise StoppedError(f"attempt {newest} of this run has started, this is attempt {env.attempt}")
        from trainer.parallel import choose_device

        device = choose_device()
        control = self.meeting.join(env, device, iteration)
        self.events.emit("process_group_ready")
        if not iteration:
            await_end(environment.predecessor(), self.watch.limits.in_job)
        self.meeting.connect_gpus(device)
        run = Iteration.build(self, control)
        self.events.emit("model_ready")
        run.resume()
        self.meeting.connected()
        return run.steps()

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` made for the first iteration that asked for ``name``."""
        if name not in self.kept:
            self.kept[name] = make()
        return cast(T, self.kept[name])

    def ledger(self) -> Ledger:
        return self.keep("ledger", lambda: Ledger(self.paths))


@dataclass(frozen=True)
class Batch:
    """What a rank trains on in one step."""

    step: int
    ids: list[int]
    tokens: list[Tensor]
    """For each micro-batch its samples (B, T)."""


@dataclass
class Iteration:
    """One pass through the training function: everything in it belongs to one set of process groups."""

    session: Session
    control: Control
    dataset: TokenDataset
    state: TrainingState
    tiers: Tiers
    clock: ComputeClock | None = None
    ahead: Batch | None = None
    """The batch of the next step."""
    start: int = 0
    non_finite: int = 0

    @classmethod
    def build(cls, session: Session, control: Control) -> Iteration:
        """Model, optimizer and tiers on the process groups that ``control`` belongs to."""
        import torch

        from trainer.checkpointing import TrainingState
        from trainer.clock import ComputeClock
        from trainer.data import TokenDataset
        from trainer.model import model_config
        from trainer.optim import build_optimizer
        from trainer.parallel import choose_device, pin_threads, prepare, ready_compilers
        from trainer.records import DatasetManifest

        config = session.record.config
        pin_threads(session.env.local_world_size)
        directory = Path(session.record.dataset)
        dataset = session.keep("dataset", lambda: TokenDataset(directory, config.sequence_length))
        manifest = session.keep("manifest", lambda: DatasetManifest.read(directory / MANIFEST))
        torch.manual_seed(config.seed)
        if config.compile:
            session.keep("compilers", lambda: ready_compilers(restarted=session.env.cycle > 0))
        model = prepare(
            model_config(config.model, manifest.vocabulary_size),
            choose_device(),
            compile_blocks=config.compile,
            recompute=config.activation_checkpointing,
        )
        state = TrainingState(model, build_optimizer(model, config))
        clock = None if config.compile else ComputeClock(model)  # (hooks would cut what is compiled)
        return cls(session, control, dataset, state, build_tiers(session, control, state), clock)

    def resume(self) -> None:
        """The newest step that every rank can load, or the initial weights."""
        from trainer.model import Transformer, init_weights
        from trainer.optim import local
        from trainer.pretrained import load_hugging_face

        session, config = self.session, self.session.record.config
        session.watch.enter(session.watch.limits.startup)
        self.start, tier = self.tiers.resume()
        if self.start == 0:
            assert isinstance(self.state.model, Transformer)
            for tensor in self.state.tensors().values():  # a load that failed on one rank has left its values on another
                local(tensor).zero_()
            init_weights(self.state.model, config.seed)
            if config.init_from:
                load_hugging_face(self.state.model, Path(config.init_from))
        session.last_step = self.start
        session.events.emit("loaded", step=self.start, tier=tier, path="")

    def steps(self) -> int:
        """Run the steps after ``start``; returns ``max_steps``."""
        from trainer.faults import Injector

        session, config, limits = self.session, self.session.record.config, self.session.watch.limits
        injector = Injector(config, session.paths, self.control.rank, session.events)
        first = True
        for step in range(self.start + 1, config.max_steps + 1):
            if first:
                session.watch.enter(limits.startup)
            else:
                session.watch.step()
            self.step(step, injector)
            if first and limits.stepping < limits.collective:
                session.meeting.limit_collectives(limits.stepping)
            first = False
        session.watch.enter(session.watch.limits.save)
        self.tiers.finish()
        if self.control.rank == 0:
            session.events.emit("finished", step=config.max_steps)
        return config.max_steps

    def step(self, step: int, injector: Injector) -> None:
        """One optimizer step, all ranks together, then the saves that are due."""
        from trainer.checkpointing import Completed
        from trainer.model import Transformer
        from trainer.optim import apply_learning_rate, clip_gradients
        from trainer.parallel import choose_device, forward_backward

        session, config, events = self.session, self.session.record.config, self.session.events
        model, optimizer, control = self.state.model, self.state.optimizer, self.control
        assert isinstance(model, Transformer)
        events.emit("step_start", step=step)
        began = time.monotonic()
        batch = self.ahead if self.ahead and self.ahead.step == step else self.batch(step)
        events.emit("samples", step=step, ids=batch.ids)
        device = choose_device()
        loss = forward_backward(model, [tokens_BT.to(device, non_blocking=True) for tokens_BT in batch.tokens])
        own_seconds = time.monotonic() - began
        # A GPU is busy until the norm is there: what the host has to do besides is done meanwhile.
        saving = self.tiers.busy(step)
        self.ahead = self.batch(step + 1) if step < config.max_steps else None
        injector.maybe_fire(step)
        norm = clip_gradients(model, config.gradient_clip)
        mine = float(loss)
        finite = math.isfinite(mine) and math.isfinite(norm)
        stop = session.paths.stop_file(session.env.attempt, session.env.node, session.env.pod).exists()
        total, bad, stopping, busy, _ = control.sum(
            mine if finite else 0.0, float(not finite), float(stop), float(saving), float(step)
        )
        completed = Completed(step, busy > 0, step == config.max_steps, stopping > 0)
        if bad:
            self._not_finite(step, mine, norm, completed.last)
            optimizer.zero_grad(set_to_none=True)
        else:
            self.non_finite = 0
            rate = apply_learning_rate(optimizer, step, config)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            events.emit(
                "step_end",
                step=step,
                loss=total / control.world_size,
                grad_norm=norm,
                tokens=config.global_batch_size * config.sequence_length,
                learning_rate=rate,
                compute_seconds=self.clock.take() if self.clock else own_seconds,
            )
        self._note(step, total / control.world_size, time.monotonic() - began)
        if not bad:
            self.tiers.after_step(completed)
        if completed.stopping and not completed.last and not bad:  # (else at the next step that can be saved)
            events.emit("stop_requested", reason="stop file")
            raise StoppedError(f"stopped after step {step} as asked; a new attempt resumes there")

    def batch(self, step: int) -> Batch:
        """This rank's samples of ``step``, in memory that a GPU can copy from by itself."""
        from trainer.data import rank_batch, sample_ids

        config = self.session.record.config
        ids = sample_ids(config.seed, step, config.global_batch_size, self.dataset.samples)
        batches = rank_batch(ids, self.control.rank, self.control.world_size, config.micro_batch_size)
        tokens = [self.dataset.batch(batch) for batch in batches]
        if environment.has_gpu():
            tokens = [tokens_BT.pin_memory() for tokens_BT in tokens]
        return Batch(step, [index for batch in batches for index in batch], tokens)

    def _note(self, step: int, loss: float, seconds: float) -> None:
        """Rank 0 says how far the run is: in a file that the supervisor reads, and in a line for people."""
        session, config = self.session, self.session.record.config
        session.last_step = step
        if self.control.rank == 0:
            rate = config.global_batch_size * config.sequence_length / seconds
            session.ledger().completed(step, loss, rate)
            print(f"step {step}/{config.max_steps}  loss {loss:.4f}  {rate:,.0f} tokens/s", flush=True)

    def _not_finite(self, step: int, loss: float, norm: float, last: bool) -> None:
        """The update of this step is left out on every rank, and nothing of it is saved."""
        self.session.events.emit("non_finite", step=step, loss=repr(loss), grad_norm=repr(norm))
        self.non_finite += 1
        if self.non_finite >= NON_FINITE_LIMIT or last:
            raise DefectError(
                f"loss or gradient norm was not finite in {self.non_finite} steps in a row, last at step {step} "
                f"(loss {loss}, gradient norm {norm}); lower --learning-rate, or look at the data of these steps"
            )


def build_tiers(session: Session, control: Control, state: TrainingState) -> Tiers:
    """The tiers that the configuration asks for."""
    from trainer.checkpointing import (
        DurableTier,
        Peers,
        Replicator,
        SnapshotSlot,
        SnapshotTier,
        Tier,
        Tiers,
        WriterSlot,
    )

    config, tiers = session.record.config, dict[str, Tier]()
    if config.snapshot_interval_steps:
        slot = session.keep("snapshots", SnapshotSlot)
        directory = session.paths.snapshots(config.snapshot_root, session.env.node)
        env = session.env
        peers = Peers(session.paths, env.attempt, env.node) if config.nodes > 1 else None
        if config.snapshot_replicas and config.nodes > 1:
            peer = (env.node + 1) % config.nodes
            slot.replicator = session.keep(
                "replicator", lambda: Replicator(session.paths, env.attempt, peer, env.rank, session.events)
            )
        tiers["snapshot"] = SnapshotTier(
            session.record, directory, state, control, session.events, session.watch, slot, peers
        )
    if config.checkpoint_mode != "off":
        writer = session.keep("writer", lambda: WriterSlot(config.save_timeout_seconds))
        tiers["durable"] = DurableTier(
            session.record, session.paths, session.env.attempt, state, control, session.events, session.watch, writer
        )
    return Tiers(tiers)


def main() -> int:
    """The entry of a worker process. Leaves an outcome file, since launchers end with 1 whatever a worker said."""
    env = environment.read()
    run = env.run_directory
    paths = RunPaths(run.parent.parent, run.name)
    try:
        events = EventLog(
            paths.events, run.name, "trainer",
            attempt=env.attempt, node=env.node, pod=env.pod, cycle=env.cycle, rank=env.rank, world_size=env.world_size,
        )  # fmt: skip
        events.emit("process_start", spawned_at=env.spawned_at)
        divert_output(paths, env)
    except OSError as error:  # of the storage, and perhaps not for long
        print(f"rank {env.rank} could not begin: {error}", file=sys.stderr)
        return 1
    sessions: list[Session] = []

    def end(error: BaseException | None) -> int:
        return record_outcome(error, paths, env, events, sessions[0].last_step if sessions else -1)

    def leave(error: BaseException) -> NoReturn:
        """End this process where it stands: the outcome file tells the layer above all it needs."""
        os._exit(end(error))

    try:
        record = RunRecord.read(paths.record)
        kept: dict[str, object] = {}
        if env.rank == 0:
            kept["ledger"] = ledger = Ledger(paths)
            ledger.enter(record.config.no_progress_restarts, env.world_size)
        import torch

        from trainer.recovery import build
        from trainer.rendezvous import Meeting

        torch.use_deterministic_algorithms(mode=False)
        events.emit("imports_done")
        watch = Watch(Limits.of(record.config))
        watch.start()
        meeting = Meeting(env, watch.limits.collective)
        session = Session(env, record, paths, events, watch, meeting, kept=kept)
        sessions.append(session)
        build(record.config, watch, events, meeting, leave).run(session.train)
    except BaseException as error:
        return end(error)
    return end(None)


def divert_output(paths: RunPaths, env: environment.WorkerEnvironment) -> None:
    """Everything this process prints, libraries included, goes to its own log."""
    path = paths.log("train", env.attempt, env.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # `kill -USR1` shows where a process is stuck
