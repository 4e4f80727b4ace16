"""Signs of life: by the loop in a step, by a thread in every longer phase until its limit."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from trainer.config import build
from trainer.recovery.base import Limits, Watch


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch(Limits.of(build({"heartbeat_timeout_seconds": 2, "gpus_per_node": 1})))
    watch.start()
    yield watch
    watch.close()


def beats_in(watch: Watch, seconds: float) -> int:
    count = 0

    def beat() -> None:
        nonlocal count
        count += 1

    watch.add(beat)
    time.sleep(seconds)
    watch.remove(beat)
    return count


def test_in_a_step_only_the_loop_beats_and_in_a_phase_a_thread_does_up_to_its_limit(watch: Watch) -> None:
    watch.step()
    assert beats_in(watch, 1.5) == 0
    with watch.phase(0.6):
        assert beats_in(watch, 2.5) <= 2  # (one each 0.4 s)
    with watch.phase(30):
        assert beats_in(watch, 1.5) >= 2
    assert beats_in(watch, 1.5) == 0


def test_a_phase_inside_a_longer_one_shortens_nothing(watch: Watch) -> None:
    """As a save in the first step, which may take as long as a start."""
    watch.enter(30)
    with watch.phase(0.1):
        assert beats_in(watch, 1.5) >= 2
    assert beats_in(watch, 1.5) >= 2
