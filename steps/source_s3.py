"""Objects of S3, fetched in parallel, resumed by parts, and checked before anything reads them.

    1. list the objects; their keys, sizes and ETags are the revision
    2. fetch each into a file named after its key and ETag: small ones side by side, a large one in parts of ``PART`` bytes
       side by side. Each request carries If-Match, so that an object that changes in between is noticed
    3. note each part in a journal once it is durable; a later call fetches what the journal does not name
    4. check the whole file against the object's SHA-256 (S3's own, or ``sha256`` in its metadata; else a plain MD5 ETag,
       else the size alone) and only then give it its final name

Two downloads of the same objects may share the files: both write the same bytes to the same places.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from steps.documents import TextFile, supported
from steps.progress import ByteProgress
from steps.sources import Address, directory_name, listing_digest, nothing_supported
from trainer.errors import ConfigurationError, DataError, DeniedError, PipelineError, StoppedError, UnavailableError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PART = 8 * 1024 * 1024
BLOCK = 1024 * 1024
THREADS = 8
TRIES = 5
MISSING = {"NoSuchBucket", "NoSuchKey", "404", "NotFound"}
DENIED = {
    "AccessDenied", "403", "Forbidden", "401", "Unauthorized", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken",
    "InvalidToken", "AccountProblem", "AllAccessDisabled", "NotSignedUp",
}  # fmt: skip
MISCONFIGURED = {
    "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "InvalidBucketName",
    "InvalidObjectState", "MethodNotAllowed",
}  # fmt: skip


@dataclass(frozen=True)
class RemoteObject:
    key: str
    size: int
    etag: str
    """With its quotes, as S3 gives and takes it."""


class S3Source:
    """The object ``s3://bucket/key``, or the objects below a prefix. The endpoint and credentials are boto3's business."""

    def __init__(self, address: Address) -> None:
        self._bucket, _, prefix = address.rest.partition("/")
        if not self._bucket:
            raise ConfigurationError(f"--dataset-uri: '{address.uri}' names no bucket; write s3://bucket/key-or-prefix")
        with _translated(self._bucket, prefix):
            self._client = _client()
            objects = list(_listing(self._client, self._bucket, prefix))
        self._objects = _chosen(objects, prefix, address.uri)
        self.name = directory_name(Path(prefix.rstrip("/")).name.split(".")[0] or self._bucket)
        self.files = len(self._objects)
        self.size = self.fetch_size = sum(item.size for item in self._objects)
        digest = listing_digest(f"{item.key} {item.size} {item.etag}" for item in self._objects)
        self.revision = f"{self.files} objects of {self._bucket}, ETags and sizes: sha256:{digest}"

    def fetch(self, staging: Path, progress: ByteProgress) -> list[TextFile]:
        cancelled = Event()
        fetchers = [Fetcher(self._client, self._bucket, item, staging, progress, cancelled) for item in self._objects]
        with ThreadPoolExecutor(THREADS) as pool:
            try:
                _all(pool, [fetcher.fetch_alone for fetcher in fetchers if fetcher.parts == 1])
                for large in (fetcher for fetcher in fetchers if fetcher.parts > 1):
                    large.begin()
                    _all(pool, large.missing_parts())
                    large.finish()
            except BaseException:
                cancelled.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [TextFile(fetcher.path, fetcher.label, fetcher.item.size) for fetcher in fetchers]

    def check_unchanged(self) -> None:
        return  # what was fetched is what the revision says: If-Match


