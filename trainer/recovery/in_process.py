"""In-process restart with NVRx's Wrapper: after an exception or a soft hang the function starts again in the process.

Cut of responsibilities:

1. An exception, or no progress for the soft timeout: every rank's monitor thread aborts the collectives and raises
   in its main thread; all ranks meet at a barrier, check their health, and enter the function again.
2. A rank stuck beyond the hard timeout is killed by its monitor process. As the world must stay whole (shrinking
   changes the result), the Wrapper then ends on all ranks and the launcher starts them again.
3. A killed rank, rank 0 (which hosts the store) included, is seen by the launcher in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.state import FrozenState

from trainer import environment
from trainer.config import RunConfig
from trainer.errors import PipelineError
from trainer.events import EventLog
from trainer.recovery.base import SHORTEST_STARTUP, Spent, Train, Watch
from trainer.rendezvous import Meeting, await_listener

INTERVAL = timedelta(seconds=0.1)
STORE_SECONDS = 120
"""How long a rank waits for the others at the Wrapper's store."""

Leave = Callable[[BaseException], NoReturn]
"""Says why this process ends, and ends it."""


class AbortCollectives(inprocess.abort.Abort):
    """Records the detection, unblocks the main thread from its collectives, and leaves the process groups.

    NVRx's AbortTorchDistributed aborts NCCL only; ``sever`` is for gloo, where a blocked rank would otherwise wait for
    the group's timeout.
    """

    def __init__(self, events: EventLog, watch: Watch, sever: Callable[[], None]) -> None:
        self._sever = sever
        self._events = events
        self._watch = watch
        self._nccl = inprocess.abort.AbortTorchDistributed()

    def __call__(self, state: FrozenState) -> FrozenState:
        self._watch.enter(self._watch.limits.restart)
        self._events.emit("fault_detected", layer="in_process", message="the restart of all ranks was asked for")
        self._sever()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                self._nccl(state)
        return state


class InProcess:
    """The Wrapper with its four timeouts, health checks, retry limits and rank assignment."""

    def __init__(self, config: RunConfig, watch: Watch, events: EventLog, meeting: Meeting, leave: Leave) -> None:
        self._config = config
        self._watch = watch
        self._events = events
        self._meeting = meeting
        self._leave = leave

    def _store(self) -> dict[str, Any]:
        """The Wrapper's store, on a port of its own: rank 0 picks it and tells the others."""
        return {
            "host_name": environment.read().master_address,
            "port": self._meeting.share_port(free_port()),
            "timeout": timedelta(seconds=STORE_SECONDS),
        }

    def run(self, train: Train) -> int:
        config, limits = self._config, self._watch.limits
        iterations = config.max_restarts
        env = environment.read()
        world = env.world_size  # whole, whatever it is: how many nodes take part is the launcher's to decide
        checks: list[inprocess.health_check.HealthCheck] = [inprocess.health_check.FaultCounter(iterations)]
        store = self._store()
        if environment.has_gpu():
            checks.insert(0, inprocess.health_check.CudaHealthCheck(timedelta(seconds=10)))
        else:
            environment.rewrite_for_cpu_wrapper()
        wrapper = inprocess.Wrapper(
            store_kwargs=store,
            initialize=inprocess.initialize.RetryController(
                max_iterations=iterations + 1, min_world_size=world, min_active_world_size=world
            ),
            abort=AbortCollectives(self._events, self._watch, self._meeting.sever),
            health_check=inprocess.Compose(*checks),
            rank_assignment=inprocess.Compose(
                inprocess.rank_assignment.ActivateAllRanks(), inprocess.rank_assignment.ShiftRanks()
            ),
            monitor_thread_interval=INTERVAL,
            monitor_process_interval=INTERVAL,
            heartbeat_interval=INTERVAL * 5,
            progress_watchdog_interval=INTERVAL * 2,
            soft_timeout=timedelta(seconds=limits.soft),
            hard_timeout=timedelta(seconds=limits.hard),
            heartbeat_timeout=timedelta(seconds=max(SHORTEST_STARTUP, limits.hard)),
            barrier_timeout=timedelta(seconds=limits.startup),
            completion_timeout=timedelta(seconds=limits.startup),
            last_call_wait=INTERVAL,
            termination_grace_time=timedelta(seconds=0.2),
        )
        if env.rank:
            await_listener(store["host_name"], store["port"], STORE_SECONDS)
        return int(wrapper(self._entry(train))())

    def _entry(self, train: Train) -> Callable[..., int]:
        watch, events = self._watch, self._events

        def entry(call: inprocess.CallWrapper = None) -> int:
            watch.add(call.ping)
            try:
                step = train(call.iteration)
                watch.enter(watch.limits.startup)
                return step
            except (PipelineError, Spent) as error:
                # The Wrapper would restart after it, or wait at a barrier for ranks that may never come. What no restart
                # can change is for the layer above, and at once.
                self._leave(error)
            except Exception as error:
                watch.enter(watch.limits.restart)
                events.emit("fault_detected", layer="in_process", message=f"{type(error).__name__}: {error}"[:500])
                raise
            finally:
                watch.remove(call.ping)

        entry.__annotations__["call"] = inprocess.CallWrapper
        return entry


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
