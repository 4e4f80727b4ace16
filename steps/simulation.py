"""Training through failures, simulated event by event for many runs at once (numpy).

Between two events training goes on undisturbed, so where it is at any time has a closed form: work up to the next save, then
cycles of a stall and an interval of work. One event is one pass over arrays that hold all runs, whatever the number of GPUs
and of steps. Times are seconds of wall clock, work is seconds of undisturbed training.

An event interrupts training for ``down`` seconds and takes it back to the newest snapshot, or (when those are lost with it)
to the newest durable checkpoint, which is then loaded. A storage event does not interrupt: for ``outage`` seconds nothing
becomes durable, what was being written is lost, and whoever must load waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
ROUNDING = 1e-9


@dataclass(frozen=True)
class Kind:
    """What an event does."""

    name: str
    down: float = 0.0
    """Detection and restart, without a load."""
    keeps_snapshots: bool = True
    outage: float = 0.0
    """Not 0: it is the storage that fails."""


@dataclass(frozen=True)
class Policy:
    """When training saves, and what that costs."""

    interval: float
    """Work between durable checkpoints; infinite: none."""
    stall: float
    """What training waits for one."""
    write: float
    """From a save's start until it is durable; a synchronous one is, at the end of its stall."""
    load: float
    snapshot_interval: float = 0.0
    """Work between snapshots; 0: none."""
    snapshot_stall: float = 0.0

    @property
    def pace(self) -> float:
        """Time that a second of work takes, snapshots included and durable saves not."""
        return 1 + (self.snapshot_stall / self.snapshot_interval if self.snapshot_interval else 0.0)

    @property
    def effective_interval(self) -> float:
        """A save that comes due while one is written is skipped: so the interval is at least as long as the writing."""
        return self.interval * max(1, ceil((self.write - self.stall) / (self.interval * self.pace) - ROUNDING))

    @property
    def cycle(self) -> float:
        """Time from one durable save to the next."""
        return self.effective_interval * self.pace + self.stall


@dataclass
class State:
    """All runs at their newest event: training goes on from ``work`` at time ``at``."""

    at: Array
    work: Array
    durable: Array
    snapshot: Array
    storage_back: Array
    """Until when the storage is away."""
    loading: npt.NDArray[np.bool_]
    lost: Array
    down: Array


@dataclass(frozen=True)
class Outcome:
    """What became of all runs; arrays with one value a run."""

    goodput: Array
    """Work that stood, over the time."""
    lost_share: Array
    down_share: Array
    stall_share: Array
    events: dict[str, float]
    """Kind -> mean number of events."""


def first_save(policy: Policy, work: Array) -> Array:
    """The work at which training from ``work`` saves first: nothing is being written at a start."""
    return (np.floor(work / policy.interval + ROUNDING) + 1) * policy.interval


def progress(policy: Policy, work: Array, elapsed: Array) -> tuple[Array, Array, Array]:
    """After ``elapsed`` seconds of training from ``work``: the work done, the first save's work and its time."""
    if policy.interval == inf:
        nowhere = np.full_like(work, inf)
        return work + elapsed / policy.pace, nowhere, nowhere
    tau = policy.effective_interval
    first = first_save(policy, work)
    first_at = (first - work) * policy.pace
    beyond = np.maximum(elapsed - first_at, 0.0)
    cycles = np.floor(beyond / policy.cycle)
    rest = beyond - cycles * policy.cycle
    after = first + cycles * tau + np.maximum(rest - policy.stall, 0.0) / policy.pace
    return np.where(elapsed <= first_at, work + elapsed / policy.pace, after), first, first_at


def saves_before(policy: Policy, work: Array, target: float) -> tuple[Array, Array]:
    """Training from ``work``: the number of saves before ``target``, and the work of the first."""
    if policy.interval == inf:
        return np.zeros_like(work), np.full_like(work, inf)
    first = first_save(policy, work)
    return np.maximum(np.ceil((target - first) / policy.effective_interval - ROUNDING), 0.0), first


def duration(policy: Policy, work: Array, target: float) -> Array:
    """The time that training takes from ``work`` to ``target``, the saves before it included."""
    saves, _ = saves_before(policy, work, target)
    return (target - work) * policy.pace + saves * policy.stall


def still_writing(policy: Policy, work: Array, target: float) -> Array:
    """For how long the last save before ``target`` is still being written then."""
    saves, first = saves_before(policy, work, target)
    begun = np.where(saves > 0, first + (saves - 1) * (policy.effective_interval if policy.interval != inf else 0.0), -inf)
    return np.maximum(policy.write - policy.stall - (target - begun) * policy.pace, 0.0)


def begin(runs: int, start: float = 0.0) -> State:
    """All runs at the beginning of training, with nothing saved."""
    zeros = [np.zeros(runs) for _ in range(6)]
    return State(np.full(runs, start), zeros[0], zeros[1], zeros[2], zeros[3], np.zeros(runs, dtype=bool), zeros[4], zeros[5])


