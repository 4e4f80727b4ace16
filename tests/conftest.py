"""For all tests: who sees GPUs, and which cores a worker of pytest-xdist runs on."""

from __future__ import annotations

import os
import re

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not re.search(r"(?<!\bnot )\bgpu\b", config.getoption("markexpr")):
        _hide_gpus()
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        _share_cores(int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


def _hide_gpus() -> None:
    """GPUs are seen by a run of those tests that need one (``pytest -m gpu``) only: the others start more ranks than a machine
    may have GPUs, and a process that has asked its driver once no longer heeds ``CUDA_VISIBLE_DEVICES``."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _share_cores(worker: int, workers: int) -> None:
    """Cores of its own for each worker and what it starts, where there are two for each. A rank computes with as many threads
    as it sees cores: with 32 for each of a dozen tests, each waits for all of its own, a step took 6 s, and ranks were taken for hung."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // workers
    if each >= 2:
        os.sched_setaffinity(0, cores[worker * each : (worker + 1) * each])
