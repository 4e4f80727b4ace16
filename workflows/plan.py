"""``run.py plan``: what a job of some size will be worth, how often it should save, and what that costs in GPU-hours.

The arithmetic is in ``steps.planning``, the simulation in ``steps.simulation``. The costs of the parts are flags, or with
``--from-run`` those that a finished run measured.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from math import inf, sqrt
from pathlib import Path
from typing import Any

from steps import planning
from steps.figures import number, percent, seconds
from steps.planning import HOUR, Cluster, Job
from trainer.config import RunConfig, add_flags
from trainer.errors import ConfigurationError

DAY = 24 * HOUR
MOST_EVENTS = 5e6
"""That a simulation may hold in memory, all its runs together; a month of 100,000 GPUs has a hundredth of it."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Intervals beside the best one that the table shows."""

CLUSTER_FLAGS: dict[str, tuple[float, str]] = {
    "process-mtbf-hours": (150_000.0, "hours between failures of one GPU's process, cured by a restart on the spot (0: never)"),
    "node-mtbf-hours": (9_400.0, "hours between failures of one node, which is then replaced (0: never)"),
    "rack-mtbf-hours": (100_000.0, "hours between failures of one rack with all its nodes (0: never)"),
    "storage-mtbf-hours": (720.0, "hours between failures of the shared storage (0: never)"),
    "storage-outage-seconds": (600.0, "how long the storage is then away"),
}
JOB_FLAGS: dict[str, tuple[float, str]] = {
    "step-seconds": (10.0, "a step"),
    "save-seconds": (60.0, "until a durable save is durable"),
    "save-stall-seconds": (0.5, "what the loop waits for an asynchronous one"),
    "load-seconds": (60.0, "to load from the durable tier"),
    "snapshot-stall-seconds": (0.2, "what the loop waits for a snapshot"),
    "detection-seconds": (10.0, "until a failure is noticed"),
    "process-restart-seconds": (10.0, "from there to the next step, after a process's failure"),
    "node-restart-seconds": (120.0, "the same for a node, its replacement included"),
    "rack-restart-seconds": (300.0, "the same for a rack"),
}
"""Flag -> default and what it is. The failure rates are those of a published run on 16,384 GPUs: an interruption every
three hours, two in three of hardware."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = parser.add_argument_group("the cluster and its failures")
    size.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs in use")
    size.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="[8]")
    size.add_argument("--nodes-per-rack", type=int, default=16, metavar="N", help="[16]")
    size.add_argument("--days", type=float, default=30.0, help="how long it trains [30]")
    costs = parser.add_argument_group("what the parts of the job cost, seconds")
    for group, flags in ((size, CLUSTER_FLAGS), (costs, JOB_FLAGS)):
        for name, (default, text) in flags.items():
            group.add_argument(f"--{name}", type=float, metavar="X", help=f"{text} [{default:g}]")
    costs.add_argument("--from-run", metavar="RUN", help="take what this finished run measured, where no flag says otherwise")
    add_flags(parser, ("root",))
    how = parser.add_argument_group("how it saves")
    how.add_argument("--checkpoint-mode", choices=("async", "sync"), default="async", help="[async]")
    how.add_argument("--no-snapshots", action="store_true", help="no node-local tier")
    how.add_argument("--no-replicas", action="store_true", help="a lost node takes its snapshots with it")
    how.add_argument("--interval-steps", type=int, metavar="N", help="steps between durable saves [the best]")
    how.add_argument("--snapshot-interval-steps", type=int, metavar="N", help="steps between snapshots [the best]")
    simulation = parser.add_argument_group("the simulation")
    simulation.add_argument("--simulations", type=int, default=32, metavar="N", help="runs to simulate [32]")
    simulation.add_argument("--seed", type=int, default=42, help="[42]")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


@dataclass(frozen=True)
class Plan:
    """What came out; shares are of the wall time."""

    interruptions_per_day: float
    interval_steps: int
    interval_seconds: float
    snapshot_interval_steps: int
    snapshot_interval_seconds: float
    expected_goodput: float
    simulated_goodput: float
    simulated_low: float
    simulated_high: float
    gpu_hours: float
    gpu_hours_by_use: dict[str, float]
    events: dict[str, float]
    by_interval: tuple[tuple[int, float, float], ...]
    """Steps between durable saves, expected and simulated goodput."""
    simulation_seconds: float


def main(args: argparse.Namespace) -> int:
    """Plan and print."""
    cluster, job = cluster_of(args), job_of(args)
    if args.simulations < 2 or not 0 < args.days < inf or args.seed < 0:
        raise ConfigurationError("--simulations is at least 2, --days more than 0, --seed no less than 0")
    if min(1 if given is None else given for given in (args.interval_steps, args.snapshot_interval_steps)) < 1:
        raise ConfigurationError("--interval-steps and --snapshot-interval-steps are at least 1")
    found = plan(cluster, job, args)
    print(json.dumps(asdict(found)) if args.json else told(cluster, job, found, args))
    return 0


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The cluster of the flags."""
    values = {name: _given(args, name, default) for name, (default, _) in CLUSTER_FLAGS.items()}
    for name in values:
        if name.endswith("hours") and values[name] == 0:
            values[name] = inf
    _refuse_negative(values)
    if min(args.gpus, args.gpus_per_node, args.nodes_per_rack) < 1:
        raise ConfigurationError("--gpus, --gpus-per-node and --nodes-per-rack are at least 1")
    named = {name.replace("-", "_"): value for name, value in values.items()}
    return Cluster(gpus=args.gpus, gpus_per_node=args.gpus_per_node, nodes_per_rack=args.nodes_per_rack, **named)


