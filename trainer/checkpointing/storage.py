"""Shared storage that is slower than it is, on purpose, to see on a small machine what slow storage does to a large one.

All ranks of a run share one token bucket, whatever they do, saves and loads alike: ``rate`` bytes go through it in a
second, in the order in which they were asked for. The bucket is a file that says until when it is taken; it is locked
only to be looked at. Bytes are asked for in small pieces, so that ranks take turns, and one that is killed leaves
nothing behind that the others would wait for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

PIECE_SECONDS = 0.05
LONGEST_QUEUE_SECONDS = 60.0
"""A bucket that is taken for longer was written before the clock was set back: who asks has one piece in it at a time,
so that twelve hundred would have to ask at once."""


@dataclass(frozen=True)
class Storage:
    """The storage of one run; ``bytes_per_second`` 0 is the storage as it is. Picklable."""

    bucket: Path
    bytes_per_second: float

    def transfer(self, size: int) -> None:
        """Return when ``size`` bytes would have gone through."""
        if not self.bytes_per_second:
            return
        piece = max(1, int(self.bytes_per_second * PIECE_SECONDS))
        while size > 0:
            part = min(size, piece)
            time.sleep(self._take(part))
            size -= part

    def _take(self, size: int) -> float:
        """Take ``size`` bytes out of the bucket; returns the seconds until they are through."""
        fd = os.open(self.bucket, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            taken_until = 0.0
            with contextlib.suppress(ValueError):
                taken_until = float(os.pread(fd, 64, 0))
            now = time.time()
            if not now < taken_until < now + LONGEST_QUEUE_SECONDS:
                taken_until = now
            until = taken_until + size / self.bytes_per_second
            os.pwrite(fd, f"{until:<32.6f}".encode(), 0)
            return until - now
        finally:
            os.close(fd)
