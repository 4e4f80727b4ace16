"""Where the text comes from: a dataset URI -> a ``Source``.

    builtin:                                        documentation that ships with Python (pydoc_data.topics)
    file:///path                                    a file, or a folder (with its sub-folders, in sorted order)
    s3://bucket/key-or-prefix                       an object, or the objects below a prefix    (steps.source_s3)
    hf://datasets/owner/name[@revision]/path-glob   files of a dataset on the Hugging Face hub  (steps.source_hub)

``?field=NAME`` after any of them names the field with the text in JSON lines and parquet (default: text).

A source is opened (which finds its files and its revision), then fetched into a staging directory. Equal revisions mean
equal content: hashes of the content, ETags with sizes, or a commit; never a time stamp.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from steps.documents import SUFFIXES, TextFile, supported
from steps.progress import ByteProgress
from steps.shards import sha256_of_all
from trainer.errors import ConfigurationError, UnavailableError

FIELD = re.compile(r"\?field=([^?&=]+)$")
NAME_LENGTH = 40


class Source(Protocol):
    """A dataset before it is tokenised. Opening one raises ``ConfigurationError`` when there is nothing to read."""

    name: str
    """A short word for the dataset's directory: letters, digits, dots and dashes."""
    revision: str
    """What identifies the content, in one line."""
    files: int
    size: int
    """Bytes to tokenise."""
    fetch_size: int
    """Bytes to fetch first; 0 where the files are at hand."""

    def fetch(self, staging: Path, progress: ByteProgress) -> list[TextFile]:
        """The files, in the order of the dataset. A second call goes on where a killed one stopped."""
        ...

    def check_unchanged(self) -> None:
        """Raise ``UnavailableError`` if the content may have changed since the source was opened."""
        ...


@dataclass(frozen=True)
class Address:
    """A dataset URI taken apart: ``scheme``, the rest of it, and the field with the text."""

    uri: str
    scheme: str
    rest: str
    field: str


def parse(uri: str) -> Address:
    """Take ``uri`` apart; ``ConfigurationError`` when its scheme is none of ours."""
    match = FIELD.search(uri)
    field, plain = (unquote(match[1]), uri[: match.start()]) if match else ("text", uri)
    if plain.rstrip("/") == "builtin:":
        return Address(uri, "builtin", "", field)
    scheme, separator, rest = plain.partition("://")
    if not separator or scheme not in ("file", "s3", "hf"):
        hint = f"; did you mean file://{Path(plain).absolute()}?" if not separator and Path(plain).exists() else ""
        raise ConfigurationError(
            f"--dataset-uri: '{uri}' is not builtin:, file:///path, s3://bucket/prefix or hf://datasets/...{hint}"
        )
    return Address(uri, scheme, rest, field)


def open_source(address: Address) -> Source:
    """Find the source's files and its revision; nothing is fetched yet."""
    if address.scheme == "builtin":
        return BuiltinSource()
    if address.scheme == "file":
        return FileSource(address)
    if address.scheme == "s3":
        from steps.source_s3 import S3Source

        return S3Source(address)
    from steps.source_hub import HubSource

    return HubSource(address)


def directory_name(text: str) -> str:
    """``text`` as the first part of a dataset directory's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:NAME_LENGTH].strip("-.") or "dataset"


def nothing_supported(uri: str) -> ConfigurationError:
    return ConfigurationError(f"--dataset-uri: no file to read at {uri}; what is read: {', '.join(SUFFIXES)}")


def listing_digest(lines: Iterable[str]) -> str:
    """SHA-256 (hex) over a list of files with what identifies each one's content."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class BuiltinSource:
    """Real English text that every Python has: about 0.6 MB, one document a topic, the same for one version of Python."""

    name = "builtin"
    files = 1
    fetch_size = 0

    def __init__(self) -> None:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise ConfigurationError(
                "--dataset-uri: this Python has no pydoc_data.topics; give a file:// folder"
            ) from None
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for _, text in sorted(topics.items())]
        self._content = "".join(lines).encode()
        self.size = len(self._content)
        digest = hashlib.sha256(self._content).hexdigest()
        self.revision = f"pydoc_data.topics of Python {platform.python_version()}, sha256:{digest}"

    def fetch(self, staging: Path, progress: ByteProgress) -> list[TextFile]:
        path = staging / f"topics-{secrets.token_hex(4)}.jsonl"
        path.write_bytes(self._content)
        return [TextFile(path, "pydoc_data.topics.jsonl", self.size)]

    def check_unchanged(self) -> None:
        return


class FileSource:
    """A file or a folder. The revision is made of the files' hashes, so it costs one reading."""

    fetch_size = 0

    def __init__(self, address: Address) -> None:
        self._uri = address.uri
        base = _local_path(address)
        try:
            self._found = _files_of(base, address.uri)
            self._stats = [_identity(file.path) for file in self._found]
            hashes = list(sha256_of_all([file.path for file in self._found]))
        except (FileNotFoundError, NotADirectoryError) as error:
            if base.exists():
                raise UnavailableError(
                    f"--dataset-uri: {error.filename} vanished while it was read; run again"
                ) from None
            raise ConfigurationError(f"--dataset-uri: {base} does not exist") from None
        self.name = directory_name(base.name.split(".")[0] if base.is_file() else base.name)
        self.files = len(self._found)
        self.size = sum(file.size for file in self._found)
        names = [file.path.relative_to(base if base.is_dir() else base.parent).as_posix() for file in self._found]
        digest = listing_digest(
            f"{name} {file.size} {sha}" for name, file, sha in zip(names, self._found, hashes, strict=True)
        )
        self.revision = f"{self.files} {'file' if self.files == 1 else 'files'}, sha256:{digest}"

    def fetch(self, staging: Path, progress: ByteProgress) -> list[TextFile]:
        return self._found

    def check_unchanged(self) -> None:
        for file, before in zip(self._found, self._stats, strict=True):
            if not file.path.exists() or _identity(file.path) != before:
                raise UnavailableError(f"{file.label} changed while it was read; run again when nothing writes to it")


def _local_path(address: Address) -> Path:
    rest = address.rest.removeprefix("localhost")
    if not rest.startswith("/"):
        raise ConfigurationError(f"--dataset-uri: '{address.uri}' is not an absolute path; write file:///path")
    return Path(unquote(rest))


def _files_of(base: Path, uri: str) -> list[TextFile]:
    if not base.is_dir():
        base.stat()  # raises when there is nothing, or when it is not ours to see
        if not base.is_file() or not supported(base.name):
            raise nothing_supported(uri)
        paths = [base]
    else:
        paths = [path for path in _walk(base) if supported(path.name)]
        if not paths:
            raise nothing_supported(uri)
    for path in paths:
        if path.exists() and not path.is_file():
            raise ConfigurationError(f"--dataset-uri: {path} is not a plain file")
    return [TextFile(path, str(path), path.stat().st_size) for path in paths]


def _walk(base: Path) -> list[Path]:
    """The files below ``base`` in sorted order; hidden ones are left out."""

    def refuse(error: OSError) -> None:
        raise error

    paths: list[Path] = []
    for directory, folders, names in os.walk(base, onerror=refuse):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        paths += [Path(directory) / name for name in names if not name.startswith(".")]
    return sorted(paths, key=lambda path: path.relative_to(base).as_posix())


def _identity(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
