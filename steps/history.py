"""Events of many processes -> one time line and the worlds of ranks that ran along it (pure).

1. ``aligned`` puts all events on one clock. Within a boot of a host the order is the monotonic clock's, and a time is
   ``monotonic + offset``, the offset being the boot's median of ``time - monotonic``: a wall clock that jumps does not
   move a fact. Between hosts, what is left of their clocks' difference shows at the ends of steps, which collectives make
   all ranks reach together: the median difference to the reference host is taken out. A host without ranks (that of the
   supervisor, on a cluster) is taken at its word.
2. ``incarnations`` groups a worker's events: one process, one in-process entry.
3. ``worlds`` puts together the incarnations that trained together: a world ends where a rank begins anew. A world holds
   which steps it started, which all of its ranks ended and when, what it resumed from, and what it waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal

from pydantic import JsonValue

from trainer.events import Event

Layer = Literal["in_process", "in_job", "pod", "workflow"]

BEGINNINGS = frozenset({"process_start", "imports_done", "entry", "process_group_ready", "model_ready", "loaded", "step_start"})
"""Events that show a worker on its way to train; one that has none of them is no incarnation."""

MILESTONES = ("process_start", "imports_done", "entry", "process_group_ready", "model_ready", "loaded")

SAVES = frozenset({"save_start", "save_skipped", "save_failed", "commit"})

FEWEST_COMMON_STEPS = 3
"""Step ends that two hosts must share before the difference of their clocks is believed."""


@dataclass(frozen=True, slots=True)
class Fact:
    """An event at its time on the common clock (seconds since the epoch)."""

    at: float
    source: Event

    @property
    def name(self) -> str:
        return self.source.event

    @property
    def data(self) -> dict[str, JsonValue]:
        return self.source.data

    def number(self, key: str, default: float = 0.0) -> float:
        """The event's datum ``key`` if it is a finite number, else ``default``."""
        value = self.source.data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return default
        return value if abs(value) < float("inf") else default

    def whole(self, key: str, default: int = -1) -> int:
        return int(self.number(key, default))

    def text(self, key: str) -> str:
        value = self.source.data.get(key)
        return value if isinstance(value, str) else ""


def aligned(events: Iterable[Event]) -> list[Fact]:
    """All events in the order in which they happened, on the clock of the host that wrote most of them."""
    by_boot: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_boot[event.boot_id].append(event)
    if not by_boot:
        return []
    offsets = {boot: median(e.time - e.monotonic for e in group) for boot, group in by_boot.items()}
    reference = max(by_boot, key=lambda boot: len(by_boot[boot]))
    for boot, lead in _leads(by_boot, offsets, reference).items():
        offsets[boot] -= lead
    facts = [Fact(e.monotonic + offsets[boot], e) for boot, group in by_boot.items() for e in group]
    facts.sort(key=lambda fact: fact.at)
    return facts


def _leads(by_boot: dict[str, list[Event]], offsets: dict[str, float], reference: str) -> dict[str, float]:
    """By how many seconds each boot's clock is ahead of the reference's, by the steps that both ended together."""
    ends = {boot: _step_ends(group, offsets[boot]) for boot, group in by_boot.items()}
    nodes = {boot: {e.node for e in group if e.role == "trainer"} for boot, group in by_boot.items()}
    leads: dict[str, float] = {}
    for boot in by_boot:
        common = ends[boot].keys() & ends[reference].keys()
        # The same node under another boot is the same place at another time, not the same time at another place.
        if len(common) >= FEWEST_COMMON_STEPS and not nodes[boot] & nodes[reference]:
            leads[boot] = median(ends[boot][key] - ends[reference][key] for key in common)
    return leads


def _step_ends(group: list[Event], offset: float) -> dict[tuple[int, int, int, int, JsonValue], float]:
    return {
        (e.attempt, e.pod, e.cycle, e.iteration, e.data.get("step")): e.monotonic + offset
        for e in group
        if e.event == "step_end"
    }


@dataclass(frozen=True, slots=True)
class Stall:
    """The loop waited for a checkpoint."""

    start: float
    end: float
    step: int
    rank: int
    reason: str


@dataclass(slots=True)
class Incarnation:
    """What one worker process did in one entry of its training function."""

    facts: list[Fact] = field(default_factory=list)

    @property
    def began(self) -> float:
        return next(fact.at for fact in self.facts if fact.name in BEGINNINGS)

    @property
    def rank(self) -> int:
        """The rank it trained as: a restart layer may assign another one between start and entry."""
        return self.facts[-1].source.rank


@dataclass(slots=True)
class World:
    """Ranks that trained together, from one restart to the next. Times are on the common clock."""

    attempt: int
    places: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Node -> (pod, cycle, iteration)."""
    began: float = 0.0
    size: int = 0
    resumed: int = -1
    """The step it resumed from, -1 if it never loaded."""
    loaded_at: float = 0.0
    tier: str = ""
    milestones: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    spawned: list[float] = field(default_factory=list)
    """When a launcher asked for each process."""
    first_start: float | None = None
    last_started: int = -1
    highest_ends: list[int] = field(default_factory=list)
    """Per rank, the highest step it ended."""
    ends: dict[int, float] = field(default_factory=dict)
    """Step -> when its last rank ended it."""
    completed: int = -1
    """The highest step that all ranks ended."""
    losses: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    samples: dict[int, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    """Step -> rank -> the sample indices it trained on."""
    stalls: list[Stall] = field(default_factory=list)
    saves: list[Fact] = field(default_factory=list)
    """What its ranks said of checkpoints and snapshots."""
    faults: list[Fact] = field(default_factory=list)
    """The faults that were injected into it."""
    compute: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Rank -> its own time for each step, before the first collective where that is known."""
    last_seen: float = 0.0

    @property
    def executed(self) -> bool:
        """Whether it began a step."""
        return self.first_start is not None

    @property
    def interrupted(self) -> bool:
        """Whether it began a step that not all ranks ended."""
        return self.last_started > self.completed

    @property
    def last_end(self) -> float:
        """The end of its last completed step; the start of the first one if it completed none."""
        assert self.first_start is not None
        return max(self.ends.get(self.completed, self.first_start), self.first_start)


