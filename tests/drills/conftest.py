"""The long drills use what the short ones use: the fork server, the runs and the clean run of tests/trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))

from fixtures import clean, forks, make_run, prepared, trainer

__all__ = ["clean", "forks", "make_run", "prepared", "trainer"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a drill, and takes its time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.drill)
            item.add_marker(pytest.mark.timeout(3600))
