"""What a job of some size is worth, how often it should save, and what that costs (pure).

Failures are of four kinds, each memoryless: a process (an exception, a hang, a crash that a restart on the spot cures), a
node (which is replaced), a rack with all its nodes, and the storage, which is away for a while. A process's failure leaves
the snapshots in its node's memory; a node's are kept by a peer if there are replicas; a rack takes both.

``best_intervals`` are Young's and Daly's: the square root of 2 x what a save costs the loop x the mean time between the
failures that need it. An asynchronous save costs the loop little, so the interval of the durable tier is rather bounded by
how long a save takes to write. ``expected_goodput`` is the closed form to first order; ``steps.simulation`` checks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from steps.simulation import Kind, Policy

HOUR = 3600.0
LONGEST_INTERVAL = 24 * HOUR
"""Where hardly any failure needs a tier, save once a day all the same."""


@dataclass(frozen=True)
class Cluster:
    """How large it is, and how often its parts fail (hours between failures of one part; infinite: never)."""

    gpus: int
    gpus_per_node: int
    nodes_per_rack: int
    process_mtbf_hours: float
    """Of one GPU's process."""
    node_mtbf_hours: float
    rack_mtbf_hours: float
    storage_mtbf_hours: float
    storage_outage_seconds: float

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def racks(self) -> int:
        return -(-self.nodes // self.nodes_per_rack)

    def rates(self) -> tuple[float, float, float, float]:
        """Failures a second of processes, nodes, racks and the storage."""
        parts = (self.gpus, self.nodes, self.racks, 1)
        hours = (self.process_mtbf_hours, self.node_mtbf_hours, self.rack_mtbf_hours, self.storage_mtbf_hours)
        process, node, rack, storage = (count / (mtbf * HOUR) for count, mtbf in zip(parts, hours, strict=True))
        return process, node, rack, storage


@dataclass(frozen=True)
class Job:
    """What its parts cost, seconds."""

    step: float
    synchronous: bool
    save: float
    """Until a save is durable."""
    save_stall: float
    """What the loop waits for an asynchronous one."""
    load: float
    snapshot_stall: float
    """0 with ``snapshots`` off."""
    snapshots: bool
    replicas: bool
    detection: float
    process_restart: float
    node_restart: float
    rack_restart: float

    @property
    def stall(self) -> float:
        """What the loop waits for a durable save."""
        return self.save if self.synchronous else self.save_stall


def kinds(cluster: Cluster, job: Job) -> tuple[Kind, ...]:
    """The events of a simulation, in the order of ``Cluster.rates``."""
    return (
        Kind("process", job.detection + job.process_restart, job.snapshots),
        Kind("node", job.detection + job.node_restart, job.snapshots and job.replicas),
        Kind("rack", job.detection + job.rack_restart, keeps_snapshots=False),
        Kind("storage", outage=max(cluster.storage_outage_seconds, 1e-6)),
    )


def policy(job: Job, interval: float, snapshot_interval: float) -> Policy:
    """When the job saves, as the simulation takes it; intervals in seconds of work, a snapshot's 0 for none."""
    return Policy(
        interval, job.stall, job.save, job.load,
        snapshot_interval if job.snapshots else 0.0, job.snapshot_stall if job.snapshots else 0.0,
    )  # fmt: skip


def needs(cluster: Cluster, job: Job) -> tuple[float, float]:
    """Failures a second that resume from a snapshot, and from a durable checkpoint."""
    rates = cluster.rates()[:3]
    keep = [kind.keeps_snapshots for kind in kinds(cluster, job)[:3]]
    fast = sum(rate for rate, kept in zip(rates, keep, strict=True) if kept)
    return fast, sum(rates) - fast


def best_intervals(cluster: Cluster, job: Job) -> tuple[float, float]:
    """Work in seconds between durable saves, and between snapshots (0: none), in whole steps and at least one."""
    fast, slow = needs(cluster, job)
    durable = min(sqrt(2 * job.stall / slow), LONGEST_INTERVAL) if slow else LONGEST_INTERVAL
    durable = max(durable, 0.0 if job.synchronous else job.save)
    snapshot = min(sqrt(2 * job.snapshot_stall / fast), LONGEST_INTERVAL) if job.snapshots and fast else 0.0
    return whole_steps(durable, job.step), whole_steps(snapshot, job.step) if job.snapshots else 0.0


def whole_steps(seconds: float, step: float) -> float:
    return max(1, round(seconds / step)) * step


def expected_goodput(cluster: Cluster, job: Job, interval: float, snapshot_interval: float) -> float:
    """Work that stands over wall time, to first order in the failure rates."""
    how = policy(job, interval, snapshot_interval)
    slowdown = how.cycle / how.effective_interval if interval != inf else how.pace
    down = lost = 0.0
    rates = cluster.rates()
    for rate, kind in zip(rates[:3], kinds(cluster, job)[:3], strict=True):
        down += rate * kind.down
        if kind.keeps_snapshots:
            lost += rate * how.snapshot_interval / 2
        else:
            age = how.effective_interval / 2 + (job.save / slowdown if not job.synchronous else 0.0)
            # While the storage is away nothing becomes durable: what is newest ages.
            age += rates[3] * cluster.storage_outage_seconds * (cluster.storage_outage_seconds / 2 + job.save)
            down += rate * job.load
            lost += rate * age
    return max(0.0, (1 - down) / slowdown - lost)
