"""A dozen SIGKILLs at random points of saves (hundreds: `make drills`), and what saving costs the loop and its memory."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from kill_drill import drill
from tier_world import Run, wait_until

MakeRun = Callable[..., Run]


def test_a_dozen_kills_lose_no_committed_step(make_run: MakeRun) -> None:
    run = make_run(width=64, snapshot_interval_steps=2, checkpoint_interval_steps=3)
    tally = drill(run, kills=12, seed=1)
    assert tally.killed["rank"] >= 3 and tally.killed["writer"] >= 3, tally


def test_saving_takes_no_memory_and_little_of_the_loops_time(make_run: MakeRun) -> None:
    """With a state of twice the tiny model's size. Processor time of the loop's thread, as this machine may be busy."""
    run = make_run(width=192, keep_checkpoints=1)
    with run.world(1) as world:
        resident: list[int] = []
        waited: list[float] = []
        for step in range(1, 21):
            waited += world.all("save_cost", step=step)
            assert all(world.all("settle"))
            (writer,) = world.writers()
            resident.append(world.one("memory") + writer.memory_info().rss)
        assert run.committed() == [20]
        size = int(str(run.events("commit")[0].data["bytes"]))
        growth = (resident[-1] - resident[5]) / (20 - 6)  # the first ones warm up
        assert growth < 0.01 * size, f"{growth / 2**20:.2f} MiB a save, of {size / 2**20:.0f} MiB"
        assert median(waited[5:]) < 0.05, waited


def test_the_writer_ends_with_its_owner(make_run: MakeRun) -> None:
    run = make_run()
    with run.world(2) as world:
        world.all("save", step=1)
        assert all(world.all("settle"))
        first, second = world.workers()
        assert len(world.writers()) == 2
        first.kill()
        wait_until(lambda: len(world.writers()) == 1, "the writer of a killed rank is gone", 10)
        second.suspend()  # as in a hang
        second.kill()
        wait_until(lambda: not world.writers(), "the writer of a killed rank is gone", 10)
