"""The simulation against a slow one that ticks second by second, and the plan's formulas against the simulation."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steps.planning import Cluster, Job, best_intervals, expected_goodput, kinds, needs, policy
from steps.prediction import Costs, simulated_wall, walk
from steps.simulation import Kind, Policy, poisson_events, simulate
from trainer.config import RunConfig

DAY = 86400.0
PROCESS, NODE, STORAGE = Kind("process", down=3.0), Kind("node", down=7.0, keeps_snapshots=False), Kind("storage", outage=25.0)
KINDS = (PROCESS, NODE, STORAGE)


@dataclass
class Ticking:
    """The same rules, a second at a time; every cost is a whole number of seconds."""

    policy: Policy
    work: int = 0
    durable: int = 0
    snapshot: int = 0
    until: int = 0
    """Not training before this time."""
    loading: bool = False
    stalled: int = 0
    away_until: int = 0
    writing: tuple[int, int] | None = None
    lost: int = 0

    def tick(self, now: int, events: list[Kind]) -> None:
        if self.writing and now >= self.writing[1]:
            self.durable, self.writing = self.writing[0], None
        for event in events:
            self.strike(now, event)
        if now < self.until:
            return
        self.loading = False
        if self.stalled:
            self.stalled -= 1
        else:
            self.work += 1
            if self.policy.snapshot_interval and self.work % self.policy.snapshot_interval == 0:
                self.snapshot = self.work
            if self.work % self.policy.interval == 0 and self.writing is None:
                self.stalled = int(self.policy.stall)
                saved = self.work if now + 1 >= self.away_until else self.durable  # (it fails, and takes as long)
                self.writing = (saved, now + 1 + int(self.policy.write))

    def strike(self, now: int, event: Kind) -> None:
        if event.outage:
            self.away_until, self.writing, = max(self.away_until, now + int(event.outage)), None
            if now < self.until and self.loading:
                self.until = max(self.until, self.away_until + int(self.policy.load))
            else:
                self.stalled = 0
            return
        usable = event.keeps_snapshots and self.snapshot >= self.durable and self.snapshot > 0
        resume = self.snapshot if usable else self.durable
        self.loading = not usable and resume > 0
        self.until = now + int(event.down)
        if self.loading:
            self.until = max(self.until, self.away_until) + int(self.policy.load)
        self.lost += self.work - resume
        self.work, self.snapshot, self.stalled, self.writing = resume, self.snapshot if usable else 0, 0, None


@settings(deadline=None, max_examples=30)
@given(
    interval=st.integers(10, 80),
    stall=st.integers(0, 9),
    write=st.integers(0, 120),
    load=st.integers(0, 15),
    snapshots=st.sampled_from([0, 5, 7]),
    events=st.lists(st.tuples(st.integers(1, 990), st.integers(0, 2)), max_size=12, unique_by=lambda event: event[0]),
)
def test_it_is_what_happens_second_by_second(
    interval: int, stall: int, write: int, load: int, snapshots: int, events: list[tuple[int, int]]
) -> None:
    """Whatever strikes when: the same work stands, and the same is lost, to the second or two that an edge may move it."""
    write = max(write, stall)
    write += write > stall and (write - stall) % interval == 0  # (at the very moment that the next is due, either may be first)
    how = Policy(interval, stall, write, load, snapshots)
    ordered = sorted(events)
    slow = Ticking(how)
    for now in range(1000):
        slow.tick(now, [KINDS[kind] for at, kind in ordered if at == now])
    times = np.array([[float(at) for at, _ in ordered]]) if ordered else np.zeros((1, 0))
    which = np.array([[kind for _, kind in ordered]], dtype=np.int64) if ordered else np.zeros((1, 0), dtype=np.int64)
    outcome, _ = simulate(how, KINDS, times, which, 1000.0)
    assert 1000 * outcome.goodput[0] == pytest.approx(slow.work, abs=2)
    assert 1000 * outcome.lost_share[0] == pytest.approx(slow.lost, abs=2 + len(events))
    assert min(outcome.goodput[0], outcome.lost_share[0], outcome.down_share[0]) >= 0
    assert outcome.stall_share[0] > -1e-9


@pytest.mark.parametrize(("write", "every"), [(5, 10), (25, 30), (30.5, 40)])
def test_a_save_that_comes_due_while_one_is_written_is_skipped(write: float, every: float) -> None:
    how = Policy(10.0, 0.0, write, 0.0)
    assert how.effective_interval == every
    outcome, state = simulate(how, [NODE], np.array([[99.0]]), np.zeros((1, 1), dtype=np.int64), 106.0)
    begun = np.arange(10, 100, every)
    assert state.durable[0] == max(begun[begun + write <= 99]) == pytest.approx(106.0 * outcome.goodput[0])


def test_without_checkpoints_all_is_lost() -> None:
    outcome, _ = simulate(Policy(inf, 0.0, 0.0, 0.0), [NODE], np.array([[50.0]]), np.zeros((1, 1), dtype=np.int64), 100.0)
    assert outcome.goodput[0] == pytest.approx(0.43) and outcome.lost_share[0] == pytest.approx(0.5)


CLUSTER = Cluster(4096, 8, 16, 150_000.0, 9_400.0, 100_000.0, 720.0, 600.0)
JOB = Job(
    step=10.0, synchronous=False, save=60.0, save_stall=0.5, load=60.0, snapshot_stall=0.2, snapshots=True, replicas=True,
    detection=10.0, process_restart=10.0, node_restart=120.0, rack_restart=300.0,
)  # fmt: skip


def simulated(cluster: Cluster, job: Job, interval: float, snapshot: float, *, days: float = 30, runs: int = 24) -> float:
    events = poisson_events(cluster.rates(), days * DAY, runs, seed=1)
    outcome, _ = simulate(policy(job, interval, snapshot), kinds(cluster, job), *events, days * DAY)
    return float(outcome.goodput.mean())


@pytest.mark.parametrize("job", [JOB, replace(JOB, snapshots=False), replace(JOB, synchronous=True, snapshots=False), replace(JOB, replicas=False)])
@pytest.mark.parametrize("gpus", [512, 16_384])
def test_the_formula_is_what_the_simulation_finds(gpus: int, job: Job) -> None:
    """To half a point, and the best interval is one: neither a quarter nor four times it is better."""
    cluster = replace(CLUSTER, gpus=gpus)
    interval, snapshot = best_intervals(cluster, job)
    best = simulated(cluster, job, interval, snapshot)
    assert expected_goodput(cluster, job, interval, snapshot) == pytest.approx(best, abs=0.005)
    for factor in (0.25, 4.0):
        assert simulated(cluster, job, interval * factor, snapshot) <= best + 1e-4


def test_youngs_interval() -> None:
    """Every failure needs the durable tier: the root of 2 x stall x mean time between failures."""
    job = replace(JOB, synchronous=True, snapshots=False, step=1.0)
    _, slow = needs(CLUSTER, job)
    interval, snapshot = best_intervals(CLUSTER, job)
    assert interval == pytest.approx((2 * job.save / slow) ** 0.5, abs=0.5) and snapshot == 0


def test_an_asynchronous_save_comes_no_more_often_than_it_is_written() -> None:
    job = replace(JOB, snapshots=False, save=3000.0, save_stall=0.001)
    assert best_intervals(CLUSTER, job)[0] == 3000.0


def test_a_hundred_thousand_gpus_for_a_month() -> None:
    """With node, rack and storage failures; the bound is a minute."""
    cluster = replace(CLUSTER, gpus=100_000)
    began = time.monotonic()
    events = poisson_events(cluster.rates(), 30 * DAY, 16, seed=1)
    outcome, _ = simulate(policy(JOB, *best_intervals(cluster, JOB)), kinds(cluster, JOB), *events, 30 * DAY)
    assert time.monotonic() - began < 60
    assert all(outcome.events[name] > 0 for name in ("process", "node", "rack", "storage"))
    assert outcome.events["node"] == pytest.approx(12_500 / 9_400 * 720, rel=0.1)
    assert np.allclose(outcome.goodput + outcome.lost_share + outcome.down_share + outcome.stall_share, 1)
    assert float(outcome.goodput.std()) < 0.01 < float(outcome.goodput.mean()) < 0.99


def test_failures_are_drawn_as_often_as_their_rates_say() -> None:
    times, which = poisson_events((1 / 100, 1 / 1000), 10_000.0, 400, seed=3)
    real = np.isfinite(times)
    assert real.sum() / 400 == pytest.approx(110, rel=0.03)
    assert (which[real] == 1).mean() == pytest.approx(1 / 11, rel=0.1)
    assert np.all(np.diff(np.where(real, times, 1e9), axis=1) >= 0)
    assert np.array_equal(times, poisson_events((1 / 100, 1 / 1000), 10_000.0, 400, seed=3)[0])


COSTS = Costs(
    step=1.0, startup=5.0, save=6.0, save_stall=0.1, write=6.0, load=4.0, snapshot_stall=0.01,
    restart={"in_process": 0.5, "in_job": 2.0, "pod": 7.0}, detection={"exception": 0.0, "sigkill": 0.1, "hang": 3.0},
)  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(
    mode=st.sampled_from(["sync", "async", "off"]),
    recovery=st.sampled_from(["none", "in-job", "combined"]),
    snapshots=st.integers(0, 2),
    faults=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_two_predictions_of_one_run_agree(mode: str, recovery: str, snapshots: int, faults: int, seed: int) -> None:
    """The walk over its steps, and the simulation, which goes from fault to fault."""
    config = RunConfig.model_validate({
        "max_steps": 200, "checkpoint_mode": mode, "recovery": recovery, "checkpoint_interval_steps": 20,
        "snapshot_interval_steps": snapshots, "fault_count": faults, "fault_seed": seed, "fault_kinds": "exception,sigkill",
    })  # fmt: skip
    # A save that ends just when a fault strikes may be committed in the one and not in the other: an interval each time.
    edge = faults * config.checkpoint_interval_steps * COSTS.step if mode == "async" else 0.0
    assert simulated_wall(config, COSTS) == pytest.approx(walk(config, COSTS).now, abs=1.5 + edge)
