"""For all tests: on a machine with GPUs only those marked ``gpu`` see them; the others start more ranks than it may have."""

from __future__ import annotations

import os

import pytest

VISIBLE = "CUDA_VISIBLE_DEVICES"
GIVEN = os.environ.get(VISIBLE)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, since those start processes too."""
    if item.get_closest_marker("gpu") is None:
        os.environ[VISIBLE] = ""
    elif GIVEN is None:
        os.environ.pop(VISIBLE, None)
    else:
        os.environ[VISIBLE] = GIVEN
