"""What interrupted a run, when that was noticed, which layer brought the run back and how long each phase took (pure).

1. Between two worlds that began a step lies a gap. What caused it are the injected faults in it, a stop that was asked
   for, or (when neither is recorded) a fault inferred from what the layers noticed.
2. An incident lasts from its moment to its detection (``detected``) and from there until the next step begins, or until
   the next incident of the same gap overtakes it: so the incidents of a gap share out its time without overlap.
3. A user's own stop takes the time until the next launcher start out of the run instead.

The moment of a fault that nobody injected is not recorded. It is put where the interrupted step would have ended at the
run's median pace, or at its detection where that is earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from steps.history import Fact, Layer, World, layer_between
from trainer.records import FaultReport, Restarts

NOTICED = frozenset({"fault_detected", "worker_exit", "worker_stop", "pod_restart", "launcher_end"})
PHASES = ("teardown", "rendezvous", "import", "process_group", "build", "load")
INTERRUPTED_BY_USER = 130
"""What a supervisor ends with after Ctrl-C."""

FATAL_SIGNALS = {-9: "sigkill", -6: "abort", -11: "segfault", -15: "sigterm"}


@dataclass(frozen=True, slots=True)
class Gap:
    """From the last completed step of a world (or the run's start) to the first step of the next (or the run's end)."""

    before: World | None
    after: World | None
    start: float
    end: float


@dataclass(slots=True)
class Incident:
    """Something that interrupted the run; times on the common clock."""

    kind: str
    at: float
    detected: float
    until: float
    step: int
    rank: int = -1
    injected: bool = False
    message: str = ""
    recovered_by: Layer | Literal["none"] = "none"
    phases: dict[str, float] | None = None
    lost_steps: int = 0
    resumed_step: int = -1
    resumed_from: str = ""
    user_stop: bool = False
    """The time from ``at`` to ``until`` is no part of the run."""


def gaps(executed: Sequence[World], start: float, end: float) -> list[Gap]:
    """The gaps of a run from ``start`` to ``end``: one more than there are worlds that began a step."""
    found: list[Gap] = []
    before: World | None = None
    at = start
    for world in executed:
        assert world.first_start is not None
        found.append(Gap(before, world, at, max(at, world.first_start)))
        before, at = world, max(at, world.last_end)
    found.append(Gap(before, None, at, max(at, end)))
    return found


def incidents_of(gap: Gap, facts: Sequence[Fact], worlds: Sequence[World], pace: float, per_node: int) -> list[Incident]:
    """The incidents of one gap, in order.

    ``facts`` are those between the end of the gap before and the end of this one; ``pace`` is the median step in seconds,
    ``per_node`` the number of ranks on a node.
    """
    stops = _user_stops(gap, facts)
    left_out = [(stop.at, stop.until) for stop in stops]
    causes = [(_injected_incident(gap, fault), fault) for fault in _injected(gap, facts, worlds)]
    faults = [(i, f) for i, f in causes if not any(start <= i.at < end for start, end in left_out)]
    if not stops and not faults:
        inferred = _inferred(gap, facts, worlds, pace)
        return [] if inferred is None else [_finish(inferred, gap, facts, worlds, last=True)]
    found = sorted([*faults, *((stop, None) for stop in stops)], key=lambda pair: pair[0].at)
    for index, (incident, fault) in enumerate(found):
        if fault is not None:
            last = index + 1 == len(found)
            incident.until = gap.end if last else max(incident.at, found[index + 1][0].at)
            incident.detected = _detection(incident, fault, facts, worlds, per_node)
            _finish(incident, gap, facts, worlds, last=last)
    return [incident for incident, _ in found]


def _injected(gap: Gap, facts: Sequence[Fact], worlds: Sequence[World]) -> list[Fact]:
    """The faults injected into the world before the gap, and those that hit while nothing trained; one fact per fault,
    since several processes may report the one that hit them together."""
    claimed = {id(fact) for world in worlds if world.executed for fact in world.faults}
    candidates = [fact for fact in facts if fact.name == "fault_injected" and id(fact) not in claimed]
    if gap.before is not None:
        candidates += [fact for fact in gap.before.faults if not _was_harmless(fact, gap.before)]
    first: dict[object, Fact] = {}
    for fact in sorted(candidates, key=lambda fact: fact.at):
        index = fact.data.get("index")
        first.setdefault(index if index is not None else (fact.whole("step"), fact.text("kind")), fact)
    return list(first.values())


def _was_harmless(fault: Fact, world: World) -> bool:
    """Whether all ranks went on for at least two steps after it: then it is not what ended this world."""
    return sum(world.ends.get(world.completed - back, 0.0) > fault.at for back in (0, 1)) == 2


def _injected_incident(gap: Gap, fault: Fact) -> Incident:
    kind, variant = fault.text("kind") or "unknown", fault.text("variant")
    step, rank = fault.whole("step"), fault.whole("rank", fault.source.rank)
    at = min(max(fault.at, gap.start), gap.end)
    what = f"{kind} ({variant})" if variant else kind
    return Incident(kind, at, at, gap.end, step, rank, True, f"injected {what} on rank {rank} at step {step}")


def _detection(incident: Incident, fault: Fact, facts: Sequence[Fact], worlds: Sequence[World], per_node: int) -> float:
    """When a layer first noticed ``incident``, no later than ``incident.until``."""
    attempt = fault.source.attempt
    rebirths = [min([*w.spawned, w.began]) for w in worlds if w.began >= incident.at and w.attempt == attempt]
    answer = next((f.at for f in facts if f.at >= fault.at and _notices(f) and not _is_own_making(f, fault, per_node)), None)
    if answer is not None and answer <= incident.until:
        noticed = answer
    elif rebirths:  # nobody said that it was noticed: it was when a layer acted
        noticed = min(rebirths)
    else:  # or when the attempt fell silent
        noticed = max((f.at for f in facts if f.source.attempt == attempt and f.at <= incident.until), default=incident.at)
    return min(max(noticed, incident.at), incident.until)


def _notices(fact: Fact) -> bool:
    if fact.name in ("worker_exit", "launcher_end"):
        return fact.whole("exit_code", 0) != 0
    return fact.name in NOTICED


def _is_own_making(fact: Fact, fault: Fact, per_node: int) -> bool:
    """Whether ``fact`` is the fault itself rather than a layer's answer: the end of the very process it was aimed at.

    A hung process ends only because a layer ends it.
    """
    kind = fault.text("kind")
    if fact.name != "worker_exit" or kind == "hang" or fact.source.attempt != fault.source.attempt:
        return False
    if fact.source.node != fault.source.node:
        return False
    return kind == "node" or fact.whole("local_rank") == fault.whole("rank", fault.source.rank) % per_node


def _user_stops(gap: Gap, facts: Sequence[Fact]) -> list[Incident]:
    """The stops that the user asked for in this gap, each from the last thing the run did to the next launcher's start."""
    if gap.before is None or gap.after is None:
        return []
    found: list[Incident] = []
    for ended in facts:
        if ended.name != "supervisor_end" or ended.at < gap.start:
            continue
        next_one = next((f for f in facts if f.name == "supervisor_start" and f.at > ended.at), None)
        if next_one is None or next_one.data.get("attached") or not _stopped_by_user(ended, next_one):
            continue
        again = next((f.at for f in facts if f.name == "launcher_start" and f.at > ended.at), gap.end)
        at = ended.at if found else _work_end(gap.before, facts, gap.start, ended.at)
        step = gap.before.completed + 1
        found.append(Incident("stop", at, at, again, step, message="stopped by the user", user_stop=True))
    return found


