"""Progress of a step: short lines for people, ``n/m`` for Argo (in the file that ARGO_PROGRESS_FILE names)."""

from __future__ import annotations

import contextlib
import threading
import time

from trainer.environment import progress_file

MEGABYTE = 1_000_000
SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_REPORTS = 1.0


def report(done: int, total: int) -> None:
    """Tell Argo ``done/total``. Progress is a courtesy: a file that cannot be written stops nobody."""
    path = progress_file()
    if path is None or total <= 0:
        return
    with contextlib.suppress(OSError):
        path.write_text(f"{max(0, min(done, total))}/{total}\n")


class ByteProgress:
    """Counts bytes of work, from any thread; ``total`` may grow while it runs."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0
        self._phase = ""
        self._phase_total = 0
        self._phase_done = 0
        self._phase_start = self._last_line = self._last_report = time.monotonic()

    def say(self, message: str) -> None:
        print(f"{self._prefix}: {message}", flush=True)

    def expect(self, size: int) -> None:
        """``size`` more bytes of work lie ahead, in whatever phase."""
        with self._lock:
            self._total += size

    def phase(self, name: str, size: int) -> None:
        """From now on ``name`` is being done to ``size`` bytes (which ``expect`` has announced)."""
        with self._lock:
            self._phase, self._phase_total, self._phase_done = name, size, 0
            self._phase_start = self._last_line = time.monotonic()

    def advance(self, size: int) -> None:
        """``size`` more bytes are done (negative: must be done again)."""
        with self._lock:
            self._done += size
            self._phase_done += size
            now = time.monotonic()
            line = now - self._last_line >= SECONDS_BETWEEN_LINES
            if line:
                self._last_line = now
            if line or now - self._last_report >= SECONDS_BETWEEN_REPORTS:
                self._last_report = now
                report(_megabytes(self._done), max(1, _megabytes(self._total)))
            if line:
                rate = self._phase_done / MEGABYTE / max(1e-9, now - self._phase_start)
                self.say(
                    f"{self._phase} {size_text(self._phase_done)} of {size_text(self._phase_total)}, {rate:.1f} MB/s"
                )

    def finish(self) -> None:
        total = max(1, _megabytes(self._total))
        report(total, total)


def size_text(size: int) -> str:
    """``size`` bytes as people read it: 12.3 MB."""
    if size < 1000:
        return f"{size} B"
    if size < MEGABYTE:
        return f"{size / 1000:.1f} kB"
    if size < 1000 * MEGABYTE:
        return f"{size / MEGABYTE:.1f} MB"
    return f"{size / MEGABYTE / 1000:.2f} GB"


def _megabytes(size: int) -> int:
    return -(-size // MEGABYTE)
