"""Which rank checks which file of a checkpoint."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpointing.loading import shares

FILES = st.dictionaries(st.sampled_from([f"__{rank}_{part}.distcp" for rank in range(4) for part in range(2)]), st.integers(1, 9))


@given(st.lists(FILES, min_size=1, max_size=6))
def test_every_file_is_checked_once_by_one_that_reads_it(wanted: list[dict[str, int]]) -> None:
    checks = shares(wanted)
    assert len(checks) == len(wanted)
    checked = sorted(name for one in checks for name in one)
    assert checked == sorted({name for one in wanted for name in one})
    for one, mine in zip(wanted, checks, strict=True):
        assert mine <= one.keys()


def test_at_the_world_size_of_the_save_each_checks_its_own() -> None:
    """Though each needs a little of every file."""
    world = 64
    wanted = [{f"__{rank}_0.distcp": 1_000_000 if rank == me else 4 for rank in range(world)} for me in range(world)]
    assert shares(wanted) == [{f"__{me}_0.distcp"} for me in range(world)]


def test_at_another_the_work_is_shared() -> None:
    """Two files read by four ranks, and four by two."""
    assert sorted(map(len, shares([{"a": 5}, {"a": 5}, {"b": 5}, {"b": 5}]))) == [0, 0, 1, 1]
    assert sorted(map(len, shares([{"a": 5, "b": 5, "c": 5, "d": 5}] * 2))) == [2, 2]
