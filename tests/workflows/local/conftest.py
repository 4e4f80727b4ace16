"""Fixtures of the local engine's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory that tasks see, since it is not in /tmp, of which each has its own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)
