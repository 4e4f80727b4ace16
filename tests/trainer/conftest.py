"""Fixtures of the fault drills; they live in ``fixtures``, where the long ones (tests/drills) find them too."""

from __future__ import annotations

from fixtures import clean, forks, make_run, prepared, trainer

__all__ = ["clean", "forks", "make_run", "prepared", "trainer"]
