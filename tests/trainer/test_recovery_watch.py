"""Signs of life: by the loop in a step, by a thread in every longer phase until its limit."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from tier_world import REPOSITORY

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

    time.sleep(0.2)  # (the sign of life of a step itself, which the thread gives)
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


def test_the_loop_itself_sends_nothing(watch: Watch) -> None:
    """A restart's exception may come in the midst of it, and half a message ends the connection."""
    senders: list[int] = []
    watch.add(lambda: senders.append(threading.get_ident()))
    watch.step()
    with watch.phase(30):
        time.sleep(0.2)
    time.sleep(0.2)
    assert len(senders) >= 2 and threading.get_ident() not in senders


def test_a_process_that_has_lost_a_watchdog_ends() -> None:
    """Nobody would notice if it hung; whoever started it starts another."""
    program = """
import time
from trainer.config import build
from trainer.recovery.base import Limits, Watch
watch = Watch(Limits.of(build({"gpus_per_node": 1})))
watch.start()
watch.add(lambda: 1 / 0)
watch.step()
time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9
    assert "has lost a watchdog (ZeroDivisionError: division by zero), and ends itself" in done.stderr
