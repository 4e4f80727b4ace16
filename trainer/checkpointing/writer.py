"""The background writer of the durable tier, run through NVRx's asynchronous queue.

The queue, its requests and its callers are NVRx's. Its own callers are not used: a worker of theirs that dies is
never noticed (the queue then waits for ever), they start by importing everything again, and the temporary one calls
CUDA. ``ForkedCaller`` is a third one behind their interface: its process is forked from the node's fork server, and
one that died, raised or outran its deadline is an exception here.

What is in the background:

1. Open the staging buffer, write this rank's shards with torch's DCP writer into ``.tmp-<step>-<attempt>-<nonce>/``, fsync.
2. Hash them, leave ``.rank-<n>`` with the write results, or ``.failed-<n>``.
3. Rank 0 waits for all ranks' results (no collectives: files say it), writes DCP's metadata, then the manifest,
   fsyncs, checks the fence, and renames the directory to its final name. That is the commit. Then retention.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCaller, AsyncCallsQueue, AsyncRequest
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from trainer import environment
from trainer.checkpointing.removal import REMOVED, remove_strays, retain
from trainer.checkpointing.staging import Layout, open_buffer
from trainer.checkpointing.storage import Storage
from trainer.paths import MANIFEST, RunPaths
from trainer.progress import newest_attempt
from trainer.records import CheckpointManifest, FileRecord, fsync_directory
from trainer.recovery.stub import request

ANSWER = 65536
"""Bytes that no answer of a writer is longer than."""
WRITER_THREADS = 4
CORES_A_THREAD = 4


class SaveFailed(Exception):
    """A save that came to nothing; the reason is its text."""


class Fenced(SaveFailed):
    """A newer attempt has started: this one must not commit."""


@dataclass(frozen=True)
class Commit:
    """What rank 0 needs besides its own shards."""

    metadata: Metadata
    manifest: CheckpointManifest
    paths: RunPaths
    keep: int
    replace: bool = False
    """A checkpoint of this name was refused and could not be moved away."""


@dataclass(frozen=True)
class Job:
    """One rank's part of one save; picklable."""

    directory: Path
    rank: int
    plan: SavePlan
    buffer: str
    size: int
    layout: Layout
    deadline: float
    """Seconds from its start after which the save is given up."""
    commit: Commit | None
    storage: Storage
    staged: Any = field(default=None, repr=False)
    """The bytes themselves where the job runs in the process that owns them."""


@dataclass(frozen=True)
class Written:
    """What one rank wrote."""

    results: list[WriteResult]
    files: list[FileRecord]


class _StagedPlanner(DefaultSavePlanner):
    """Resolves write items to the staged copies: each item is this rank's one part of its tensor."""

    def __init__(self, flat: torch.Tensor, layout: Layout) -> None:
        super().__init__()
        self._flat = flat
        self._layout = layout

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._layout[write_item.index.fqn].view(self._flat)


def run(job: Job) -> int:
    """Do a job; returns the checkpoint's bytes on rank 0 once it is committed, else this rank's bytes."""
    began = time.monotonic()
    try:
        written = write_shards(job)
        leave(job.directory / f".rank-{job.rank}", pickle.dumps(written))
    except Exception as error:
        (job.directory / f".rank-{job.rank}").unlink(missing_ok=True)
        reason = explain(job, error)
        with contextlib.suppress(OSError):
            leave(job.directory / f".failed-{job.rank}", reason.encode())
        raise SaveFailed(reason) from error
    if job.commit is None:
        return sum(file.size for file in written.files)
    everything = collect(job, began + job.deadline)
    return commit(job, job.commit, everything)


def explain(job: Job, error: Exception) -> str:
    """What went wrong, for people: torch's writer speaks of positions in a file where the disk is full."""
    reason = f"{type(error).__name__}: {error}"
    if "No space left" not in reason:
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(job.directory).free
            if free < job.size:
                return f"No space left on the file system of {job.directory.parent} ({free} bytes free); {reason}"
    return reason