class Fetcher:
    """Fetches one object into ``staging``. ``path`` is its file, there only when it is whole and checked."""

    def __init__(
        self, client: S3Client, bucket: str, item: RemoteObject, staging: Path, progress: ByteProgress, cancelled: Event
    ) -> None:
        self.item = item
        self.label = f"s3://{bucket}/{item.key}"
        stem = hashlib.sha256(f"{item.key} {item.size} {item.etag}".encode()).hexdigest()[:32]
        self.path = staging / stem
        self._partial = staging / f"{stem}.partial"
        self._journal = staging / f"{stem}.parts"
        self._client, self._bucket, self._progress, self._cancelled = client, bucket, progress, cancelled
        self.parts = max(1, -(-item.size // PART))

    def fetch_alone(self) -> None:
        """All of an object of one part."""
        self.begin()
        for part in self.missing_parts():
            part()
        self.finish()

    def begin(self) -> None:
        """Make the file that the parts are written to."""
        if not self.path.exists():
            if not self._partial.exists():
                self._journal.unlink(missing_ok=True)
            os.close(os.open(self._partial, os.O_CREAT | os.O_WRONLY, 0o644))

    def missing_parts(self) -> list[Callable[[], None]]:
        """What fetches each part that is not there yet; those that are count as done."""
        done = set(range(self.parts)) if self.path.exists() else self._journalled()
        self._progress.advance(sum(self._range(part)[1] for part in done))
        return [self._part_fetcher(part) for part in range(self.parts) if part not in done]

    def finish(self) -> None:
        """Check the file and give it its final name; a file that is not what S3 says is removed (``DataError``)."""
        if self.path.exists():  # before, or by another download
            return
        problem = self._problem()
        if problem:
            self._journal.unlink(missing_ok=True)
            self._partial.unlink(missing_ok=True)
            raise DataError(f"{self.label}: {problem}; upload it again, or run again if the network is to blame")
        self._partial.rename(self.path)
        self._journal.unlink(missing_ok=True)

    def _journalled(self) -> set[int]:
        try:
            lines = self._journal.read_text().splitlines()
        except FileNotFoundError:
            return set()
        return {int(line) for line in lines if re.fullmatch(r"\d{8}", line) and int(line) < self.parts}

    def _range(self, part: int) -> tuple[int, int]:
        """Where ``part`` begins, and how many bytes it has."""
        start = part * PART
        return start, min(PART, self.item.size - start)

    def _part_fetcher(self, part: int) -> Callable[[], None]:
        return lambda: self._fetch_part(part)

    def _fetch_part(self, part: int) -> None:
        start, size = self._range(part)
        fd = os.open(self._partial, os.O_WRONLY)
        try:
            offset, end = start, start + size
            for attempt in range(TRIES):
                offset = self._copy(fd, offset, end)
                if offset == end:
                    break
                time.sleep(min(5.0, 0.2 * 2**attempt))
            else:
                raise UnavailableError(
                    f"{self.label}: bytes were lost on the way {TRIES} times in a row; run again, it goes on from here"
                )
            os.fdatasync(fd)
        finally:
            os.close(fd)
        journal = os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(journal, b"%08d\n" % part)
        finally:
            os.close(journal)

    def _copy(self, fd: int, offset: int, end: int) -> int:
        """Copy bytes ``offset`` to ``end`` of the object; returns how far it came in good order."""
        from botocore.exceptions import FlexibleChecksumError, HTTPClientError, IncompleteReadError
        from urllib3.exceptions import HTTPError

        if offset == end:
            return end
        self._check_cancelled()
        with _translated(self._bucket, self.item.key):
            answer = self._client.get_object(
                Bucket=self._bucket, Key=self.item.key, IfMatch=self.item.etag, Range=f"bytes={offset}-{end - 1}"
            )
        if answer["ContentLength"] != end - offset:
            raise UnavailableError(f"{self.label}: the endpoint does not serve ranges; a proxy may be in the way")
        begin = offset
        try:
            for block in answer["Body"].iter_chunks(BLOCK):
                _write_at(fd, block, offset)
                offset += len(block)
                self._progress.advance(len(block))
                self._check_cancelled()
        except (HTTPClientError, IncompleteReadError, HTTPError, ConnectionError, TimeoutError):
            return offset
        except FlexibleChecksumError:  # S3 sent a checksum with these bytes, and they are others
            self._progress.advance(begin - offset)
            return begin
        finally:
            answer["Body"].close()
        return offset

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise StoppedError(f"{self.label}: cancelled")

    def _problem(self) -> str:
        """Why the file is not the object; empty when it is."""
        size = self._partial.stat().st_size
        if size != self.item.size:
            return f"{size} bytes arrived of {self.item.size}"
        with _translated(self._bucket, self.item.key):
            head = self._client.head_object(
                Bucket=self._bucket, Key=self.item.key, IfMatch=self.item.etag, ChecksumMode="ENABLED"
            )
        for what, algorithm, expected in _expectations(dict(head), self.item.etag):
            if _hash(self._partial, algorithm) != expected:
                return f"its content does not agree with its {what}"
            return ""
        return ""


def _expectations(head: dict[str, Any], etag: str) -> Iterator[tuple[str, str, str]]:
    """What S3 knows of an object's content, strongest first: (in words, algorithm, hash as hex)."""
    checksum = head.get("ChecksumSHA256", "")
    if checksum and "-" not in checksum:  # with a dash it is a hash of the parts' hashes
        yield "SHA-256 checksum", "sha256", base64.b64decode(checksum).hex()
    metadata = head.get("Metadata", {}).get("sha256", "").strip().lower()
    if metadata:
        yield "metadata 'sha256'", "sha256", metadata
    plain = head.get("ServerSideEncryption", "AES256") == "AES256" and "SSECustomerAlgorithm" not in head
    if plain and re.fullmatch(r'"[0-9a-f]{32}"', etag):
        yield "ETag (MD5)", "md5", etag.strip('"')


def _hash(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _write_at(fd: int, block: bytes, offset: int) -> None:
    view = memoryview(block)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _all(pool: ThreadPoolExecutor, jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs and raise the first error as soon as there is one."""
    futures = [pool.submit(job) for job in jobs]
    for future in as_completed(futures):
        future.result()


def _client() -> S3Client:
    import boto3
    from botocore.config import Config

    retries = {"mode": "standard", "total_max_attempts": TRIES}
    settings = Config(connect_timeout=10, read_timeout=30, max_pool_connections=2 * THREADS, retries=retries)  # type: ignore[arg-type]
    return boto3.client("s3", config=settings)


def _listing(client: S3Client, bucket: str, prefix: str) -> Iterable[RemoteObject]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            yield RemoteObject(item["Key"], item["Size"], item["ETag"])


def _chosen(objects: list[RemoteObject], prefix: str, uri: str) -> list[RemoteObject]:
    """Of all keys that begin with ``prefix``: that very key, else what lies in that folder, else all of them."""
    objects = [item for item in objects if not item.key.endswith("/")]  # consoles mark folders so
    folder = prefix.rstrip("/") + "/" if prefix else ""
    exact = [item for item in objects if item.key == prefix]
    below = [item for item in objects if item.key.startswith(folder)]
    chosen = sorted((item for item in exact or below or objects if supported(item.key)), key=lambda item: item.key)
    if not chosen:
        if not objects:
            raise ConfigurationError(f"--dataset-uri: there is nothing at {uri}")
        raise nothing_supported(uri)
    return chosen


@contextmanager
def _translated(bucket: str, key: str) -> Iterator[None]:
    """Errors of boto3 as ours, in one line with the address."""
    from botocore import exceptions as aws

    where = f"s3://{bucket}/{key}"
    try:
        yield
    except PipelineError:
        raise
    except aws.ClientError as error:
        raise _of_answer(error.response, where, bucket) from None
    except (
        aws.NoCredentialsError,
        aws.PartialCredentialsError,
        aws.CredentialRetrievalError,
        aws.TokenRetrievalError,
    ) as error:
        raise DeniedError(
            f"{where}: {error}; give AWS credentials (environment, profile or a service account's role)"
        ) from None
    except (aws.ConnectionError, aws.HTTPClientError, aws.IncompleteReadError) as error:
        raise UnavailableError(f"{where}: S3 does not answer ({error}); run again when it does") from None
    except (aws.BotoCoreError, ValueError) as error:
        raise ConfigurationError(f"{where}: {' '.join(str(error).split())}") from None


def _of_answer(response: Any, where: str, bucket: str) -> PipelineError:
    error = response.get("Error", {})
    code, message = str(error.get("Code", "")), " ".join(str(error.get("Message", "")).split())
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "NoSuchBucket":
        return ConfigurationError(f"{where}: there is no bucket '{bucket}'")
    if code in DENIED or status in (401, 403):
        return DeniedError(f"{where}: access denied ({code}: {message}); it takes s3:ListBucket and s3:GetObject")
    if code in MISSING or code in ("PreconditionFailed", "412"):
        return UnavailableError(f"{where}: changed or removed while it was downloaded; run again")
    if code in MISCONFIGURED:
        return ConfigurationError(f"{where}: {code}: {message}")
    return UnavailableError(f"{where}: S3 answered {code or status}: {message}; run again")
