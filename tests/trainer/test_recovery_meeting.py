"""Process groups that are severed: whoever is blocked in gloo raises, and nobody else loses a connection."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest
from tier_world import RankError, Run

MakeRun = Callable[..., Run]


def test_a_store_that_was_joined_meanwhile_is_not_severed(make_run: MakeRun) -> None:
    """The in-process monitors connect to theirs just when the ranks make their process groups. Without a monitor, the
    next fault is never noticed."""
    with make_run().world(2) as world:
        for connected, alive, raised in world.all("sever_beside_a_store"):
            assert alive == connected
            assert raised


def test_a_rank_that_waits_for_a_dead_one_raises_at_once(make_run: MakeRun) -> None:
    with make_run().world(2) as world:
        first, second = world.members
        first.send("digest", {})  # a collective, for which the other never comes
        time.sleep(0.5)
        psutil.Process(second.pid).kill()
        began = time.monotonic()
        with pytest.raises(RankError, match="RuntimeError"):
            first.answer(20)
        assert time.monotonic() - began < 10
