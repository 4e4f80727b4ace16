"""SIGKILL of random processes at random points of saves, again and again; what must hold after each. Not a test.

A world of ranks saves without a pause. After a random time one of its processes, a rank or a writer, is killed. A dead
writer must not stop the saving. A dead rank ends the world, as its launcher would, and the next world must resume at a
step that is no older than the newest one that was committed, and hold that step's values exactly.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil
from tier_world import RankError, Run, World, wait_until

LONGEST_LIFE = 0.7
"""Seconds until the next kill, at most."""


@dataclass
class Tally:
    """What was killed, and where training resumed from."""

    killed: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
    torn: int = 0
    """Kills that left a save unfinished."""


def newest_committed(run: Run, size: int) -> int:
    """The newest step that was committed in either tier, by the events and by the directories."""
    whole: Counter[int] = Counter()
    for event in run.events("commit"):
        if event.data["tier"] == "snapshot":
            whole[int(str(event.data["step"]))] += 1
    # (a step that was saved twice may count too often, but then it was whole once)
    snapshot = max((step for step, count in whole.items() if count >= size), default=0)
    return max([snapshot, *run.committed()])


def check_resume(run: Run, world: World, least: int) -> tuple[int, str]:
    """Resume; at ``least`` at that step, and with exactly its values."""
    step, tier = world.one("resume")
    assert step >= least, f"resumed at {step} from {tier}, but {least} was committed"
    if step:
        found = world.one("digest")
        world.all("fill", step=step)
        assert found == world.one("digest"), f"step {step} from {tier} is not what was saved"
    assert not run.events("checkpoint_refused")
    return step, tier


def drill(run: Run, kills: int, seed: int, size: int = 2) -> Tally:
    """Kill ``kills`` times."""
    draw = random.Random(seed)
    tally = Tally()
    cycle = 0
    while tally.killed.total() < kills:
        with run.world(size, cycle=cycle) as world:
            step, tier = check_resume(run, world, newest_committed(run, size))
            tally.tiers[tier] += 1
            world.begin("train", first=step + 1, last=step + 100_000)
            wait_until(lambda world=world: len(world.writers()) == size, "all ranks save")  # type: ignore[misc]
            while True:
                time.sleep(draw.uniform(0.02, LONGEST_LIFE))
                workers, writers = world.workers(), world.writers()
                victim = draw.choice(draw.choice([workers, writers]) or workers)
                tally.torn += any(run.paths.checkpoints.glob(".tmp-*"))
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
                kind = "rank" if victim in workers else "writer"
                tally.killed[kind] += 1
                if kind == "rank" or tally.killed.total() >= kills:
                    break
                before = max(run.committed(), default=0)
                wait_until(lambda before=before: max(run.committed(), default=0) > before, "saving goes on")  # type: ignore[misc]
            with contextlib.suppress(RankError, EOFError, TimeoutError, ConnectionError):
                world.answers(0.05)
        cycle += 1
    with run.world(1) as world:  # and at last at another world size, from the durable tier
        check_resume(run, world, max(run.committed(), default=0))
    return tally
