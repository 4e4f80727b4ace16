"""Memory and time of the loop over many saves of a large and of a tiny state."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from tier_world import Run

MakeRun = Callable[..., Run]
SAVES = 50


def slope(values: list[int]) -> float:
    """Of the least-squares line through equally spaced values, per value."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    above = sum((index - middle) * (value - mean) for index, value in enumerate(values))
    return above / sum((index - middle) ** 2 for index in range(len(values)))


def test_fifty_saves_of_a_hundred_megabytes_take_no_more_memory_than_one(make_run: MakeRun) -> None:
    run = make_run(width=704, keep_checkpoints=1, snapshot_interval_steps=1, save_timeout_seconds=120)
    with run.world(1) as world:
        resident: list[int] = []
        for step in range(1, SAVES + 1):
            world.all("save", step=step)
            assert world.all("settle", seconds=120) == [True]
            (writer,) = world.writers()
            resident.append(world.one("memory") + writer.memory_info().rss)
        assert run.committed() == [SAVES]
    size = int(str(run.events("commit")[-1].data["bytes"]))
    assert size >= 100 << 20
    grown = slope(resident[5:])
    assert grown < 0.01 * size, f"{grown / 2**20:.3f} MiB a save, of {size / 2**20:.0f} MiB: {resident}"


def test_the_loop_waits_less_than_fifty_milliseconds_for_a_save_of_the_tiny_model(make_run: MakeRun) -> None:
    run = make_run(width=128, snapshot_interval_steps=1)
    with run.world(2) as world:
        waited = []
        for step in range(1, SAVES + 1):
            waited.append(max(world.all("save", step=step)))
            assert all(world.all("settle"))
    assert median(waited[3:]) < 0.05, waited
