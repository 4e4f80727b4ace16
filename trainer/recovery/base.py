"""What the training loop needs of a recovery mechanism, and the limits of time that all mechanisms share.

A mechanism is cut at one call: it runs the training function, and runs it again when it can. Everything a restart
needs (rank, world size, the step to resume from) is read afresh inside that function, so that the loop has no
branch for any mechanism, and ``combined`` is one mechanism around another.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.config import RunConfig
from trainer.errors import ConfigurationError

Train = Callable[[int], int]
"""The training function: takes the in-process iteration (0 at first), returns the last step."""


SHORTEST_STEP = 1.0
"""The least ``heartbeat_timeout_seconds``: some looks of each watchdog must fit."""

SHORTEST_STARTUP = 10.0
"""The in-process monitor waits so long for a sign of life of a process, and less than for the others at its barrier."""


@dataclass(frozen=True)
class Limits:
    """How long each phase may take, seconds. A slow save, load or compile must never be taken for a hang."""

    startup: float
    """Also of each try to load a checkpoint, and of the first step, which compiles: all three grow with the model."""
    step: float
    save: float
    soft: float
    """In-process: the rank is interrupted."""
    hard: float
    """In-process: the rank is killed."""
    in_job: float
    """ft_launcher: the rank is killed when no heartbeat came for so long."""
    collective: float
    """A collective of the process group."""
    stepping: float
    """The same once steps are under way: without a watchdog (recovery none) nothing else notices a hang."""

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        step = config.heartbeat_timeout_seconds
        in_process = config.recovery in ("in-process", "combined")
        collective = max(config.startup_timeout_seconds, config.save_timeout_seconds) + 60.0
        return cls(
            startup=config.startup_timeout_seconds,
            step=step,
            save=config.save_timeout_seconds,
            soft=step,
            hard=step + 1.0,
            in_job=step + 2.0 if in_process else step,
            collective=collective,
            stepping=step if config.recovery == "none" else collective,
        )

    @property
    def restart(self) -> float:
        """In-process: from a fault to the next entry, which takes a second or two."""
        return max(SHORTEST_STARTUP, 2 * self.hard)

    def check(self) -> None:
        """Refuse limits in a wrong order, before anything is started (``ConfigurationError``).

        A watchdog that is shorter than what it watches kills healthy ranks; a collective that gives up before the
        watchdogs hides from them who was stuck.
        """
        if self.step < SHORTEST_STEP:
            raise ConfigurationError(
                f"heartbeat_timeout_seconds {self.step:g} is below {SHORTEST_STEP:g}: "
                "the watchdogs look a few times a second, and would take healthy ranks for hung; raise it"
            )
        if max(self.hard, SHORTEST_STARTUP) >= self.startup:
            raise ConfigurationError(
                f"startup_timeout_seconds {self.startup:g} is not above heartbeat_timeout_seconds {self.step:g} + 1 and "
                f"{SHORTEST_STARTUP:g}: a rank that is still starting would be taken for hung; raise the first"
            )
        if self.save < self.step:
            raise ConfigurationError(
                f"save_timeout_seconds {self.save:g} is below heartbeat_timeout_seconds {self.step:g}: "
                "a save would be given up sooner than a step; raise the first"
            )


class Watch:
    """Tells the watchdogs that this process is alive, as long as its phase is within its limit.

    In a step only the loop has it beaten, once a step. In every other phase a thread beats until the phase's limit,
    so that the watchdogs, which know one timeout, become aware of phases. A stopped process, or one stuck in C with
    the interpreter's lock, beats in no phase.

    It is the thread that beats for the loop too: a restart raises its exception in the main thread wherever that is, and half a
    message would be the end of the connection to a watchdog.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._beats: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._deadline = 0.0
        self._interval = min(1.0, limits.step / 5)
        self._closed = False
        self._asked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # (one call, which no exception can leave half done)
        self._thread = threading.Thread(target=self._keep, name="watch", daemon=True)

    def start(self) -> None:
        self.enter(self.limits.startup)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        os.eventfd_write(self._asked, 1)

    def add(self, beat: Callable[[], None]) -> None:
        with self._lock:
            self._beats.append(beat)

    def remove(self, beat: Callable[[], None]) -> None:
        with self._lock:
            if beat in self._beats:
                self._beats.remove(beat)

    def beat(self) -> None:
        """One sign of life to every watchdog."""
        with self._lock:
            beats = list(self._beats)
            for beat in beats:
                beat()

    def step(self) -> None:
        """A step begins: one sign of life, and from now on only the loop gives them."""
        self._deadline = 0.0
        os.eventfd_write(self._asked, 1)

    def enter(self, limit: float) -> None:
        """A phase other than a step begins; it may take ``limit`` seconds."""
        self._deadline = time.monotonic() + limit

    @contextmanager
    def phase(self, limit: float) -> Iterator[None]:
        """A phase inside a step, such as a save: may take ``limit`` seconds, then the step's clock starts anew. A longer phase
        that it lies in, such as the first step, goes on."""
        around = self._deadline
        self._deadline = max(around, time.monotonic() + limit)
        try:
            yield
        finally:
            if around > time.monotonic():
                self._deadline = around
            else:
                self.step()

    def _keep(self) -> None:
        while True:
            asked, _, _ = select.select([self._asked], [], [], self._interval)
            if asked:
                os.eventfd_read(self._asked)
            if self._closed:
                return
            now, deadline = time.monotonic(), self._deadline
            if asked or now < deadline:
                try:
                    self.beat()
                except Exception as error:  # nobody would notice if this process hung
                    self._end(f"has lost a watchdog ({type(error).__name__}: {error})")
            elif deadline and now > deadline + 2 * self.limits.hard:
                # Whatever watchdog there is had its time. The last resort, for a restart that never ends.
                self._end("has outlived the limit of its phase")

    @staticmethod
    def _end(why: str) -> None:
        """The layer above takes over a dead process, not one that waits."""
        os.write(2, f"this process {why}, and ends itself\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def await_end(pid: int, seconds: float) -> None:
    """Return when the process has given back what it had (it is gone), or is not to be waited for any longer."""
    deadline = time.monotonic() + seconds
    while pid and Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


class Spent(Exception):
    """Restarts within this process get nowhere; the launcher may start a new one."""


class Recovery(Protocol):
    """Runs the training function until it has returned, or raises what only the layer above can handle."""

    def run(self, train: Train) -> int: ...
