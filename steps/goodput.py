"""Events of a run -> exclusive intervals of its wall time, its faults and what they cost, and its pace (pure).

The wall runs from the first launcher's start to the later of the last step's end and the last commit, over all attempts.
Each moment of it belongs to one category:

    startup           until the first step, and again after a stop that the user asked for
    productive        a step's execution that was never rolled back: from the end of the step before (or its start, when it
                      is the first after a restart) to its last rank's end, less the stalls in it
    replay            executions that were rolled back, and interrupted ones up to the fault
    checkpoint_stall  any rank waited for a save; the last drain included
    detection         a fault until a layer noticed it
    recovery          from there until the next step's start
    other             what none of these explains

A step is completed when all ranks of its world ended it. The time between a user's own stop and the next launcher's start
is cut out. How several hosts' clocks become one is said in ``steps.history``, what an incident is in ``steps.incidents``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Literal

from steps.history import Fact, Stall, World, aligned, worlds
from steps.incidents import Gap, Incident, fault_report, gaps, incidents_of, restarts
from steps.ledger import (
    DURABLE,
    SNAPSHOT,
    committed_steps_lost,
    continuity,
    tier_report,
    trained_samples,
    whole_commits,
)
from trainer.events import Event
from trainer.records import (
    Breakdown,
    CommitPoint,
    DataContinuity,
    FaultReport,
    Interval,
    LossPoint,
    Restarts,
    Straggler,
    Throughput,
    TierReport,
)

Category = Literal["startup", "productive", "replay", "checkpoint_stall", "detection", "recovery", "other"]

STRAGGLER_RATIO = 1.2
"""A rank whose median step takes this many times the median of all is named in the report."""

STEP_EVENTS = frozenset({"step_start", "step_end", "samples", "stall", "save_start"})
"""What a world has already counted, and no incident is made of."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the records say of a run, as far as the numbers depend on it."""

    max_steps: int
    global_batch_size: int
    ranks_per_node: int = 1
    samples: int | None = None
    """Training samples in the dataset, if known."""
    flops_per_token: float | None = None
    peak_flops: float | None = None
    """Of one GPU."""
    bare_step_seconds: float | None = None
    """Median step of a run without checkpoints, faults or restart layers."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything that follows from the events; the fields are those of ``RunReport``."""

    started: float
    steps_completed: int
    replayed_steps: int
    wall_seconds: float
    breakdown: Breakdown
    training_goodput: float
    infrastructure_goodput: float
    effective_goodput: float | None
    faults: tuple[FaultReport, ...]
    lost_steps: int
    committed_steps_lost: int
    restarts: Restarts
    checkpoints: TierReport
    snapshots: TierReport
    throughput: Throughput
    final_loss: float | None
    last_commit: int
    data_continuity: DataContinuity
    stragglers: tuple[Straggler, ...]
    timeline: tuple[Interval, ...]
    losses: tuple[LossPoint, ...]
    commits: tuple[CommitPoint, ...]


@dataclass(slots=True)
class Tape:
    """The wall time as it is being cut into pieces, in order and without holes."""

    at: float
    pieces: list[tuple[Category, float, float, int]] = field(default_factory=list)
    cuts: list[tuple[float, float]] = field(default_factory=list)

    def until(self, end: float, category: Category, step: int = -1, stalls: Sequence[Stall] = ()) -> None:
        """Go on to ``end``: ``category``, but for the stalls in it."""
        for stall in merged(stalls):
            self._piece(min(stall.start, end), category, step)
            self._piece(min(stall.end, end), "checkpoint_stall", step)
        self._piece(end, category, step)

    def cut(self, end: float) -> None:
        if end > self.at:
            self.cuts.append((self.at, end))
            self.at = end

    def _piece(self, end: float, category: Category, step: int) -> None:
        if end > self.at:
            self.pieces.append((category, self.at, end, step))
            self.at = end


def merged(stalls: Sequence[Stall]) -> list[Stall]:
    """Stalls of several ranks as stretches that do not overlap, in order."""
    found: list[Stall] = []
    for stall in sorted(stalls, key=lambda s: s.start):
        if found and stall.start <= found[-1].end:
            if stall.end > found[-1].end:
                found[-1] = Stall(found[-1].start, stall.end, stall.step, stall.rank, stall.reason)
        else:
            found.append(stall)
    return found


