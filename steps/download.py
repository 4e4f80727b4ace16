"""dataset -> token shards + manifest: ``python -m steps.download --root R --run-id X --dataset-uri U --tokenizer T``.

    1. open the source: which files, which revision (steps.sources)
    2. look up revision and tokenizer in the index; a dataset that is there is verified, and that is all
    3. fetch the files into a staging directory, where a killed download goes on (steps.source_s3, steps.source_hub)
    4. read documents in a stream, tokenise them in batches, append them to shards, an end token after each document
       (steps.documents, steps.tokenize_text)
    5. write the manifest last, rename the directory, note it in the index, drop the staging directory (steps.shards)
    6. leave the dataset's path where the next step reads it

Any number of these may run at once on one root, on one machine or several: each builds in a directory of its own, and
the first rename wins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np

from steps import shards, sources, tokenize_text
from steps.documents import TextFile, pieces
from steps.progress import ByteProgress, size_text
from trainer.config import OneLineParser, RunConfig, add_flags, from_namespace
from trainer.errors import (
    ConfigurationError,
    DataError,
    DeniedError,
    ExitCode,
    StoppedError,
    UnavailableError,
    exit_with,
)
from trainer.paths import MANIFEST, RunPaths, dataset_index, dataset_stagings, datasets
from trainer.records import DatasetManifest, Record, write_whole

FLAGS = ("root", "run_id", "dataset_uri", "tokenizer", "sequence_length")
FORMAT = 1
"""Changes when the same source and tokenizer would give other tokens than before."""
BATCH = 4 * 1024 * 1024
"""Characters tokenised at once."""
STOP_SECONDS = 5.0
STOPPED = "stopped by SIGTERM; a new attempt goes on from what has been fetched"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
BROKEN_MOUNT = {errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENODEV, errno.ENXIO}


class IndexEntry(Record):
    """Which dataset a source's revision and a tokenizer became."""

    source: str
    revision: str
    tokenizer: str
    dataset: str
    """Name of the directory among the datasets."""


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="steps.download", description="Make token shards of a dataset.")
    add_flags(parser, FLAGS)
    config = from_namespace(parser.parse_args(argv))
    signal.signal(signal.SIGTERM, _stop)
    root = config.root.absolute()
    with _file_errors(root):
        directory, manifest = download(config, ByteProgress("download"))
        if manifest.tokens <= config.sequence_length:
            raise ConfigurationError(
                f"--sequence-length: {config.sequence_length} needs more tokens than the {manifest.tokens} of "
                f"{config.dataset_uri}; take a shorter sequence or more text"
            )
        output = RunPaths(root, config.run_id).output("download", "dataset")
        write_whole(output, str(directory).encode())
    return 0


def download(config: RunConfig, progress: ByteProgress) -> tuple[Path, DatasetManifest]:
    """The dataset of ``config`` under its root: found there, or made."""
    root = config.root.absolute()
    datasets(root).mkdir(parents=True, exist_ok=True)
    for name in shards.remove_abandoned(root):
        progress.say(f"removed {name}, left by a download that died")
    tokenizer = tokenize_text.load(config.tokenizer)
    address = sources.parse(config.dataset_uri)
    source = sources.open_source(address)
    progress.say(f"source {address.uri} has {size_text(source.size)}: {source.revision}")
    key = _key(source.revision, address.field, tokenizer)
    for _ in range(3):
        if found := _find(root, key, progress):
            return found
        staging = dataset_stagings(root) / key
        try:
            return _make(root, key, address, source, tokenizer, staging, progress)
        except FileNotFoundError as error:
            if not str(error.filename).startswith(str(staging)):
                raise
            progress.say("another download of the same dataset has finished; looking for what it made")
    raise UnavailableError(f"{dataset_stagings(root) / key} is taken away again and again; run again")


def _key(revision: str, field: str, tokenizer: tokenize_text.Tokenizer) -> str:
    content = [FORMAT, revision, field, tokenizer.sha256 or tokenizer.name, tokenizer.end_of_document]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _find(root: Path, key: str, progress: ByteProgress) -> tuple[Path, DatasetManifest] | None:
    """The dataset the index names, verified; None if there is none. A damaged one is taken away and said so."""
    try:
        directory = datasets(root) / IndexEntry.read(dataset_index(root, key)).dataset
        seen = directory.stat()
    except (FileNotFoundError, DataError):
        return None
    try:
        manifest = DatasetManifest.read(directory / MANIFEST)
        problem = shards.damage(directory, manifest)
    except (FileNotFoundError, DataError) as error:
        problem = str(error)
    if problem:
        progress.say(f"{directory} is damaged ({problem}); making it again")
        shards.retire(root, directory, seen)
        return None
    progress.say(
        f"found {directory}: {manifest.documents} documents, {manifest.tokens} tokens, every shard's SHA-256 is right"
    )
    return directory, manifest