def worlds(facts: Sequence[Fact]) -> list[World]:
    """The worlds of a run in their order, those that never began a step included."""
    found: list[World] = []
    ranks: set[int] = set()
    for member in sorted(incarnations(facts), key=lambda i: i.began):
        attempt = member.facts[-1].source.attempt
        if not found or member.rank in ranks or attempt != found[-1].attempt:
            # A worker of an older attempt that a frozen node brings back trains with nobody.
            if found and attempt < found[-1].attempt:
                continue
            found.append(World(attempt, began=member.began))
            ranks = set()
        ranks.add(member.rank)
        _join(found[-1], member)
    for world in found:
        _count(world)
    _believe_resumes(found)
    return found


def incarnations(facts: Sequence[Fact]) -> list[Incarnation]:
    """A process may enter its training function several times; each time is an incarnation of a rank."""
    groups: dict[tuple[str, str, int, int, int, int, int, int], Incarnation] = defaultdict(Incarnation)
    for fact in facts:
        e = fact.source
        if e.role == "trainer":
            groups[(e.boot_id, e.host, e.pid, e.attempt, e.node, e.pod, e.cycle, e.iteration)].facts.append(fact)
    return [group for group in groups.values() if any(fact.name in BEGINNINGS for fact in group.facts)]


def _join(world: World, member: Incarnation) -> None:
    """Add what ``member`` did to ``world``."""
    rank = member.rank
    last = member.facts[-1].source
    world.places[last.node] = (last.pod, last.cycle, last.iteration)
    world.size = max(world.size, last.world_size)
    world.last_seen = max(world.last_seen, member.facts[-1].at)
    started: dict[int, float] = {}
    highest_end = -1
    for fact in member.facts:
        name = fact.name
        if name == "step_start":
            step = fact.whole("step")
            started[step] = fact.at
            world.first_start = fact.at if world.first_start is None else min(world.first_start, fact.at)
            world.last_started = max(world.last_started, step)
        elif name == "step_end":
            step = fact.whole("step")
            highest_end = max(highest_end, step)
            _end(world, fact, rank, step, started.get(step))
        elif name == "samples":
            ids = fact.data.get("ids")
            world.samples[fact.whole("step")][rank] = [i for i in ids if isinstance(i, int)] if isinstance(ids, list) else []
        elif name == "stall":
            length = max(0.0, fact.number("seconds"))
            world.stalls.append(Stall(fact.at - length, fact.at, fact.whole("step"), rank, fact.text("reason")))
        elif name == "fault_injected":
            world.faults.append(fact)
        elif name in SAVES:
            world.saves.append(fact)
        elif name in MILESTONES:
            world.milestones[name].append(fact.at)
            if name == "process_start" and fact.number("spawned_at") > 0:
                # Stamped by another process of this host, so it is compared on the host's wall clock.
                world.spawned.append(fact.at - max(0.0, fact.source.time - fact.number("spawned_at")))
            if name == "loaded" and world.resumed < 0:
                world.resumed, world.tier, world.loaded_at = fact.whole("step"), fact.text("tier"), fact.at
    world.highest_ends.append(highest_end)


def _end(world: World, fact: Fact, rank: int, step: int, started: float | None) -> None:
    world.ends[step] = max(world.ends.get(step, 0.0), fact.at)
    own = fact.number("compute_seconds", fact.at - started if started is not None else -1.0)
    if own >= 0:
        world.compute[rank].append(own)
    if step not in world.losses:
        loss = fact.data.get("loss")
        world.losses[step] = float(loss) if isinstance(loss, int | float) else float("nan")
        world.tokens[step] = fact.whole("tokens", 0)


def _count(world: World) -> None:
    """Which step all ranks ended: a rank that ended a step ended those before it, even if such a line was lost."""
    world.size = max(world.size, 1)
    if world.resumed < 0 and world.executed:
        world.resumed = max(0, min([*world.ends, world.last_started]) - 1)
    everyone = len(world.highest_ends) >= world.size
    world.completed = max(world.resumed, min(world.highest_ends) if everyone else -1)


def _believe_resumes(found: list[World]) -> None:
    """A world that resumed from step r proves that the one before it completed r, whatever its last lines say."""
    executed = [world for world in found if world.executed]
    for before, after in pairwise(executed):
        if before.completed < after.resumed <= before.last_started:
            before.completed = after.resumed
            before.ends.setdefault(after.resumed, before.last_seen)


def layer_between(before: World, after: World) -> Layer:
    """The layer that made ``after`` of ``before``: the highest component of the incarnation that changed."""
    if before.attempt != after.attempt:
        return "workflow"
    common = before.places.keys() & after.places.keys()
    if before.places.keys() != after.places.keys() or any(before.places[n][0] != after.places[n][0] for n in common):
        return "pod"
    if any(before.places[n][1] != after.places[n][1] for n in common):
        return "in_job"
    return "in_process"
