"""What the fork server is asked for in test_recovery_fork_server. Not a test."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

LIFETIME = 60


def idle() -> int:
    """Say who it is, then wait for whatever comes."""
    Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(LIFETIME)
    return 0


def end() -> int:
    """End as told: with a code, an error, or by a signal."""
    how = sys.argv[1]
    if how == "raise":
        raise RuntimeError("as told")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit("a message")
    return int(how)


def show() -> int:
    """What a program sees of its surroundings."""
    print(Path.cwd(), os.environ["COLOUR"], sys.argv[1:], os.environ.get("FORK_TEST_SERVER", "none"), flush=True)
    return 0


def predecessor() -> int:
    """Who had its place before."""
    print(os.environ["HOLDFAST_PREDECESSOR"], flush=True)
    return 0