def _make(
    root: Path,
    key: str,
    address: sources.Address,
    source: sources.Source,
    tokenizer: tokenize_text.Tokenizer,
    staging: Path,
    progress: ByteProgress,
) -> tuple[Path, DatasetManifest]:
    """Fetch, tokenise, publish."""
    staging.mkdir(parents=True, exist_ok=True)
    progress.expect(source.fetch_size + source.size)
    progress.phase("fetched", source.fetch_size)
    files = source.fetch(staging, progress)
    progress.phase("tokenised", source.size)
    with shards.workspace(root) as directory:
        dtype = tokenize_text.dtype_for(tokenizer.vocabulary_size)
        with shards.ShardWriter(directory, dtype) as writer:
            documents = tokenise(files, address.field, tokenizer, writer, progress)
            records = writer.close()
        source.check_unchanged()
        if not documents:
            raise ConfigurationError(
                f"--dataset-uri: {address.uri} is empty: there is no text in its {source.files} files"
            )
        manifest = DatasetManifest(
            source=address.uri,
            revision=source.revision,
            tokenizer=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256,
            vocabulary_size=tokenizer.vocabulary_size,
            end_of_document=tokenizer.end_of_document,
            dtype=dtype,
            documents=documents,
            tokens=writer.tokens,
            shards=records,
            digest=shards.dataset_digest(tokenizer.sha256 or tokenizer.name, dtype, records),
        )
        target = shards.publish(root, source.name, directory, manifest)
    entry = IndexEntry(source=address.uri, revision=source.revision, tokenizer=tokenizer.name, dataset=target.name)
    entry.write(dataset_index(root, key))
    shutil.rmtree(staging, ignore_errors=True)
    progress.finish()
    progress.say(f"made {target}: {documents} documents, {manifest.tokens} tokens ({dtype}) in {len(records)} shards")
    return target, manifest


def tokenise(
    files: list[TextFile],
    field: str,
    tokenizer: tokenize_text.Tokenizer,
    writer: shards.ShardWriter,
    progress: ByteProgress,
) -> int:
    """Append every document of ``files`` to ``writer``; returns how many there are. Memory: a few batches."""
    documents = 0
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    for texts, ends in _batches(files, field, progress):
        for ids, last in zip(tokenizer.encode(texts), ends, strict=True):
            writer.append(ids)
            if last:
                writer.append(end)
                documents += 1
    return documents


def _batches(files: list[TextFile], field: str, progress: ByteProgress) -> Iterator[tuple[list[str], list[bool]]]:
    """Pieces of documents, ``BATCH`` characters at a time, each with whether it ends its document."""
    texts: list[str] = []
    ends: list[bool] = []
    size = 0
    for file in files:
        reported = 0
        for piece in pieces(file, field):
            texts.append(piece.text)
            ends.append(piece.last)
            size += len(piece.text)
            if size >= BATCH:
                yield texts, ends
                progress.advance(piece.position - reported)
                texts, ends, size, reported = [], [], 0, piece.position
        progress.advance(file.size - reported)
    yield texts, ends


@contextmanager
def _file_errors(root: Path) -> Iterator[None]:
    """Errors of the file system in one line, with the code that says whether a retry can help."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        if error.errno in FULL:
            raise UnavailableError(
                f"no space left under {root} ({os.strerror(error.errno or 0)}); free some and run again"
            ) from None
        if isinstance(error, PermissionError):
            raise DeniedError(f"{where}: permission denied for user {os.geteuid()}; change its owner or mode") from None
        if error.errno == errno.EROFS:
            raise DeniedError(f"{where} is on a read-only file system; give a --root that can be written") from None
        if isinstance(error, FileNotFoundError):
            raise UnavailableError(f"{where} was taken away while it was used; run again") from None
        if error.errno in BROKEN_MOUNT:
            raise UnavailableError(f"{where}: {error.strerror}; look at the mount and run again") from None
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG):
            raise ConfigurationError(f"{where}: {error.strerror}; is --root a directory?") from None
        raise


def _stop(number: int, frame: FrameType | None) -> None:
    """End in good order, or, when a thread is stuck in a request, by a deadline: nothing half-written is lost or kept."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = threading.Timer(STOP_SECONDS, _give_up)
    deadline.daemon = True
    deadline.start()
    raise StoppedError(STOPPED)


def _give_up() -> None:
    print(f"error: {STOPPED}", file=sys.stderr, flush=True)
    os._exit(int(ExitCode.STOPPED))


if __name__ == "__main__":
    exit_with(main)
