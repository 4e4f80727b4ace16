"""What a run will cost, from what its parts cost: a walk over its steps, saves and faults as the trainer would go (pure).

1. ``fit`` takes the costs of the parts from the reports of some runs: a step, a start, a save, a load, a snapshot, a
   restart of each layer, the time until each kind of fault is noticed.
2. ``walk`` goes through a configuration with these costs, fault by fault, and gives the interval each second falls in,
   in the words of ``steps.goodput``. Nothing of the run that is predicted is used but its configuration.
3. ``simulated_wall`` has the simulation of large clusters go through the same run, to see how far it can be believed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean, median

import numpy as np

from steps.evidence import Evidence
from steps.simulation import Kind, Policy, begin, duration, still_writing, strike
from trainer.config import RunConfig
from trainer.faults import PlannedFault, schedule
from trainer.records import Breakdown, FaultReport, RunReport

INTO_STEP = 0.7
"""How much of a step is done when an injected fault strikes: after the backward pass."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the parts of a run take."""

    step: float
    startup: float
    save: float
    """What the loop waits for a synchronous save of the durable tier."""
    save_stall: float
    """What the loop waits for an asynchronous one."""
    write: float
    """From the start of an asynchronous one until it is durable."""
    load: float
    """From the durable tier."""
    snapshot_stall: float
    restart: Mapping[str, float]
    """Layer, and recovery mode and layer ("combined in_job") -> from detection to the next step, the load left out."""
    detection: Mapping[str, float]
    """Kind of fault -> until it is noticed."""


@dataclass
class Walk:
    """A run as it goes."""

    config: RunConfig
    costs: Costs
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    now: float = 0.0
    step: int = 0
    committed: int = 0
    snapshot: int = 0
    writing: tuple[int, float] | None = None
    """The step of a save in flight, and when it will be durable."""
    commits: int = 0
    skipped: int = 0

    def spend(self, category: str, seconds: float) -> None:
        self.now += seconds
        self.spent[category] += seconds

    def look(self) -> None:
        """Whether the save in flight is durable by now."""
        if self.writing is not None and self.now >= self.writing[1]:
            self.committed, self.writing = self.writing[0], None
            self.commits += 1

    def drain(self) -> None:
        if self.writing is not None:
            self.spend("checkpoint_stall", max(0.0, self.writing[1] - self.now))
            self.look()

    def saves(self) -> None:
        """After a completed step."""
        config, last = self.config, self.step == self.config.max_steps
        self.look()
        if config.snapshot_interval_steps and self.step % config.snapshot_interval_steps == 0 and not last:
            self.spend("checkpoint_stall", self.costs.snapshot_stall)
            self.snapshot = self.step
        if config.checkpoint_mode == "off" or not (last or self.step % config.checkpoint_interval_steps == 0):
            return
        if config.checkpoint_mode == "sync":
            self.spend("checkpoint_stall", self.costs.save)
            self.committed, self.commits = self.step, self.commits + 1
        elif self.writing is not None and not last:
            self.skipped += 1
        else:
            self.drain()
            self.spend("checkpoint_stall", self.costs.save_stall)
            self.writing = (self.step, self.now - self.costs.save_stall + self.costs.write)
            if last:
                self.drain()

    def strike(self, fault: PlannedFault) -> None:
        """The step that was under way is lost, and what was not saved; training goes on from what was."""
        layer = recovering_layer(self.config.recovery, fault.kind, fault.variant)
        self.look()
        if layer != "in_process":  # which leaves the writer alone
            self.writing = None
        if fault.kind == "node":
            self.snapshot = 0
        self.spend("replay", INTO_STEP * self.costs.step)
        self.spend("detection", self.costs.detection.get(fault.kind, 0.0))
        self.spend("recovery", restart(self.costs, self.config.recovery, layer))
        resume = max(self.committed, self.snapshot)
        if resume and resume > self.snapshot:
            self.spend("recovery", self.costs.load)
        lost = (self.step - resume) * self.costs.step
        self.spent["productive"] -= lost
        self.spent["replay"] += lost
        self.step, self.snapshot = resume, min(self.snapshot, resume)


def recovering_layer(recovery: str, kind: str, variant: str) -> str:
    """The layer that recovers a fault: the lowest one there is that can."""
    soft = kind in ("exception", "oom") or (kind == "hang" and variant == "loop")
    if soft and recovery in ("in-process", "combined"):
        return "in_process"
    if kind != "node" and recovery in ("in-job", "combined"):
        return "in_job"
    return "pod"


def restart(costs: Costs, recovery: str, layer: str) -> float:
    """What a restart of ``layer`` takes: in this mode of recovery where that is known (a worker that also restarts in the
    process has more to set up), else in any."""
    return costs.restart.get(f"{recovery} {layer}", costs.restart.get(layer, 0.0))


def walk(config: RunConfig, costs: Costs) -> Walk:
    """Go through a run from its start to its last commit."""
    run = Walk(config, costs)
    faults = {fault.step: fault for fault in schedule(config)} if config.fault_count else {}
    run.spend("startup", costs.startup)
    while run.step < config.max_steps:
        fault = faults.pop(run.step + 1, None)
        if fault is not None:
            run.strike(fault)
            continue
        run.spend("productive", costs.step)
        run.step += 1
        run.saves()
    return run


