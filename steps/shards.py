"""Token shards: written into a temporary directory, found again only under their final name.

1. ``Workspace`` is a temporary directory that carries its owner's identity; those of dead owners are removed
2. ``ShardWriter`` appends tokens, cuts shards of ``SHARD_BYTES``, hashes as it writes, fsyncs at the end
3. ``publish`` writes the manifest last and renames the directory; whoever renames first wins, the other one's is dropped
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from steps.tokenize_text import DType, Ids
from trainer.errors import UnavailableError, says_nothing_of_data
from trainer.paths import (
    DATASET_TEMPORARY,
    MANIFEST,
    dataset,
    dataset_shard,
    dataset_stagings,
    dataset_temporary,
    datasets,
)
from trainer.records import DatasetManifest, FileRecord, file_sha256, fsync_directory

SHARD_BYTES = 256 * 1024 * 1024
HASH_THREADS = min(8, os.cpu_count() or 1)
ABANDONED_SECONDS = 3600.0
"""A temporary directory of another machine that nothing was written to for so long has no living owner."""
STAGING_KEPT_SECONDS = 7 * 24 * 3600.0
"""Downloaded sources wait so long for a download that resumes."""
OWNER = re.compile(re.escape(DATASET_TEMPORARY) + r"(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}$")


class ShardWriter:
    """Appends token ids to ``shard-00000.bin``, ``shard-00001.bin``, ... as flat little-endian arrays of ``dtype``."""

    def __init__(self, directory: Path, dtype: DType) -> None:
        self.tokens = 0
        self._directory = directory
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._size = 0
        self._records: list[FileRecord] = []

    def append(self, ids: Ids) -> None:
        """Write a one-dimensional array of ids."""
        if not len(ids):
            return
        self.tokens += len(ids)
        content = np.ascontiguousarray(ids, self._dtype).data.cast("B")
        while content:
            if self._file is None:
                self._file = (self._directory / dataset_shard(len(self._records))).open("xb")
            part = content[: SHARD_BYTES - self._size]
            self._file.write(part)
            self._hash.update(part)
            self._size += len(part)
            content = content[len(part) :]
            if self._size == SHARD_BYTES:
                self._end_shard()

    def close(self) -> tuple[FileRecord, ...]:
        """Make every shard durable and say what they are."""
        if self._file is not None:
            self._end_shard()
        return tuple(self._records)

    def _end_shard(self) -> None:
        assert self._file is not None
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        name = dataset_shard(len(self._records))
        self._records.append(FileRecord(name=name, size=self._size, sha256=self._hash.hexdigest()))
        self._file, self._hash, self._size = None, hashlib.sha256(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def sha256_of_all(paths: list[Path]) -> Iterator[str]:
    """The hashes of ``paths``, in order, by several threads."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        yield from pool.map(file_sha256, paths)


def dataset_digest(tokenizer_identity: str, dtype: str, shards: tuple[FileRecord, ...]) -> str:
    """What the tokens are, whatever their source: SHA-256 (hex) over the tokenizer, the type and the shards' hashes."""
    content = "\n".join((tokenizer_identity, dtype, *(f"{shard.size} {shard.sha256}" for shard in shards)))
    return hashlib.sha256(content.encode()).hexdigest()


def damage(directory: Path, manifest: DatasetManifest) -> str:
    """What is wrong with the dataset's shards: sizes first, then every byte's hash. Empty when nothing is."""
    paths = [directory / shard.name for shard in manifest.shards]
    for path, shard in zip(paths, manifest.shards, strict=True):
        if not path.is_file():
            return f"{shard.name} is missing"
        if path.stat().st_size != shard.size:
            return f"{shard.name} has {path.stat().st_size} bytes, not {shard.size}"
    for found, shard in zip(sha256_of_all(paths), manifest.shards, strict=True):
        if found != shard.sha256:
            return f"{shard.name} has another SHA-256 than its manifest says"
    return ""


@contextlib.contextmanager
def workspace(root: Path) -> Iterator[Path]:
    """A temporary directory beside the datasets, removed at the end unless it was published."""
    datasets(root).mkdir(parents=True, exist_ok=True)
    owner = f"{_machine()}-{os.getpid()}-{_start_of(os.getpid())}-{secrets.token_hex(4)}"
    directory = dataset_temporary(root, owner)
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def publish(root: Path, name: str, directory: Path, manifest: DatasetManifest) -> Path:
    """Give ``directory`` its final name, or find that another process has already published the same tokens."""
    target = dataset(root, name, manifest.digest)
    manifest.write(directory / MANIFEST)
    for _ in range(3):
        try:
            directory.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            fsync_directory(target.parent)
            return target
        with contextlib.suppress(FileNotFoundError):  # yet another one took it away
            before = target.stat()
            if not damage_of_dataset(target, manifest):
                return target
            retire(root, target, before)
    raise UnavailableError(f"{target} is in the way and not whole; another download may be at it: run again")


def damage_of_dataset(directory: Path, expected: DatasetManifest) -> str:
    """What is wrong with ``directory`` as the dataset ``expected``; empty when nothing is."""
    try:
        found = DatasetManifest.read(directory / MANIFEST)
    except Exception as error:
        if says_nothing_of_data(error):
            raise
        return str(error)
    return damage(directory, found) if found.digest == expected.digest else "it holds other tokens"


def retire(root: Path, directory: Path, seen: os.stat_result) -> None:
    """Take a damaged dataset away, unless it is no longer the one that was ``seen`` to be damaged."""
    now = directory.stat()
    if (now.st_dev, now.st_ino) != (seen.st_dev, seen.st_ino):
        return
    with workspace(root) as aside:
        directory.rename(aside / directory.name)


def remove_abandoned(root: Path) -> list[str]:
    """Remove temporary directories whose owner is dead, and downloaded sources nobody came back for. Returns their names."""
    parent = datasets(root)
    if not parent.is_dir():
        return []
    gone = [entry for entry in parent.iterdir() if (match := OWNER.match(entry.name)) and _is_abandoned(entry, match)]
    stagings = dataset_stagings(root)
    if stagings.is_dir():
        gone += [entry for entry in stagings.iterdir() if _idle_seconds(entry) > STAGING_KEPT_SECONDS]
    for entry in gone:
        shutil.rmtree(entry, ignore_errors=True)
    return [entry.name for entry in gone]


def _is_abandoned(directory: Path, owner: re.Match[str]) -> bool:
    if owner["machine"] == _machine():
        return _start_of(int(owner["pid"])) != int(owner["start"])
    return _idle_seconds(directory) > ABANDONED_SECONDS


def _idle_seconds(directory: Path) -> float:
    """Seconds since anything in ``directory`` was written to; 0 where that cannot be told."""
    try:
        newest = max(entry.stat().st_mtime for entry in (directory, *directory.rglob("*")))
    except OSError:
        return 0.0
    return time.time() - newest


def _machine() -> str:
    """Names the place where a process id has one meaning: host, boot and process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    return hashlib.sha256(f"{socket.gethostname()} {boot} {namespace}".encode()).hexdigest()[:12]


def _start_of(pid: int) -> int:
    """Clock ticks from boot to the start of process ``pid``; -1 if there is no such process. Tells a reused id apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(stat.rpartition(")")[2].split()[19])