def advance(state: State, policy: Policy, until: Array) -> Array:
    """Train up to ``until`` (not before ``at``): what is durable and in snapshots by then; returns the work done."""
    elapsed = np.maximum(until - state.at, 0.0)
    done, first, first_at = progress(policy, state.work, elapsed)
    if policy.interval != inf:
        newest = np.floor((elapsed - first_at - policy.write) / policy.cycle + ROUNDING)
        oldest = np.ceil(np.maximum(state.storage_back - state.at - first_at, 0.0) / policy.cycle - ROUNDING)
        written = (newest >= oldest) & (newest >= 0)
        state.durable = np.where(written, first + newest * policy.effective_interval, state.durable)
    if policy.snapshot_interval:
        taken = np.floor(done / policy.snapshot_interval + ROUNDING) * policy.snapshot_interval
        state.snapshot = np.maximum(state.snapshot, np.where(taken > state.work, taken, 0.0))
    return done


def strike(state: State, policy: Policy, at: Array, kind: npt.NDArray[np.int64], kinds: Sequence[Kind]) -> None:
    """One event in each run (none where ``at`` is infinite)."""
    real = np.isfinite(at)
    when = np.where(real, at, 0.0)
    training = real & (when > state.at)
    was = state.at
    done = np.where(training, advance(state, policy, np.where(training, when, state.at)), state.work)
    down = np.array([one.down for one in kinds])[kind]
    outage = np.array([one.outage for one in kinds])[kind]
    keeps = np.array([one.keeps_snapshots for one in kinds])[kind]
    storage = real & (outage > 0)
    fault = real & (outage == 0)

    state.storage_back = np.where(storage, np.maximum(state.storage_back, when + outage), state.storage_back)
    waits = storage & (when < state.at) & state.loading
    rebased = np.where(training, when, state.at)
    state.at = np.where(storage, np.where(waits, np.maximum(state.at, state.storage_back + policy.load), rebased), state.at)
    state.work = np.where(storage & training, done, state.work)

    usable = keeps & (state.snapshot >= state.durable) & (state.snapshot > 0)
    resume = np.where(usable, state.snapshot, state.durable)
    loads = ~usable & (resume > 0)
    ready = np.where(loads, np.maximum(when + down, state.storage_back) + policy.load, when + down)
    state.down = np.where(fault, state.down + ready - np.where(training, when, was), state.down)
    state.down = np.where(waits, state.down + state.at - was, state.down)
    state.lost = np.where(fault, state.lost + np.maximum(done - resume, 0.0), state.lost)
    state.snapshot = np.where(fault, np.where(usable, state.snapshot, 0.0), state.snapshot)
    state.work = np.where(fault, resume, state.work)
    state.loading = np.where(fault, loads, state.loading)
    state.at = np.where(fault, ready, state.at)


def simulate(
    policy: Policy, kinds: Sequence[Kind], times: Array, which: npt.NDArray[np.int64], horizon: float
) -> tuple[Outcome, State]:
    """All runs from 0 to ``horizon``. ``times`` (runs x events, rising, infinite where there are no more) and ``which``
    kind each event is of."""
    state = begin(times.shape[0])
    for number in range(times.shape[1]):
        strike(state, policy, np.where(times[:, number] < horizon, times[:, number], inf), which[:, number], kinds)
    over = np.full(times.shape[0], horizon)
    state.down -= np.maximum(state.at - over, 0.0)
    done = advance(state, policy, over)
    shares = [share / horizon for share in (done, state.lost, state.down)]
    within = times < horizon
    counts = {kind.name: float(((which == index) & within).sum(axis=1).mean()) for index, kind in enumerate(kinds)}
    return Outcome(shares[0], shares[1], shares[2], 1 - shares[0] - shares[1] - shares[2], counts), state


def poisson_events(
    rates: Sequence[float], horizon: float, runs: int, seed: int
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Events of independent kinds, ``rates`` a second, in time order: ``times`` and ``which`` of ``simulate``.

    Failures of many parts, each memoryless, are one such process with the sum of their rates.
    """
    draw = np.random.default_rng(seed)
    counts = draw.poisson(np.asarray(rates) * horizon, size=(runs, len(rates)))
    most = int(counts.sum(axis=1).max(initial=0))
    times = np.full((runs, most), inf)
    which = np.zeros((runs, most), dtype=np.int64)
    for run in range(runs):
        kinds = np.repeat(np.arange(len(rates)), counts[run])
        at = draw.uniform(0.0, horizon, size=kinds.size)
        order = np.argsort(at)
        times[run, : kinds.size], which[run, : kinds.size] = at[order], kinds[order]
    return times, which
