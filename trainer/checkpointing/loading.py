"""Reading a checkpoint back: what each rank needs of it, who checks which file, and the reading itself.

Every file that is read is checked against its manifest before any tensor is touched, and by one rank: replicated tensors
are spread over the files of all ranks, so that each rank needs a little of every file, and to check all it needs would have
each of N ranks read the whole checkpoint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan

from trainer.checkpointing.storage import Storage
from trainer.errors import UnavailableError
from trainer.paths import MANIFEST
from trainer.records import CheckpointManifest, FileRecord, file_sha256

METADATA = ".metadata"


MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
PATIENCE_SECONDS = 20.0
"""A client that the file system has thrown out is back within seconds."""

T = TypeVar("T")


class Refused(Exception):
    """The checkpoint cannot be loaded; the reason is its text."""


def patiently(act: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """``act()``, asked again for ``seconds`` while the file system does not do its part. Raises ``UnavailableError`` then.

    That a file is not there is an answer, and raised at once.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act()
        except MISSING:
            raise
        except OSError as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the file system does not give {error.filename or 'a checkpoint'} ({error.strerror}); is the mount in order?"
                ) from error
            time.sleep(1.0)


@dataclass(frozen=True)
class Reading:
    """What one rank is about to read of one checkpoint."""

    path: Path
    files: dict[str, FileRecord]
    reader: FileSystemReader
    planner: DefaultLoadPlanner
    plan: LoadPlan
    wanted: dict[str, int]
    """File -> bytes that this rank needs of it."""

    @classmethod
    def prepare(cls, path: Path, tensors: Mapping[str, Tensor], storage: Storage) -> Reading:
        """Plan the reading of ``path`` into ``tensors``. Raises ``Refused``."""
        try:
            files = {file.name: file for file in patiently(lambda: CheckpointManifest.read(path / MANIFEST)).files}
            check(path, [METADATA], files, storage)  # before it is unpickled
            live: dict[str, Any] = dict(tensors)
            reader, planner = FileSystemReader(path), DefaultLoadPlanner()
            metadata = reader.read_metadata()
            planner.set_up_planner(live, metadata, is_coordinator=True)
            reader.set_up_storage_reader(metadata, is_coordinator=True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
        except (Refused, UnavailableError):
            raise
        except Exception as error:  # torch's planner raises what it likes over metadata that do not fit the model
            raise Refused(f"{type(error).__name__}: {error}"[:500]) from error
        wanted: Counter[str] = Counter()
        for item in plan.items:
            stored = metadata.storage_data[item.storage_index]
            wanted[stored.relative_path] += stored.length
        return cls(path, files, reader, planner, plan, dict(wanted))

    def check(self, mine: set[str], storage: Storage) -> None:
        """Check the files that are this rank's to check. Raises ``Refused``."""
        check(self.path, sorted(mine), self.files, storage)

    def read(self, checked: set[str], storage: Storage) -> None:
        """Bring the stored values into the live tensors. Raises ``Refused`` for a file that is gone, and whatever else
        there is over files that have been found good."""
        storage.transfer(sum(size for name, size in self.wanted.items() if name not in checked))
        plan = self.planner.create_global_plan([self.plan])[0]
        try:
            self.reader.read_data(self.planner.finish_plan(plan), self.planner).wait()
        except FileNotFoundError as error:
            raise Refused(str(error)) from error


def check(path: Path, names: Sequence[str], files: Mapping[str, FileRecord], storage: Storage) -> None:
    """Compare files with their records in the manifest, whole. Raises ``Refused``."""
    for name in names:
        if name not in files:
            raise Refused(f"{name} is not in its manifest")
        storage.transfer(files[name].size)
        try:
            digest = patiently(partial(file_sha256, path / name))
        except MISSING as error:
            raise Refused(f"{name}: {error.strerror}") from error
        except UnavailableError as error:
            patiently((path / MANIFEST).read_bytes)  # (raises where it is not this file, but the file system)
            raise Refused(str(error)) from error
        if digest != files[name].sha256:
            raise Refused(f"{name} does not have the SHA-256 of its manifest")


def shares(wanted: Sequence[Mapping[str, int]]) -> list[set[str]]:
    """Which files each rank checks: every file goes to one of those that read most of it, the least burdened of them.

    ``wanted``: what each rank reads, file -> bytes. At the world size of the save a rank checks what it wrote.
    """
    checks: list[set[str]] = [set() for _ in wanted]
    for name in sorted({name for one in wanted for name in one}):
        most = max(one.get(name, 0) for one in wanted)
        readers = [rank for rank, one in enumerate(wanted) if one.get(name, 0) == most]
        checks[min(readers, key=lambda rank: len(checks[rank]))].add(name)
    return checks