def job_of(args: argparse.Namespace) -> Job:
    """The job of the flags, over what ``--from-run`` measured, over the defaults."""
    measured = measured_costs(Path(getattr(args, "root", RunConfig.model_fields["root"].default)), args.from_run) if args.from_run else {}
    values = {name: _given(args, name, measured.get(name, default)) for name, (default, _) in JOB_FLAGS.items()}
    _refuse_negative(values)
    if values["step-seconds"] <= 0:
        raise ConfigurationError("--step-seconds is more than 0")
    return Job(
        step=values["step-seconds"],
        synchronous=args.checkpoint_mode == "sync",
        save=values["save-seconds"],
        save_stall=values["save-stall-seconds"],
        load=values["load-seconds"],
        snapshot_stall=values["snapshot-stall-seconds"],
        snapshots=not args.no_snapshots,
        replicas=not args.no_replicas,
        detection=values["detection-seconds"],
        process_restart=values["process-restart-seconds"],
        node_restart=values["node-restart-seconds"],
        rack_restart=values["rack-restart-seconds"],
    )


def measured_costs(root: Path, run_id: str) -> dict[str, float]:
    """What a run measured of the costs; what did not happen in it is left out."""
    from steps.prediction import load_seconds, medians
    from steps.report import assemble
    from trainer.paths import RunPaths

    report = assemble(RunPaths(root, run_id))
    if not report.steps_completed:
        raise ConfigurationError(f"--from-run {run_id}: it has no completed step to measure with")
    found: dict[str, float] = {"step-seconds": report.throughput.median_step_seconds}
    tiers = {"save-stall-seconds": report.checkpoints, "snapshot-stall-seconds": report.snapshots}
    found |= {name: tier.mean_stall_seconds for name, tier in tiers.items() if tier.committed}
    if report.checkpoints.committed:
        found["save-seconds"] = report.checkpoints.mean_durable_seconds
    measured: list[tuple[str, float]] = []
    for fault in report.faults:
        load, pod = load_seconds(fault), fault.recovered_by in ("pod", "workflow")
        measured += [
            ("detection-seconds", fault.detection_seconds),
            (f"{'node' if pod else 'process'}-restart-seconds", fault.recovery_seconds - load),
        ]
        if fault.resumed_from == "durable":
            measured.append(("load-seconds", load))
    return found | medians(measured)