def _stopped_by_user(ended: Fact, next_one: Fact) -> bool:
    """Whether a supervisor ended because the user wanted it to, rather than the machine or the cluster.

    Ctrl-C says so itself, and ``argo stop`` is seen in the Workflow. Another signal that ends a supervisor is the user's if it was another Workflow that went on with the
    run: what the infrastructure stops, its own Workflow retries.
    """
    if ended.whole("exit_code") == INTERRUPTED_BY_USER or ended.text("message") == "SIGINT" or ended.data.get("by_user"):
        return True
    workflows = ended.text("workflow"), next_one.text("workflow")
    return bool(ended.text("message")) and all(workflows) and workflows[0] != workflows[1]


def _work_end(world: World, facts: Sequence[Fact], start: float, end: float) -> float:
    """When a world that was asked to stop had written what it wanted to, between ``start`` and ``end``."""
    saved = [f.at for f in facts if f.name == "commit" and f.source.attempt == world.attempt and start <= f.at <= end]
    waited = [stall.end for stall in world.stalls if start <= stall.end <= end]
    return max([start, *saved, *waited])


def _inferred(gap: Gap, facts: Sequence[Fact], worlds: Sequence[World], pace: float) -> Incident | None:
    """The incident of a gap in which no fault was injected; None where nothing went wrong."""
    before = gap.before
    signs = [f for f in facts if gap.start <= f.at and _notices(f)]
    stops = [f for f in facts if f.name == "stop_requested"]
    if gap.after is None and (before is None or not before.interrupted or not signs):
        return None  # it has ended in good order, or still goes on
    if before is None and not any(world.began < gap.end and not world.executed for world in worlds):
        return None
    step = before.completed + 1 if before is not None else -1
    if stops and before is not None:
        at = _work_end(before, facts, gap.start, gap.end)
        reason = stops[0].text("reason") or "the infrastructure"
        return Incident("stop", at, at, gap.end, step, message=f"asked to stop: {reason}")
    detected = gap.start
    if signs:
        detected = min(signs[0].at, gap.end)
    elif before is not None:
        detected = min(before.last_seen, gap.end)
    at = detected if before is None else min(max(gap.start, detected), gap.start + pace)
    kind, message = _describe(signs)
    return Incident(kind, at, max(at, detected), gap.end, step, _rank_of(signs), message=message)