def simulated_wall(config: RunConfig, costs: Costs) -> float:
    """The wall time of a run by the simulation that plans for large clusters (``steps.simulation``), struck when it comes to
    the steps of the faults."""
    last = 0.0
    policy = Policy(
        interval=inf if config.checkpoint_mode == "off" else config.checkpoint_interval_steps * costs.step,
        stall=costs.save if config.checkpoint_mode == "sync" else costs.save_stall,
        write=costs.save if config.checkpoint_mode == "sync" else costs.write,
        load=costs.load,
        snapshot_interval=config.snapshot_interval_steps * costs.step,
        snapshot_stall=costs.snapshot_stall,
    )
    if config.checkpoint_mode != "off":  # the last save is waited for
        last = costs.save if config.checkpoint_mode == "sync" else costs.save_stall + costs.write
    planned = sorted(schedule(config), key=lambda fault: fault.step) if config.fault_count else []
    kinds = [
        Kind(
            fault.kind,
            costs.detection.get(fault.kind, 0.0)
            + restart(costs, config.recovery, recovering_layer(config.recovery, fault.kind, fault.variant)),
            keeps_snapshots=fault.kind != "node",
        )
        for fault in planned
    ]
    state = begin(1)
    for number, fault in enumerate(planned):
        at = state.at + duration(policy, state.work, (fault.step - 1 + INTO_STEP) * costs.step)
        strike(state, policy, at, np.array([number]), kinds)
    target = config.max_steps * costs.step
    rest = duration(policy, state.work, target) + still_writing(policy, state.work, target)
    return costs.startup + float(state.at[0] + rest[0]) + last


def breakdown(run: Walk) -> Breakdown:
    """The intervals of a walk."""
    return Breakdown(**{name: run.spent.get(name, 0.0) for name in Breakdown.model_fields})


def usable(runs: Sequence[Evidence]) -> list[tuple[Evidence, RunReport]]:
    """Runs that costs can be taken from: complete ones that left whole event files."""
    return [(run, run.report) for run in runs if run.report is not None and run.report.complete and run.whole]


def fit(runs: Sequence[Evidence]) -> Costs | None:
    """The costs of the parts, from the usable ones of ``runs``; None where there is no run without saves to take a step from."""
    reports = usable(runs)
    bare = [report for _, report in reports if is_bare(report.config)]
    if not bare:
        return None
    bare = [report for report in bare if report.config.nodes == bare[0].config.nodes]
    sync = [r for _, r in reports if r.config.checkpoint_mode == "sync"]
    background = [(run, r) for run, r in reports if r.config.checkpoint_mode == "async"]
    snapshots = [r.snapshots.mean_stall_seconds for _, r in reports if r.snapshots.committed]
    stalls = [run.waits.get("save", 0.0) / max(1, r.checkpoints.committed) for run, r in background]
    saves = [r.checkpoints.mean_stall_seconds for r in sync]
    writes = [r.checkpoints.mean_durable_seconds for _, r in background]
    struck = [(report.config.recovery, fault) for _, report in reports for fault in report.faults if fault.injected]
    faults = [fault for _, fault in struck]
    restarts = [(mode, f.recovered_by, f.recovery_seconds - load_seconds(f)) for mode, f in struck]
    return Costs(
        step=fmean(r.breakdown_seconds.productive / max(1, r.steps_completed) for r in bare),
        startup=median(r.breakdown_seconds.startup for _, r in reports),
        save=_mean(saves or writes),
        save_stall=_mean(stalls),
        write=_mean(writes or saves),
        load=_mean(_loads(faults)),
        snapshot_stall=_mean(snapshots),
        restart=medians((layer, spent) for _, layer, spent in restarts)
        | medians((f"{mode} {layer}", spent) for mode, layer, spent in restarts),
        detection=medians((f.kind, f.detection_seconds) for f in faults),
    )


def is_bare(config: RunConfig) -> bool:
    """Whether a run does nothing but train."""
    plain = config.checkpoint_mode == "off" and config.recovery == "none"
    return plain and not config.fault_count and not config.snapshot_interval_steps


def bare_of(config: RunConfig, reports: Iterable[RunReport]) -> list[RunReport]:
    """The bare runs whose steps are those of ``config``: of one shape, on as many ranks, and of as many nodes if there are."""
    same = ("model", "sequence_length", "global_batch_size", "micro_batch_size", "world_size", "compile", "activation_checkpointing", "profile")
    found = [
        report
        for report in reports
        if report.complete
        and is_bare(report.config)
        and all(getattr(report.config, name) == getattr(config, name) for name in same)
    ]
    return [report for report in found if report.config.nodes == config.nodes] or found


def load_seconds(fault: FaultReport) -> float:
    """What a recovery spent on a load from the durable tier."""
    return fault.phases.get("load", 0.0) if fault.resumed_from == "durable" else 0.0


def _loads(faults: Iterable[FaultReport]) -> list[float]:
    return [load_seconds(fault) for fault in faults if fault.resumed_from == "durable"]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def medians(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Name -> the median of its values."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in pairs:
        found[name].append(value)
    return {name: median(values) for name, values in found.items()}