def analyse(events: Iterable[Event], expected: Expectation) -> Analysis:
    """All numbers of a run. A run that never began a step has zeros; one that is unfinished is counted as far as it got."""
    facts = aligned(events)
    found = worlds(facts)
    executed = [world for world in found if world.executed]
    start, end = _wall(facts, executed)
    durations = _step_seconds(executed)
    pace = median(durations) if durations else 0.0
    incidents, tape = _cut_up(facts, found, executed, (start, end), pace, expected)
    standing = standing_executions(executed)
    breakdown = _breakdown(tape)
    wall = end - start - sum(until - at for at, until in tape.cuts)
    completed = max(standing, default=0)
    faults = tuple(fault_report(i, _elapsed(i.at, tape, start)) for i in incidents if not i.user_stop)
    commits = whole_commits(found)
    bare = expected.bare_step_seconds
    return Analysis(
        started=start,
        steps_completed=completed,
        replayed_steps=replayed_steps(executed),
        wall_seconds=wall,
        breakdown=breakdown,
        training_goodput=breakdown.productive / wall if wall else 0.0,
        infrastructure_goodput=1 - (breakdown.detection + breakdown.recovery) / wall if wall else 0.0,
        effective_goodput=completed * bare / wall if bare is not None and wall else None,
        faults=faults,
        lost_steps=sum(fault.lost_steps for fault in faults),
        committed_steps_lost=committed_steps_lost(executed),
        restarts=restarts(found, facts),
        checkpoints=tier_report(DURABLE, found, facts),
        snapshots=tier_report(SNAPSHOT, found, facts),
        throughput=_throughput(standing, breakdown.productive, tape, executed, expected),
        final_loss=_finite(standing[completed].losses.get(completed)) if completed else None,
        last_commit=max((step for _, tier, step in commits if tier == DURABLE), default=0),
        data_continuity=continuity(trained_samples(standing), completed, expected.global_batch_size, expected.samples),
        stragglers=_stragglers(executed),
        timeline=_timeline(tape, start),
        losses=_losses(executed, tape, start),
        commits=tuple(CommitPoint(step=step, time=_elapsed(at, tape, start), tier=tier) for at, tier, step in commits),
    )


def _wall(facts: Sequence[Fact], executed: Sequence[World]) -> tuple[float, float]:
    """First launcher start, and the later of the last step's end and the last commit (or the last fact, if no step ran)."""
    if not facts:
        return 0.0, 0.0
    start = next((fact.at for fact in facts if fact.name == "launcher_start"), facts[0].at)
    if not executed:
        return start, max(start, facts[-1].at)
    ends = [at for world in executed for at in (world.last_end, *world.ends.values())]
    return start, max([start, *ends, *(fact.at for fact in facts if fact.name == "commit")])


def standing_bounds(executed: Sequence[World]) -> list[int]:
    """For each world, the highest step that no later world went below: executions up to it stood."""
    bounds: list[int] = []
    lowest: int | None = None
    for world in reversed(executed):
        bounds.append(world.completed if lowest is None else min(world.completed, lowest))
        lowest = world.resumed if lowest is None else min(lowest, world.resumed)
    return bounds[::-1]


def standing_executions(executed: Sequence[World]) -> dict[int, World]:
    """Step -> the world whose execution of it was never rolled back."""
    return {
        step: world
        for world, bound in zip(executed, standing_bounds(executed), strict=True)
        for step in range(world.resumed + 1, bound + 1)
    }


def replayed_steps(executed: Sequence[World]) -> int:
    """Executions that were rolled back, the interrupted ones included (of the last world none is known to be)."""
    rolled_back = sum(w.completed - max(b, w.resumed) for w, b in zip(executed, standing_bounds(executed), strict=True))
    return rolled_back + sum(world.interrupted for world in executed[:-1])


def _cut_up(
    facts: Sequence[Fact],
    found: Sequence[World],
    executed: Sequence[World],
    wall: tuple[float, float],
    pace: float,
    expected: Expectation,
) -> tuple[list[Incident], Tape]:
    """Go along the wall time: gap, steps of a world, gap, ... and say of each piece what it was."""
    notable = [fact for fact in facts if fact.name not in STEP_EVENTS]
    bounds = standing_bounds(executed)
    incidents: list[Incident] = []
    tape = Tape(wall[0])
    since = float("-inf")
    for number, gap in enumerate(gaps(executed, *wall)):
        if gap.before is not None:
            _steps(tape, gap.before, bounds[number - 1])
        # What ended a run is noticed after its last step, and so after its wall time.
        here = [fact for fact in notable if since < fact.at and (fact.at <= gap.end or gap.after is None)]
        own = incidents_of(gap, here, found, pace, expected.ranks_per_node)
        _gap(tape, gap, own, expected.max_steps)
        incidents += own
        since = gap.end
    return incidents, tape


