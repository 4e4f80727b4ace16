"""The checkpoints of a run on storage, as rank 0 finds them: which there are to load, and what becomes of the others."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from trainer.checkpointing.loading import MISSING, patiently
from trainer.checkpointing.removal import remove_strays
from trainer.errors import DataError
from trainer.events import EventLog
from trainer.paths import CHECKPOINT_NAME, MANIFEST, RunPaths
from trainer.records import CheckpointManifest, RunRecord

REASON = "refused.txt"
"""Left in a quarantined checkpoint: why it is there."""


class Catalog:
    """What lies in the checkpoint directory of one run."""

    def __init__(self, record: RunRecord, paths: RunPaths, events: EventLog) -> None:
        self._record = record
        self._paths = paths
        self._events = events
        self.replace: set[str] = set()
        """Names of checkpoints that were refused: a new one of that name takes their place."""

    def survey(self, attempt: int, busy: Path | None) -> tuple[list[int], list[str]]:
        """The steps whose manifests are good, newest first, and why others are not. Removes what interrupted saves and removals
        have left, but for ``busy``, the directory of one in flight, and for what an attempt newer than ``attempt`` is writing."""
        steps, refused = [], []
        if not self._paths.checkpoints.is_dir():
            return [], []
        remove_strays(self._paths, attempt, busy)
        for path in sorted(self._paths.checkpoints.iterdir(), reverse=True):
            match = CHECKPOINT_NAME.match(path.name)
            if match is None:
                continue
            reason = self._wrong(path) and self._wrong(path)  # twice: a network file system may take a moment
            if reason and path.exists():
                self._events.emit("checkpoint_refused", path=str(path), reason=reason)
                refused.append(f"{path.name}: {reason}")
                self.quarantine(path, reason)
            elif not reason:
                steps.append(int(match[1]))
        if not steps:
            named = {reason.partition(":")[0] for reason in refused}
            refused += [reason for reason in self._quarantined() if reason.partition(":")[0] not in named]
        return steps, refused

    def quarantine(self, path: Path, reason: str) -> None:
        """Move a checkpoint out of the way. Where that cannot be (a full disk), the save of that step will replace it."""
        self.replace.add(path.name)
        target = self._paths.quarantine / f"{path.name}-{time.time_ns()}"
        with contextlib.suppress(OSError):
            self._paths.quarantine.mkdir(exist_ok=True)
            path.rename(target)
            self._events.emit("quarantined", path=str(target), reason=reason)
            (target / REASON).write_text(reason + "\n")

    def _quarantined(self) -> list[str]:
        """What earlier starts have refused. It still counts: a run that had checkpoints never begins from scratch."""
        if not self._paths.quarantine.is_dir():
            return []
        found = []
        for path in sorted(self._paths.quarantine.iterdir()):
            try:
                reason = (path / REASON).read_text().strip()
            except OSError:
                reason = "it was quarantined"
            found.append(f"{path.name.rpartition('-')[0]}: {reason}")
        return found

    def _wrong(self, path: Path) -> str:
        """Why the manifest of ``path`` is not one to load, or nothing. Cheap: sizes, not hashes."""
        try:
            manifest = patiently(lambda: CheckpointManifest.read(path / MANIFEST))
        except MISSING:
            return "it has no manifest"
        except DataError as error:
            return str(error)
        if manifest.run_id != self._record.config.run_id:
            return f"it belongs to run {manifest.run_id}"
        if manifest.config_digest != self._record.config_digest:
            return "it was made with another configuration"
        if path != self._paths.checkpoint(manifest.step):
            return f"its manifest is of step {manifest.step}"
        for file in manifest.files:
            if Path(file.name).is_absolute() or ".." in Path(file.name).parts:
                return f"its manifest names a foreign path {file.name}"
            try:
                size = patiently((path / file.name).stat).st_size
            except MISSING:
                return f"{file.name} is missing"
            if size != file.size:
                return f"{file.name} has {size} bytes, its manifest says {file.size}"
        return ""