def write_shards(job: Job) -> Written:
    """Step 1 and 2: this rank's DCP files, durable, with their hashes."""
    flat = job.staged if job.staged is not None else open_buffer(job.buffer, job.size)
    job.directory.mkdir(parents=True, exist_ok=True)
    if not job.plan.items:
        return Written([], [])
    writer = FileSystemWriter(job.directory, single_file_per_rank=True, sync_files=True, thread_count=writer_threads())
    writer.reset(job.directory)
    results = writer.write_data(job.plan, _StagedPlanner(flat, job.layout)).wait()
    names = sorted({result.storage_data.relative_path for result in results})
    job.storage.transfer(sum((job.directory / name).stat().st_size for name in names))
    with ThreadPoolExecutor(writer_threads()) as pool:
        return Written(results, list(pool.map(lambda name: describe(job.directory, name), names)))


def writer_threads() -> int:
    """As many as write a rank's files side by side: one core writes, and hashes, half a gigabyte a second."""
    return max(1, min(WRITER_THREADS, len(os.sched_getaffinity(0)) // CORES_A_THREAD))


def describe(directory: Path, name: str) -> FileRecord:
    """Size and SHA-256 of a file, read back from storage."""
    with (directory / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(name=name, size=file.tell(), sha256=digest)


def leave(path: Path, content: bytes) -> None:
    """A small file that appears whole; on a full disk it appears empty, which still says that something was left."""
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_bytes(content)
    except OSError:
        path.touch()
        raise
    temporary.rename(path)


def collect(job: Job, deadline: float) -> list[Written]:
    """Wait for every rank's result in the save's directory. Raises ``SaveFailed`` when one failed or none came."""
    assert job.commit is not None
    missing = set(range(job.commit.manifest.world_size))
    found: dict[int, Written] = {}
    pause = 0.01
    while missing:
        for rank in sorted(missing):
            failed = job.directory / f".failed-{rank}"
            if failed.exists():  # (looked at before its result: a result may be the torn one of a full disk)
                raise SaveFailed(f"rank {rank}: {failed.read_text()}")
            path = job.directory / f".rank-{rank}"
            if path.exists() and path.stat().st_size:
                found[rank] = pickle.loads(path.read_bytes())
        missing -= found.keys()
        if missing:
            if time.monotonic() > deadline:
                raise SaveFailed(f"no shards of rank {min(missing)} within {job.deadline:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
    return [found[rank] for rank in sorted(found)]


def commit(job: Job, wanted: Commit, everything: list[Written]) -> int:
    """Step 3. Returns the bytes of the checkpoint."""
    directory = job.directory
    metadata = wanted.metadata
    storage: dict[MetadataIndex, Any] = {}
    files: list[FileRecord] = []
    for written in everything:
        storage.update({result.index: result.storage_data for result in written.results})
        files += written.files
    metadata.storage_data = storage
    for leftover in [*directory.glob(".rank-*"), *directory.glob(".failed-*")]:
        leftover.unlink()
    with (directory / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())
    files.append(describe(directory, ".metadata"))
    manifest = wanted.manifest.model_copy(update={"files": tuple(files)})
    with (directory / MANIFEST).open("wb") as file:
        file.write(manifest.model_dump_json(indent=2).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(directory)
    final = wanted.paths.checkpoint(manifest.step)
    newest = newest_attempt(wanted.paths)
    if newest > manifest.attempt:
        raise Fenced(f"attempt {newest} has started, this is attempt {manifest.attempt}")
    if wanted.replace and final.exists():
        final.rename(final.with_name(f"{REMOVED}{final.name}"))
    if final.exists():
        shutil.rmtree(directory)  # committed before a restart took us back: the same step has the same content
    else:
        directory.rename(final)
        fsync_directory(final.parent)
    retain(wanted.paths, wanted.keep)
    remove_strays(wanted.paths, manifest.attempt, None)
    return sum(file.size for file in files)


class ForkedCaller(AsyncCaller):
    """NVRx's interface of an asynchronous caller over one process forked from the node's fork server."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline
        self._channel: socket.socket | None = None
        self._server: socket.socket | None = None
        self._began = 0.0

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.settimeout(10)
        server.connect(environment.fork_server())
        env = environment.mapping() | {"HOLDFAST_OWNER": str(os.getpid())}
        request(server, "writer", "trainer.checkpointing.writer:serve", [], env, "/", [0, 1, 2, theirs.fileno()])
        theirs.close()
        self._channel, self._server = ours, server

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        if self._channel is None:
            self._start()
        else:
            with contextlib.suppress(BlockingIOError):
                self._channel.recv(ANSWER)  # of the call before
        assert self._channel is not None
        body = pickle.dumps((async_req.async_fn, async_req.async_fn_args))
        self._channel.settimeout(10)
        self._channel.sendall(struct.pack("!Q", len(body)) + body)
        self._channel.setblocking(False)
        self._began = time.monotonic()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = True) -> bool:
        """Whether the call is done. Raises ``SaveFailed`` when it failed, its process is gone or its time is up."""
        while True:
            if self._poll():
                return True
            if time.monotonic() - self._began > self._deadline:
                self.close(abort=True)
                raise SaveFailed(f"the writer did not finish within {self._deadline:g} s and was killed")
            if not blocking:
                return False
            time.sleep(0.01)

    def _poll(self) -> bool:
        """Look at the answer, which stays where it is: a restart may come between reading it and knowing it."""
        assert self._channel is not None
        try:
            answer = self._channel.recv(ANSWER, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            answer = b""
        if not answer:
            self.close(abort=True)
            raise SaveFailed("the writer process died")
        if not answer.endswith(b"\n"):
            return False
        kind, _, text = answer.decode().rstrip("\n").partition(" ")
        if kind == "done":
            self.result = int(text)
            return True
        raise Fenced(text) if kind == "fenced" else SaveFailed(text)

    @property
    def started(self) -> bool:
        return self._channel is not None

    def close(self, abort: bool = False) -> None:
        """End the process: with its channel closed it ends itself; the fork server kills it otherwise."""
        for connection in (self._channel, self._server):
            if connection is not None:
                connection.close()
        self._channel = self._server = None

    def __del__(self) -> None:
        self.close()


class ForkedQueue(AsyncCallsQueue):
    """NVRx's queue with our caller; never more than one call is in it."""

    def __init__(self, deadline: float) -> None:
        super().__init__(persistent=True)
        self.persistent_caller = ForkedCaller(deadline)

    def _get_async_caller(self) -> ForkedCaller:
        return self.persistent_caller

    def start(self, job: Job) -> None:
        """Schedule ``run(job)``."""
        self.schedule_async_request(AsyncRequest(async_fn=run, async_fn_args=(job,), finalize_fns=[]))

    def poll(self, blocking: bool = False) -> int | None:
        """The job's value once it is done, else None. A failed job leaves the queue and raises ``SaveFailed``."""
        try:
            done = self.maybe_finalize_async_calls(blocking=blocking, no_dist=True)
        except SaveFailed:
            self.async_calls.clear()
            raise
        return self.persistent_caller.result if done else None

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, or nothing is there that could write it."""
        return not self.async_calls or not self.persistent_caller.started

    def close(self) -> None:
        self.async_calls.clear()
        self.persistent_caller.close(abort=True)


def serve(*descriptors: int) -> int:
    """The writer process: takes pickled calls from its channel until that closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    torch.set_num_threads(1)
    channel = socket.socket(fileno=descriptors[0])
    while True:
        head = read_exactly(channel, 8)
        if head is None:
            return 0
        body = read_exactly(channel, struct.unpack("!Q", head)[0])
        if body is None:
            return 0
        function, arguments = pickle.loads(body)
        channel.sendall(answer(function, arguments))


def answer(function: Callable[..., int], arguments: tuple[Any, ...]) -> bytes:
    """One line: ``done <value>``, ``fenced <reason>`` or ``failed <reason>``."""
    try:
        return f"done {function(*arguments)}\n".encode()
    except Fenced as error:
        return f"fenced {error}\n".encode()
    except Exception as error:
        return f"failed {type(error).__name__}: {error}"[:4000].replace("\n", " ").encode() + b"\n"


def read_exactly(channel: socket.socket, size: int) -> bytes | None:
    """``size`` bytes, or None at the end of the stream."""
    parts = b""
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return parts
