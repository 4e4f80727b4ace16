"""What the tests of steps.download share: the step as a process of its own, and what it made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trainer.records import DatasetManifest

END = 256
SETTLED = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


def command(root: Path, uri: str, *flags: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "steps.download",
        "--root",
        str(root),
        "--run-id",
        "test",
        "--dataset-uri",
        uri,
        "--sequence-length",
        "8",
        *flags,
    ]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "HF_", "ARGO_"))}
    return kept | SETTLED | dict(extra or {})


def download(
    root: Path, uri: str, *flags: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the step to its end."""
    return subprocess.run(
        command(root, uri, *flags), env=environment(env), capture_output=True, text=True, timeout=120, check=False
    )


def made(root: Path, uri: str, *flags: str, env: Mapping[str, str] | None = None) -> tuple[Path, DatasetManifest]:
    """Run the step, which must succeed; the dataset it names and its manifest."""
    done = download(root, uri, *flags, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    directory = Path((root / "runs/test/outputs/download/dataset").read_text())
    return directory, DatasetManifest.read(directory / "manifest.json")


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """The step ended with ``code`` and one line on standard error that holds all of ``words``."""
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for word in words:
        assert word in lines[0], lines[0]


def nothing_made(root: Path) -> None:
    """No dataset, no temporary directory, and no output that names one."""
    datasets = root / "datasets"
    if datasets.exists():
        assert {entry.name for entry in datasets.iterdir()} <= {".staging", ".index"}
    assert not (root / "runs/test/outputs").exists()


def tokens(directory: Path) -> list[int]:
    """All tokens of a dataset, read as its manifest says."""
    manifest = DatasetManifest.read(directory / "manifest.json")
    arrays = [
        np.fromfile(directory / shard.name, dtype=np.dtype(manifest.dtype).newbyteorder("<"))
        for shard in manifest.shards
    ]
    found = np.concatenate(arrays)
    assert len(found) == manifest.tokens
    assert int(found.max()) < manifest.vocabulary_size
    return [int(token) for token in found]


def as_bytes(*documents: str) -> list[int]:
    """What the byte tokenizer makes of the documents."""
    return [token for document in documents for token in (*document.encode(), END)]


def documents(directory: Path, end: int = END) -> list[list[int]]:
    """The tokens of each document."""
    found: list[list[int]] = [[]]
    for token in tokens(directory):
        if token == end:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == [], "the last document has no end token"
    return found
