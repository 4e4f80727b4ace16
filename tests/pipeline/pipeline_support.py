"""Whole runs through the command line, in processes of their own, and what they left."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.paths import RunPaths
from trainer.progress import newest_commit
from trainer.records import RunReport

PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    output: str
    seconds: float


def command(root: Path, run_id: str, *flags: str) -> list[str]:
    """``run.py local`` as the README spells it."""
    return [sys.executable, str(PROJECT / "workflows" / "run.py"), "local", f"--root={root}", f"--run-id={run_id}", *flags]


def local(root: Path, run_id: str, *flags: str, limit: float = 240) -> Finished:
    """Run the pipeline to its end, which must come within ``limit`` seconds."""
    started = time.monotonic()
    done = subprocess.run(
        command(root, run_id, *flags), cwd=PROJECT, capture_output=True, text=True, timeout=limit, check=False
    )
    return Finished(done.returncode, done.stdout + done.stderr, time.monotonic() - started)


def started(root: Path, run_id: str, *flags: str) -> subprocess.Popen[str]:
    """The same in the background, in a session of its own."""
    return subprocess.Popen(
        command(root, run_id, *flags), cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def wait_for_commit(root: Path, run_id: str, step: int, limit: float = 120) -> None:
    """Return once a checkpoint of ``step`` or a later one is committed."""
    deadline = time.monotonic() + limit
    while newest_commit(RunPaths(root, run_id)) < step:
        assert time.monotonic() < deadline, f"no commit of step {step} within {limit:g} s"
        time.sleep(0.05)


def report(root: Path, run_id: str) -> RunReport:
    return RunReport.read(RunPaths(root, run_id).report("json"))


def weights(root: Path, run_id: str) -> tuple[int, str]:
    """The newest checkpoint's step, and a digest of every tensor in it as it loads: names, shapes, types, bytes."""
    paths = RunPaths(root, run_id)
    step = newest_commit(paths)
    reader = FileSystemReader(paths.checkpoint(step))
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "in a single process": that is what is wanted
        load(tensors, storage_reader=reader, no_dist=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return step, digest.hexdigest()


def using(root: Path) -> list[int]:
    """The living processes that were started for runs under ``root``: their command line or environment names it."""
    found = []
    needle = str(root).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if needle in text:
                found.append(int(entry.name))
    return found
