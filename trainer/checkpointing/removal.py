"""What goes from the checkpoint directory: the oldest checkpoints, and what interrupted saves and removals have left."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from trainer.paths import CHECKPOINT_NAME, RunPaths

REMOVED = ".old-"
STRAY_NAME = re.compile(r"^(?:\.tmp-\d+-(\d+)-.*|\.old-.*)$")
"""``.tmp-<step>-<attempt>-<nonce>``: a save; ``.old-<name>``: a removal."""


def retain(paths: RunPaths, keep: int) -> None:
    """Remove all but the newest ``keep`` committed checkpoints."""
    committed = sorted(path for path in paths.checkpoints.iterdir() if CHECKPOINT_NAME.match(path.name))
    for path in committed[:-keep]:
        discard(path)


def remove_strays(paths: RunPaths, attempt: int, busy: Path | None) -> None:
    """Remove what interrupted saves and removals have left, but for ``busy`` and for what a newer attempt is writing."""
    for path in paths.checkpoints.iterdir():
        match = STRAY_NAME.match(path.name)
        if match and path != busy and int(match[1] or 0) <= attempt:
            discard(path)


def discard(directory: Path) -> None:
    """Remove a checkpoint, or what a save has left. It loses its name first: so no checkpoint is half there; and a writer that was given
    up may be about to rename what it wrote into one, and of the two renames one comes first and the other finds nothing."""
    doomed = directory
    if not directory.name.startswith(REMOVED):
        doomed = directory.with_name(f"{REMOVED}{directory.name}")
        try:
            directory.rename(doomed)
        except OSError:
            return
    shutil.rmtree(doomed, ignore_errors=True)