def _describe(signs: Sequence[Fact]) -> tuple[str, str]:
    """A kind and a sentence for a fault known only by what the layers noticed."""
    message = next((f.text("message") for f in signs if f.name == "fault_detected" and f.text("message")), "")
    code = next((f.whole("exit_code", 0) for f in signs if f.name in ("worker_exit", "launcher_end", "pod_restart")), 0)
    if message:
        return FATAL_SIGNALS.get(code, "unknown"), message
    if code:
        kind = FATAL_SIGNALS.get(code, "exit")
        return kind, f"a worker ended with {code}" if code > 0 else f"a worker was killed by signal {-code}"
    return "unknown", "the run was interrupted and nothing says why"


def _rank_of(signs: Sequence[Fact]) -> int:
    return next((f.source.rank for f in signs if f.source.rank >= 0), -1)


def _finish(incident: Incident, gap: Gap, facts: Sequence[Fact], worlds: Sequence[World], *, last: bool) -> Incident:
    """Who recovered from it, in which phases, and what it lost. Of a gap's incidents the last one resumes."""
    before = next((world for world in reversed(worlds) if world.began < incident.at), None)
    after = next((world for world in worlds if incident.at <= world.began < incident.until), gap.after)
    if last:
        after = gap.after
    if before is not None and after is not None and before is not after:
        incident.recovered_by = layer_between(before, after)
    exits = [f.at for f in facts if f.name in ("worker_exit", "worker_stop")]
    incident.phases = phases(incident.detected, incident.until, after, exits)
    if last and gap.after is not None:
        done = gap.before.completed if gap.before is not None else 0
        incident.resumed_step, incident.resumed_from = gap.after.resumed, gap.after.tier
        incident.lost_steps = max(0, done - gap.after.resumed)
    return incident


