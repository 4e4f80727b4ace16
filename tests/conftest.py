"""For all tests: GPUs are seen by a run of those that need one (``pytest -m gpu``) only: the others start more ranks than a
machine may have GPUs, and a process that has asked its driver once no longer heeds ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

import os
import re

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not re.search(r"(?<!\bnot )\bgpu\b", config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
