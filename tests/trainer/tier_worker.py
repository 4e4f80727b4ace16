"""One rank that saves and loads a sharded state on command, for the tests of the checkpoint tiers. Not a test.

It is forked from a real fork server (``tier_world``), so the tiers, their writer processes and the process groups are
the ones that training uses. Commands and answers are JSON lines on one socket.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer import environment
from trainer.checkpointing import Completed, DurableTier, SnapshotTier, Tiers, TrainingState
from trainer.checkpointing.transfer import Copying
from trainer.errors import PipelineError, code_of
from trainer.events import EventLog
from trainer.loop import Session, build_tiers
from trainer.model import ModelConfig
from trainer.optim import build_optimizer
from trainer.parallel import prepare
from trainer.paths import RunPaths
from trainer.records import RunRecord
from trainer.recovery.base import Limits, Watch
from trainer.rendezvous import Control, Meeting


class Whole(Protocol):
    """A tensor that can be gathered from all ranks."""

    def full_tensor(self) -> Tensor: ...


def shape(width: int) -> ModelConfig:
    """Two small blocks; the bytes of a checkpoint grow with ``width``."""
    return ModelConfig(dim=width, layers=2, heads=4, kv_heads=2, ffn_dim=2 * width, vocabulary_size=256)


@dataclass
class Rank:
    """What one rank holds; every public method is a command."""

    session: Session
    width: int
    iteration: int = -1
    control: Control = field(init=False)
    state: TrainingState = field(init=False)
    tiers: Tiers = field(init=False)

    def enter(self) -> int:
        """Join the next process groups and make model, optimizer and tiers anew, as an in-process restart does."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.iteration += 1
        env = self.session.env
        self.session.events.update(rank=env.rank, world_size=env.world_size, iteration=self.iteration)
        self.control = self.session.meeting.join(env, torch.device("cpu"), self.iteration)
        model = prepare(shape(self.width), torch.device("cpu"))
        self.state = TrainingState(model, build_optimizer(model, self.session.record.config))
        self.tiers = build_tiers(self.session, self.control, self.state)
        return self.iteration

    def fill(self, step: int) -> None:
        """Give every tensor the values that belong to ``step``: the same ones at every world size."""
        for name, tensor in self.state.tensors().items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{step}".encode()))
            whole = torch.rand(tuple(tensor.shape), generator=generator)
            if isinstance(tensor, DTensor):
                local_shape, offset = compute_local_shape_and_global_offset(
                    tensor.shape, tensor.device_mesh, tensor.placements
                )
                for dimension, (length, start) in enumerate(zip(local_shape, offset, strict=True)):
                    whole = whole.narrow(dimension, min(start, whole.shape[dimension]), length)
                tensor.to_local().copy_(whole)
            else:
                tensor.copy_(whole if whole.ndim else whole + step)

    def spoil(self) -> None:
        """Overwrite every tensor in place, AdamW's step included."""
        for tensor in self.state.tensors().values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1.0)

    def save(self, step: int, *, last: bool = False, stopping: bool = False, spoil: bool = False) -> float:
        """What the loop does after a step; returns the seconds that it waited."""
        busy = self.control.sum(float(self.tiers.busy(step)))[0] > 0
        began = time.monotonic()
        self.tiers.after_step(Completed(step, busy, last, stopping))
        if spoil:
            self.spoil()
        return time.monotonic() - began

    def half_a_save(self, step: int, ranks: list[int]) -> None:
        """Only these ranks come to save: the others were thrown out of the step by a restart."""
        if self.control.rank in ranks:
            self.tiers.after_step(Completed(step, busy=False, last=False, stopping=False))

    def save_cost(self, step: int) -> float:
        """Save, as the loop does; returns the seconds of processor time that it cost the loop's thread."""
        began = time.thread_time()
        self.save(step)
        return time.thread_time() - began

    def save_alone(self, step: int, ranks: list[int]) -> None:
        """Only these ranks come to take their snapshot of a step that all have agreed on."""
        self.control.sum(float(self.tiers.busy(step)))
        if self.control.rank in ranks:
            self.tiers.after_step(Completed(step, busy=False, last=False, stopping=False))

    def join(self) -> None:
        """Wait until the newest snapshot is sealed."""
        for tier in self.tiers._tiers.values():
            if isinstance(tier, SnapshotTier):
                tier.finish()

    def train_on(self, first: int, last: int) -> None:
        """Like ``train``, but slowly enough that no save is skipped, and nobody knows that it ends."""
        for step in range(first, last + 1):
            self.fill(step)
            self.save(step)
            self.settle()

    def train(self, first: int, last: int, pause: float = 0.0) -> int:
        """Steps in a row, each with its own values, saved as the configuration says."""
        for step in range(first, last + 1):
            self.fill(step)
            self.save(step, last=step == last)
            if pause:
                time.sleep(pause)
        return last

    def sever_beside_a_store(self) -> list[int]:
        """Join process groups while others connect to a store; then sever. How many connected, how many still are, and
        whether gloo raises."""
        meeting = self.session.meeting
        # (kept: its end would end the other rank's connections, which nobody accepts)
        self.listener = socket.create_server(("", 0), backlog=1000) if self.control.rank == 0 else None
        port = meeting.share_port(self.listener.getsockname()[1] if self.listener else 0)
        connections: list[socket.socket] = []
        ended = threading.Event()

        def connect() -> None:
            while not (ended.wait(0.002) and connections):
                connections.append(socket.create_connection(("localhost", port)))

        thread = threading.Thread(target=connect)
        thread.start()
        try:
            self.enter()
        finally:
            ended.set()
            thread.join()
        meeting.sever()
        alive = 0
        for connection in connections:
            with suppress(OSError):
                connection.sendall(b"?")
                alive += 1
        try:
            self.control.sum(1.0)
        except RuntimeError:
            return [len(connections), alive, True]
        return [len(connections), alive, False]

    def settle(self, seconds: float = 30.0) -> bool:
        """Poll as the loop does until no save is in flight on this rank; whether that came in time."""
        deadline = time.monotonic() + seconds
        while self.tiers.busy(0):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def finish(self) -> None:
        self.tiers.finish()

    def resume(self) -> list[Any]:
        """The step and the tier that were loaded."""
        return list(self.tiers.resume())

    def restart_at_the_end_of_saves(self, first: int, last: int, stride: int) -> list[str]:
        """Saves one after another; while the end of each is read, a restart comes at the next bytecode but ``stride``. Where a save
        was taken to be in flight for ever after, or what came of it was an error."""
        bad: list[str] = []
        for step in range(first, last):
            self.save(step)
            while not self.session.paths.checkpoint(step).exists():
                time.sleep(0.002)
            time.sleep(0.01)  # (the answer is there)
            where = restarted(lambda step=step: self.tiers.busy(step), (step - first) * stride + 1)  # type: ignore[misc]
            self.tiers = build_tiers(self.session, self.control, self.state)
            try:
                self.tiers.resume()
                if not self.settle(1.0):
                    bad.append(f"in flight for ever: {where}")
            except Exception as error:
                bad.append(f"{type(error).__name__}: {error}: {where}")
            if not where:
                return bad
        return [*bad, "the end of a save has more bytecodes than that"]

    def break_copy(self, step: int) -> None:
        """A save is under way whose copy has failed, as one from a GPU can."""
        tier = cast(DurableTier, self.tiers._tiers["durable"])
        staged = tier._stage(step, "async")
        assert staged is not None
        slot, failed = tier._slot, Future[None]()
        failed.set_exception(RuntimeError("nothing to pin"))
        slot.in_flight, slot.step, slot.started, slot.scheduled = staged[0], step, time.monotonic(), ""
        slot.copying = Copying([failed])

    def limit_files(self, size: int, ranks: list[int]) -> None:
        """From now on no file of these ranks, in memory or not, may be larger than ``size`` bytes (-1: any)."""
        if self.control.rank in ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def fork_at(self, address: str, ranks: list[int]) -> str:
        """The address of these ranks' fork server; returns what it was."""
        before = os.environ[environment.FORK_SERVER]
        if self.control.rank in ranks:
            os.environ[environment.FORK_SERVER] = address
        return before

    def load_without_descriptors(self, step: int) -> bool:
        """Load a checkpoint while this process cannot open any file."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
        return self.tiers._tiers["durable"].load(step)

    def digest(self) -> str:
        """Over the whole state, gathered from all ranks: the same on each."""
        total = hashlib.sha256()
        for name, tensor in sorted(self.state.tensors().items()):
            whole = cast(Whole, tensor).full_tensor() if isinstance(tensor, DTensor) else tensor
            total.update(name.encode() + whole.contiguous().numpy().tobytes())
        return total.hexdigest()

    def memory(self) -> int:
        """Resident bytes of this process."""
        return int(psutil.Process().memory_info().rss)

    def leave(self) -> None:
        """End without a word to anybody."""
        os._exit(0)


class Restart(BaseException):
    """What NVRx raises in the main thread, wherever that is."""


def restarted(call: Callable[[], object], number: int) -> str:
    """``call()``, with a restart at its ``number``-th bytecode in what saves and what that uses of NVRx. Where that was; nothing if it
    has fewer."""
    count, where = 0, ""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count, where
        if not frame.f_code.co_filename.endswith(("durable.py", "writer.py", "async_ckpt/core.py")):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if count == number and not where:
            where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
            sys.settrace(None)
            raise Restart
        return trace

    sys.settrace(trace)
    with suppress(Restart):
        call()
    sys.settrace(None)
    return where


def main(descriptor: int) -> int:
    channel = socket.socket(fileno=descriptor)
    env = environment.read()
    paths = RunPaths(env.run_directory.parent.parent, env.run_directory.name)
    record = RunRecord.read(paths.record)
    events = EventLog(
        paths.events, paths.run_id, "trainer", attempt=env.attempt, rank=env.rank, world_size=env.world_size
    )
    torch.set_num_threads(1)
    watch = Watch(Limits.of(record.config))
    watch.start()
    rank = Rank(Session(env, record, paths, events, watch, Meeting(env, 60)), int(sys.argv[1]))
    reader = channel.makefile("r")
    channel.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    for line in reader:
        wanted = json.loads(line)
        try:
            answer: dict[str, Any] = {"value": getattr(rank, wanted["command"])(**wanted["arguments"])}
        except PipelineError as error:
            answer = {"error": str(error), "code": code_of(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "code": 1}
        channel.sendall(json.dumps(answer).encode() + b"\n")
    return 0
