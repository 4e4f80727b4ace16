"""Fixtures of the fault drills, short and long: one fork server for all tests, and runs in folders of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tier_world import ForkServerProcess, Run
from whole_run import Trainer, Training


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServerProcess]:
    """A fork server; its imports take seconds, so all tests share it."""
    server = ForkServerProcess.start(tmp_path_factory.mktemp("forks"))
    yield server
    server.stop()


@pytest.fixture
def make_run(forks: ForkServerProcess, tmp_path: Path) -> Callable[..., Run]:
    """Makes the run of this test; its arguments are those of ``Run.make``."""
    return lambda root=tmp_path, **values: Run.make(forks, root, **values)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The dataset of all whole runs."""
    return Trainer.prepare(tmp_path_factory.mktemp("dataset"))


@pytest.fixture
def trainer(prepared: Trainer) -> Iterator[Trainer]:
    """Starts whole runs; at the end of the test none of them is left."""
    yield prepared
    prepared.end()


@pytest.fixture(scope="session")
def clean(prepared: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run of two ranks that nothing happened to."""
    root = tmp_path_factory.mktemp("clean")
    training = prepared.run(root, recovery="none", checkpoint_mode="sync", snapshot_interval_steps=0)
    training.check_samples()
    return training
