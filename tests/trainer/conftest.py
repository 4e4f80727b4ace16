"""Fixtures of the fault drills; they live in ``fixtures``, where the long ones (tests/drills) find them too."""

from __future__ import annotations

import signal

from fixtures import clean, forks, make_run, prepared, trainer

__all__ = ["clean", "forks", "make_run", "prepared", "trainer"]

# What starts the tests may have these ignored (nohup, a shell's background), which every process below would inherit.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