def plan(cluster: Cluster, job: Job, args: argparse.Namespace) -> Plan:
    """The best intervals (or those that were given), and what they are worth by formula and by simulation."""
    import numpy as np

    from steps.simulation import poisson_events, simulate

    best, best_snapshot = planning.best_intervals(cluster, job)
    interval = args.interval_steps * job.step if args.interval_steps else best
    snapshot = args.snapshot_interval_steps * job.step if args.snapshot_interval_steps and job.snapshots else best_snapshot
    horizon = args.days * DAY
    if (expected := sum(cluster.rates()) * horizon * args.simulations) > MOST_EVENTS:
        raise ConfigurationError(f"{expected:.2g} failures are too many to simulate; give rarer ones, fewer --days, or fewer --simulations")
    began = time.monotonic()
    events = poisson_events(cluster.rates(), horizon, args.simulations, args.seed)
    kinds = planning.kinds(cluster, job)
    outcome, _ = simulate(planning.policy(job, interval, snapshot), kinds, *events, horizon)
    beside = []
    for steps in sorted({max(1, round(interval * factor / job.step)) for factor in FACTORS}):
        other, _ = simulate(planning.policy(job, steps * job.step, snapshot), kinds, *events, horizon)
        beside.append((steps, planning.expected_goodput(cluster, job, steps * job.step, snapshot), float(other.goodput.mean())))
    mean, spread = float(outcome.goodput.mean()), float(outcome.goodput.std(ddof=1))
    half = 1.96 * spread / sqrt(args.simulations)
    total = cluster.gpus * args.days * 24
    shares = (("steps that stood", outcome.goodput), ("steps run again", outcome.lost_share),
              ("detection, restarts and loads", outcome.down_share), ("waiting for saves", outcome.stall_share))  # fmt: skip
    return Plan(
        interruptions_per_day=sum(cluster.rates()[:3]) * DAY,
        interval_steps=round(interval / job.step),
        interval_seconds=interval,
        snapshot_interval_steps=round(snapshot / job.step),
        snapshot_interval_seconds=snapshot,
        expected_goodput=planning.expected_goodput(cluster, job, interval, snapshot),
        simulated_goodput=mean,
        simulated_low=mean - half,
        simulated_high=mean + half,
        gpu_hours=total,
        gpu_hours_by_use={name: total * float(np.mean(share)) for name, share in shares},
        events=outcome.events,
        by_interval=tuple(beside),
        simulation_seconds=time.monotonic() - began,
    )


def told(cluster: Cluster, job: Job, found: Plan, args: argparse.Namespace) -> str:
    """The plan for people."""
    every = seconds(DAY / found.interruptions_per_day) if found.interruptions_per_day else "never"
    mode = "synchronous" if job.synchronous else "asynchronous"
    lines = [
        f"{cluster.gpus:,} GPUs in {cluster.nodes:,} nodes and {cluster.racks:,} racks for {args.days:g} days, an interruption every {every}",
        "",
        f"durable saves  every {found.interval_steps:,} steps ({seconds(found.interval_seconds)}), {mode}"
        + ("" if job.synchronous else f"; one takes {seconds(job.save)} to write, so no more often"),
        f"snapshots      every {found.snapshot_interval_steps:,} steps ({seconds(found.snapshot_interval_seconds)})"
        if job.snapshots
        else "snapshots      none",
        f"goodput        {percent(found.simulated_goodput)} simulated ({percent(found.simulated_low)} to "
        f"{percent(found.simulated_high)}), {percent(found.expected_goodput)} by the formula",
        "",
        f"{number(found.gpu_hours)} GPU-hours:",
    ]
    lines += [f"  {name:<30} {number(round(hours)):>14}  {percent(hours / found.gpu_hours):>7}" for name, hours in found.gpu_hours_by_use.items()]
    lines += ["", "failures in that time: " + ", ".join(f"{count:.1f} of {name}" for name, count in found.events.items()), ""]
    lines += [f"{'steps between durable saves':<28} {'formula':>8} {'simulated':>10}"]
    lines += [f"{steps:>28,} {percent(expected):>8} {percent(simulated):>10}" for steps, expected, simulated in found.by_interval]
    lines += ["", f"{args.simulations} simulations of {len(found.by_interval) + 1} plans in {seconds(found.simulation_seconds)}"]
    return "\n".join(lines)


def _given(args: argparse.Namespace, name: str, default: float) -> float:
    value = getattr(args, name.replace("-", "_"))
    return default if value is None else float(value)


def _refuse_negative(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if not value >= 0 or (value == inf and not name.endswith("hours")):
            raise ConfigurationError(f"--{name} {value:g} is not a number of 0 or more")