def _steps(tape: Tape, world: World, bound: int) -> None:
    """The completed steps of a world."""
    stalls = sorted(world.stalls, key=lambda s: s.end)
    at = 0
    for step in range(world.resumed + 1, world.completed + 1):
        end = world.ends.get(step)
        if end is None:
            continue
        first = at
        while at < len(stalls) and stalls[at].end <= end:
            at += 1
        # A stall is told when it is over: one that is told later, of another rank, may have begun here.
        inside = [s for s in stalls[first : at + world.size] if s.start < end]
        tape.until(end, "productive" if step <= bound else "replay", step, inside)


def _gap(tape: Tape, gap: Gap, incidents: Sequence[Incident], max_steps: int) -> None:
    """What lies between the last completed step of a world and the next one's first step (or the end)."""
    first = incidents[0].at if incidents else gap.end
    before = gap.before
    if before is None:
        tape.until(first, "startup")
    elif before.interrupted and gap.after is None and not incidents:
        tape.until(first, "other")  # a step that is going on, as far as some ranks have told
    elif before.interrupted and not (incidents and incidents[0].kind == "stop"):
        tape.until(first, "replay", before.completed + 1, [s for s in before.stalls if s.end > gap.start and s.start < first])
    else:
        # Nothing ran but the last saves: at the end of training, or because the run was asked to stop.
        saving = before.completed >= max_steps or gap.after is None or any(i.kind == "stop" for i in incidents[:1])
        tape.until(first, "checkpoint_stall" if saving else "replay", before.completed)
    for number, incident in enumerate(incidents):
        if incident.user_stop:
            tape.cut(incident.until)
            following = incidents[number + 1].at if number + 1 < len(incidents) else gap.end
            tape.until(following, "startup")
        else:
            tape.until(incident.detected, "detection")
            tape.until(incident.until, "recovery")
    tape.until(gap.end, "other")


def _breakdown(tape: Tape) -> Breakdown:
    sums = dict.fromkeys(Breakdown.model_fields, 0.0)
    for category, start, end, _ in tape.pieces:
        sums[category] += end - start
    return Breakdown(**sums)


def _step_seconds(executed: Sequence[World]) -> list[float]:
    """Durations of the completed steps of all worlds but the first of each, which warms up."""
    return [
        world.ends[step] - world.ends[step - 1]
        for world in executed
        for step in range(world.resumed + 2, world.completed + 1)
        if step in world.ends and step - 1 in world.ends
    ]


def _throughput(
    standing: dict[int, World], productive: float, tape: Tape, executed: Sequence[World], expected: Expectation
) -> Throughput:
    tokens = sum(world.tokens.get(step, 0) for step, world in standing.items())
    rate = tokens / productive if productive > 0 else 0.0
    ranks = executed[-1].size if executed else 1
    mfu = None
    if expected.flops_per_token and expected.peak_flops:
        mfu = rate / ranks * expected.flops_per_token / expected.peak_flops
    own: dict[int, float] = {}
    for category, start, end, step in tape.pieces:
        if category == "productive":
            own[step] = own.get(step, 0.0) + end - start
    return Throughput(
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / ranks,
        mfu=mfu,
        median_step_seconds=median(own.values()) if own else 0.0,
    )


def _stragglers(executed: Sequence[World]) -> tuple[Straggler, ...]:
    """Ranks whose own time for a step is far above the median of all ranks, the slowest first."""
    own: dict[int, list[float]] = {}
    for world in executed:
        for rank, seconds in world.compute.items():
            own.setdefault(rank, []).extend(seconds)
    medians = {rank: median(seconds) for rank, seconds in own.items() if seconds}
    middle = median(medians.values()) if medians else 0.0
    if middle <= 0:
        return ()
    slow = [Straggler(rank=rank, ratio=m / middle) for rank, m in medians.items() if m / middle >= STRAGGLER_RATIO]
    return tuple(sorted(slow, key=lambda s: -s.ratio))


def _timeline(tape: Tape, start: float) -> tuple[Interval, ...]:
    return tuple(
        Interval(category=category, start=_elapsed(at, tape, start), end=_elapsed(end, tape, start), step=step)
        for category, at, end, step in tape.pieces
    )


def _elapsed(at: float, tape: Tape, start: float) -> float:
    """Seconds of the run at the time ``at``: what was cut out before it does not count."""
    return at - start - sum(min(end, at) - begin for begin, end in tape.cuts if begin < at)


def _losses(executed: Sequence[World], tape: Tape, start: float) -> tuple[LossPoint, ...]:
    """The loss of each completed execution of a step; one that is not finite is left out."""
    return tuple(
        LossPoint(step=step, loss=world.losses[step], time=_elapsed(world.ends[step], tape, start), replay=step > bound)
        for world, bound in zip(executed, standing_bounds(executed), strict=True)
        for step in range(world.resumed + 1, world.completed + 1)
        if isfinite(world.losses.get(step, float("nan")))
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