def phases(detected: float, until: float, after: World | None, exits: Sequence[float] = ()) -> dict[str, float]:
    """The recovery from ``detected`` to ``until`` cut at the milestones of the world ``after``; the parts sum to it.

    Where processes are new, teardown ends with the last exit of an old one (``exits``), or when a launcher asks for the
    first new one; where they live on, at the first entry. Waiting for each other, before and after the imports, is
    rendezvous. A phase ends when the last rank has left it, and the load includes what remains until the first step.
    """
    parts = dict.fromkeys(PHASES, 0.0)
    at = detected

    def advance(phase: str, boundaries: Sequence[float]) -> None:
        nonlocal at
        boundary = min(max([at, *boundaries]), until)
        parts[phase] += boundary - at
        at = boundary

    if after is None:
        advance("teardown", [until])
        return parts
    passed = {name: [t for t in times if t >= detected] for name, times in after.milestones.items()}
    asked = [t for t in after.spawned if t >= detected] or passed.get("process_start", [])
    if asked:
        gone = [t for t in exits if detected <= t <= min(asked)]
        advance("teardown", gone or [min(asked)])
        advance("rendezvous", asked)
        advance("import", passed.get("imports_done", []))
        advance("rendezvous", passed.get("entry", []))
    else:
        advance("teardown", [min(passed.get("entry", [until]), default=until)])
        advance("rendezvous", passed.get("entry", []))
    advance("process_group", passed.get("process_group_ready", []))
    advance("build", passed.get("model_ready", []))
    advance("load", [until])
    return parts


def restarts(worlds: Sequence[World], facts: Sequence[Fact]) -> Restarts:
    """Restarts of the run by layer, each counted once however many ranks took part.

    In-process: steps of the iteration; in-job: cycles of the launcher, less those with which the other nodes answered
    the restart of a pod; pod: restarts of each node; workflow: starts of the supervisor that found no living Job, but one.
    """
    starts = [f for f in facts if f.name == "supervisor_start" and not f.data.get("attached")]
    attempts = {world.attempt for world in worlds}
    workflow = max(0, len(starts) - 1 if starts else len(attempts) - 1)
    pods: dict[tuple[int, int], int] = {}
    for place in [*((w.attempt, n, p[0]) for w in worlds for n, p in w.places.items()), *_pod_restarts(facts)]:
        attempt, node, pod = place
        pods[(attempt, node)] = max(pods.get((attempt, node), 0), pod)
    in_job = in_process = 0
    for attempt in attempts:
        cycles: dict[tuple[int, int], int] = {}
        iterations: dict[tuple[int, int, int], int] = {}
        for world in worlds:
            if world.attempt == attempt:
                for node, (pod, cycle, iteration) in world.places.items():
                    cycles[(node, pod)] = max(cycles.get((node, pod), 0), cycle)
                    iterations[(node, pod, cycle)] = max(iterations.get((node, pod, cycle), 0), iteration)
        nodes = {node for node, _ in cycles}
        answers = {n: sum(count for (a, m), count in pods.items() if a == attempt and m != n) for n in nodes}
        in_job += max(0, *(sum(c for (m, _), c in cycles.items() if m == n) - answers[n] for n in nodes))
        in_process += max(sum(i for (m, _, _), i in iterations.items() if m == n) for n in nodes)
    return Restarts(in_process=in_process, in_job=in_job, pod=sum(pods.values()), workflow=workflow)


def _pod_restarts(facts: Sequence[Fact]) -> list[tuple[int, int, int]]:
    """(attempt, node, how many times started again), from what launchers of pods and the pods themselves said."""
    found: dict[tuple[int, int], int] = {}
    for fact in facts:
        e = fact.source
        if fact.name == "pod_restart":  # told by the pod itself, or by the launcher about one of its nodes
            key = (e.attempt, fact.whole("node_index", e.node))
            found[key] = max(found.get(key, 0) + 1, fact.whole("pod", 0))
        elif fact.name == "launcher_start" and e.node >= 0:
            found[(e.attempt, e.node)] = max(found.get((e.attempt, e.node), 0), e.pod)
    return [(attempt, node, count) for (attempt, node), count in found.items()]


def fault_report(incident: Incident, elapsed: float) -> FaultReport:
    """The record of an incident that happened ``elapsed`` seconds into the run."""
    return FaultReport(
        step=incident.step,
        rank=incident.rank,
        kind=incident.kind,
        injected=incident.injected,
        message=incident.message,
        recovered_by=incident.recovered_by,
        time=incident.at,
        elapsed=elapsed,
        detection_seconds=incident.detected - incident.at,
        recovery_seconds=incident.until - incident.detected,
        phases=incident.phases or dict.fromkeys(PHASES, 0.0),
        lost_steps=incident.lost_steps,
        resumed_step=incident.resumed_step,
        resumed_from=incident.resumed_from,
    )
