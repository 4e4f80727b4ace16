"""Both tiers by real processes: what was saved is what is loaded, at any world size, whatever was changed meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tier_world import Run

MakeRun = Callable[..., Run]
SIZES = (1, 2, 4)


@pytest.mark.parametrize(("size", "mode"), [(1, "async"), (2, "async"), (4, "async"), (2, "sync")])
def test_a_checkpoint_loads_at_every_world_size(make_run: MakeRun, size: int, mode: str) -> None:
    run = make_run(checkpoint_mode=mode)
    with run.world(size) as world:
        world.all("fill", step=7)
        saved = world.one("digest")
        world.all("save", step=7)
        world.all("finish")
    assert run.committed() == [7]
    for other in SIZES:
        with run.world(other) as world:
            assert world.one("resume") == [7, "durable"]
            assert world.one("digest") == saved


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_changes_right_after_the_call_is_not_saved(make_run: MakeRun, mode: str) -> None:
    run = make_run(checkpoint_mode=mode, snapshot_interval_steps=5, checkpoint_interval_steps=10, width=64)
    with run.world(2) as world:
        for step in (5, 10):
            world.all("fill", step=step)
            saved = world.one("digest")
            world.all("save", step=step, spoil=True)  # parameters, moments and AdamW's step, in place
        assert world.one("digest") != saved
        world.all("finish")
        assert world.one("resume") == [10, "snapshot"]
        assert world.one("digest") == saved
    run.paths.snapshots(run.config.snapshot_root, 0).rename(run.paths.root / "gone")
    with run.world(2) as world:
        assert world.one("resume") == [10, "durable"]
        assert world.one("digest") == saved


def test_state_survives_an_in_process_restart_and_a_lost_process(make_run: MakeRun) -> None:
    run = make_run(snapshot_interval_steps=2, checkpoint_interval_steps=5)
    with run.world(2) as world:
        world.all("train", first=1, last=7)  # (a save at the last step: durable)
        world.all("enter")
        assert world.one("resume") == [7, "durable"]
        world.all("fill", step=8)
        saved = world.one("digest")
        world.all("save", step=8)
        world.all("spoil")
        world.all("enter")
        assert world.one("resume") == [8, "snapshot"]
        assert world.one("digest") == saved
    with run.world(2, cycle=1) as world:
        assert world.one("resume") == [8, "snapshot"]
        assert world.one("digest") == saved
