"""The files of the node-local tier: a header of fixed size, then a rank's tensors.

    rank-<r>-<0|1>                   a rank's own two generations
    replica-<r>-<step>-<entry>       what a peer node keeps of them

A header names what its file is of; a file without one is not whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

HEADER = 4096

Name = tuple[int, str]
"""A snapshot: its step, and the entry into training that made it."""

Header = dict[str, int | str]


def read_header(path: Path) -> Header:
    """What the snapshot at ``path`` is of; empty when it is not whole."""
    try:
        with path.open("rb") as file:
            text = file.read(HEADER).rstrip(b"\0")
        header = json.loads(text) if text else {}
    except (OSError, ValueError):
        return {}
    return header if isinstance(header, dict) else {}


def write_header(path: Path, header: Header) -> None:
    text = json.dumps(header).encode() if header else b""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, text.ljust(HEADER, b"\0"), 0)
    finally:
        os.close(fd)


def replica(directory: Path, rank: int, name: Name) -> Path:
    return directory / f"replica-{rank}-{name[0]:08d}-{name[1]}"


def held(directory: Path, identity: Mapping[str, int | str]) -> dict[tuple[int, Name], Path]:
    """The whole snapshots in ``directory`` whose headers agree with ``identity``, of whatever rank, replicas included. Those
    are sent with their checksum, over a network; one without it is none."""
    found: dict[tuple[int, Name], Path] = {}
    for path in (*directory.glob("replica-*"), *directory.glob("rank-*")):
        header = read_header(path)
        if header and ("crc" in header or path.name.startswith("rank-")) and all(header.get(key) == value for key, value in identity.items()):
            found[int(header["rank"]), (int(header["step"]), str(header["entry"]))] = path
    return found
