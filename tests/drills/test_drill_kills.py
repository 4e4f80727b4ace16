"""Hundreds of SIGKILLs at random points of saves, over both tiers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kill_drill import drill
from tier_world import Run

MakeRun = Callable[..., Run]


@pytest.mark.parametrize(
    ("size", "width", "snapshots", "kills"),
    [(2, 128, 1, 70), (2, 256, 0, 70), (4, 128, 2, 40), (1, 256, 3, 30)],
)
def test_kills_at_random_points_lose_no_committed_step(
    make_run: MakeRun, size: int, width: int, snapshots: int, kills: int
) -> None:
    run = make_run(width=width, snapshot_interval_steps=snapshots, gpus_per_node=size, micro_batch_size=1)
    tally = drill(run, kills=kills, seed=size * 1000 + width, size=size)
    assert tally.killed.total() == kills and tally.torn > kills / 5, tally
