"""A script of a part as torchrun starts it, once a rank."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

LIMIT = 460.0
"""Seconds: a part has 8 minutes."""


def torchrun(gpus: int, script: str, *arguments: str, **environment: str) -> None:
    """Run ``script`` on ``gpus`` ranks to its end. ``CalledProcessError`` when it fails, ``TimeoutExpired`` when it has not
    ended after ``LIMIT``; the ranks have then."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", script, *arguments]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "4"} | environment) as process:
        try:
            code = process.wait(LIMIT)
        except BaseException:
            process.terminate()  # torchrun ends its ranks, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)
