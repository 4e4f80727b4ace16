"""Whether restarts get a run anywhere: after some in a row that did not, it stops with 76 instead of trying for ever.

Rank 0 keeps the furthest completed step in a small file. At every entry into training, of whatever layer,
it compares that and the newest commit with what the last entry saw.
"""

from __future__ import annotations

import contextlib
import os
import sys

from pydantic import BaseModel, ValidationError

from trainer.errors import DataError, NoProgressError
from trainer.paths import CHECKPOINT_NAME, RunPaths
from trainer.records import Record

RECORD_BYTES = 256


class Progress(Record):
    """``progress.json``: what the last entry saw."""

    furthest: int = -1
    committed: int = -1
    fruitless: int = 0
    entries: int = 0
    world_size: int = 0


class Now(BaseModel):
    """How far a run is, as its rank 0 last said."""

    furthest: int = -1
    step: int = -1
    loss: float = 0.0
    tokens_per_second: float = 0.0


class Ledger:
    """The progress of a run, kept by rank 0."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._furthest = max(read_now(paths).furthest, 0)
        self._before: Progress | None = None
        self._fd = os.open(paths.furthest, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def enter(self, limit: int, world_size: int) -> int:
        """Note an entry; how many restarts in a row have advanced nothing. ``NoProgressError`` when they are ``limit``.

        One at another world size does not count: nodes came late or left, and nothing need be wrong with the run.
        """
        before, committed = self._look()
        now = (self._furthest, committed)
        advanced = now[0] > before.furthest or now[1] > before.committed
        counts = world_size == before.world_size or not before.entries
        fruitless = 0 if advanced else before.fruitless + counts
        progress = Progress(
            furthest=now[0], committed=now[1], fruitless=fruitless, entries=before.entries + 1, world_size=world_size
        )
        self._before = progress
        try:
            progress.write(self._paths.progress)
        except OSError as error:  # a full disk is no reason not to train
            print(f"{self._paths.progress} could not be written: {error.strerror}", file=sys.stderr, flush=True)
        if fruitless >= limit:
            raise NoProgressError(
                f"{fruitless} restarts in a row got no further than step {now[0]} (newest commit: {now[1]}); "
                "look at the last errors in the logs; raise --no-progress-restarts to try more often"
            )
        return fruitless

    def _look(self) -> tuple[Progress, int]:
        """What the last entry saw, and the newest commit. A process that can open no file any more goes by what it saw itself."""
        try:
            try:
                before = Progress.read(self._paths.progress)
            except (FileNotFoundError, DataError):
                before = Progress()
            return before, newest_commit(self._paths)
        except OSError:
            if self._before is None:
                raise
            return self._before, self._before.committed

    def completed(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Rewrite the file in place: one small write, which a reader sees whole or finds unreadable for a moment."""
        self._furthest = max(step, self._furthest)
        now = Now(furthest=self._furthest, step=step, loss=loss, tokens_per_second=tokens_per_second)
        with contextlib.suppress(OSError):  # (a full disk)
            os.pwrite(self._fd, now.model_dump_json().encode().ljust(RECORD_BYTES), 0)


def read_now(paths: RunPaths) -> Now:
    """What rank 0 last said; the defaults where it has not said anything."""
    try:
        return Now.model_validate_json(paths.furthest.read_bytes())
    except (FileNotFoundError, ValidationError):
        return Now()


def read_entries(paths: RunPaths) -> int:
    """How many times training was entered, of whatever layer."""
    try:
        return Progress.read(paths.progress).entries
    except (FileNotFoundError, DataError):
        return 0


def newest_attempt(paths: RunPaths) -> int:
    """The number in the fence; 0 where none was taken."""
    try:
        return int(paths.fence.read_text())
    except (FileNotFoundError, ValueError):
        return 0


def newest_commit(paths: RunPaths) -> int:
    """The step of the newest directory with a checkpoint's final name, -1 if there is none."""
    if not paths.checkpoints.is_dir():
        return -1
    return max((int(m[1]) for p in paths.checkpoints.iterdir() if (m := CHECKPOINT_NAME.match(p.name))), default=-1)
