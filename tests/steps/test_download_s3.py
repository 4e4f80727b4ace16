"""The s3:// source against moto's server over HTTP: parallel, resumed, verified, and clear about what is wrong."""

from __future__ import annotations

import gzip
import hashlib
import io
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from download_servers import moto_server, proxy
from download_support import as_bytes, command, download, environment, made, nothing_made, refused, tokens
from pyarrow import parquet

# boto3 says so of Python versions it is about to drop, and uses what Python 3.12 deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:boto.*"),
    pytest.mark.filterwarnings("ignore:Boto3 will no longer support"),
]
MEGABYTE = 1024 * 1024


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto_server() as address:
        yield address


@pytest.fixture
def bucket(endpoint: str) -> tuple[Any, str]:
    """A client and a fresh bucket."""
    import boto3

    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    client.create_bucket(Bucket=name)
    return client, name


def large_text(megabytes: int) -> bytes:
    """Text whose every line is another."""
    lines = (f"line {number} of a text that is long\n".encode() for number in range(megabytes * MEGABYTE // 30))
    return b"".join(lines)[: megabytes * MEGABYTE]


def journalled(root: Path, count: int, process: subprocess.Popen[Any]) -> set[int]:
    """The parts in the journal, once there are ``count``."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "ended too early for this test"
        for journal in root.glob("datasets/.staging/*/*.parts"):
            lines = journal.read_text().split()
            if len(lines) >= count:
                return {int(line) for line in lines}
        time.sleep(0.005)
    raise AssertionError("no parts")


def content(directory: Path) -> bytes:
    """The text of a dataset of one byte-tokenized document."""
    found = b"".join(path.read_bytes() for path in sorted(directory.glob("shard-*")))
    assert found[-2:] == b"\0\1"
    assert not any(found[1:-2:2])
    return found[:-2:2]


def test_a_prefix_an_object_and_a_part_of_a_name(tmp_path: Path, endpoint: str, bucket: tuple[Any, str]) -> None:
    client, name = bucket
    table = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["row"]}), table)
    objects = {
        "set/b.jsonl": b'{"text": "second"}\n{"text": "third"}\n', "set/a.txt": b"first", "set/": b"", "set/empty.txt": b"",
        "set/sub/c.jsonl.gz": gzip.compress(b'{"text": "fourth"}\n'), "set/sub/d.parquet": table.getvalue(),
        "set/notes.md": b"no", "settle/x.txt": b"another folder",
    }  # fmt: skip
    for key, body in objects.items():
        client.put_object(Bucket=name, Key=key, Body=body)
    env = {"AWS_ENDPOINT_URL": endpoint}
    for prefix in ("set", "set/"):
        directory, manifest = made(tmp_path, f"s3://{name}/{prefix}", env=env)
        assert tokens(directory) == as_bytes("first", "second", "third", "fourth", "row")
        assert directory.name.startswith("set-") and manifest.revision.startswith(f"5 objects of {name}")
    assert tokens(made(tmp_path, f"s3://{name}/set/b.jsonl", env=env)[0]) == as_bytes("second", "third")
    assert tokens(made(tmp_path, f"s3://{name}/sett", env=env)[0]) == as_bytes("another folder")
    assert tokens(made(tmp_path, f"s3://{name}", env=env)[0]) == as_bytes(
        "first", "second", "third", "fourth", "row", "another folder"
    )
    assert not list((tmp_path / "datasets/.staging").iterdir())


def test_a_second_call_fetches_nothing_and_a_change_of_same_size_is_noticed(
    tmp_path: Path, endpoint: str, bucket: tuple[Any, str]
) -> None:
    client, name = bucket
    client.put_object(Bucket=name, Key="a.txt", Body=b"the old text")
    with proxy(endpoint) as (address, requests):
        env = {"AWS_ENDPOINT_URL": address}
        first, _ = made(tmp_path, f"s3://{name}/a.txt", env=env)
        assert requests.ranges() == ["bytes=0-11"]
        made(tmp_path, f"s3://{name}/a.txt", env=env)
        assert requests.ranges() == ["bytes=0-11"]
        client.put_object(Bucket=name, Key="a.txt", Body=b"the new text")
        second, _ = made(tmp_path, f"s3://{name}/a.txt", env=env)
    assert (tokens(first), tokens(second)) == (as_bytes("the old text"), as_bytes("the new text"))


def test_a_large_object_comes_in_parts_and_a_killed_download_goes_on(
    tmp_path: Path, endpoint: str, bucket: tuple[Any, str]
) -> None:
    client, name = bucket
    body = large_text(66)
    digest = hashlib.sha256(body).hexdigest()
    client.upload_fileobj(io.BytesIO(body), name, "large.txt", ExtraArgs={"Metadata": {"sha256": digest}})
    with proxy(endpoint) as (address, requests):
        requests.hold_after = 3
        env = {"AWS_ENDPOINT_URL": address}
        process = subprocess.Popen(
            command(tmp_path, f"s3://{name}/large.txt"), env=environment(env), stdout=subprocess.DEVNULL
        )
        done = journalled(tmp_path, 3, process)
        process.kill()
        process.wait()
        nothing_made(tmp_path)
        requests.hold_after = 1000
        requests.release.set()
        requests.seen.clear()
        directory, manifest = made(tmp_path, f"s3://{name}/large.txt", env=env)
        part = 8 * MEGABYTE
        missing = [number for number in range(9) if number not in done]
        expected = [f"bytes={number * part}-{min(len(body), (number + 1) * part) - 1}" for number in missing]
        assert sorted(requests.ranges()) == sorted(expected)
    assert content(directory) == body
    assert manifest.documents == 1
    assert not list((tmp_path / "datasets/.staging").iterdir())


def test_sigterm_ends_even_a_download_that_hangs(tmp_path: Path, endpoint: str, bucket: tuple[Any, str]) -> None:
    client, name = bucket
    client.put_object(Bucket=name, Key="a.txt", Body=large_text(30))
    with proxy(endpoint) as (address, requests):
        requests.hold_after = 1
        process = subprocess.Popen(
            command(tmp_path, f"s3://{name}/a.txt"),
            env=environment({"AWS_ENDPOINT_URL": address}), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        journalled(tmp_path, 1, process)
        begin = time.monotonic()
        process.terminate()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - begin < 15
        assert process.returncode == 75
        assert errors.splitlines() == ["error: stopped by SIGTERM; a new attempt goes on from what has been fetched"]
        requests.release.set()
    nothing_made(tmp_path)


def test_cut_connections_are_taken_up_where_they_were_cut(
    tmp_path: Path, endpoint: str, bucket: tuple[Any, str]
) -> None:
    client, name = bucket
    body = large_text(3)
    client.put_object(Bucket=name, Key="a.txt", Body=body)
    with proxy(endpoint) as (address, requests):
        requests.cut_after, requests.cuts = MEGABYTE, 2
        directory, _ = made(tmp_path, f"s3://{name}/a.txt", env={"AWS_ENDPOINT_URL": address})
        assert [int(asked.partition("=")[2].partition("-")[0]) for asked in requests.ranges()] == [
            0,
            MEGABYTE,
            2 * MEGABYTE,
        ]
    assert content(directory) == body


def test_a_connection_that_is_always_cut_ends_with_69(tmp_path: Path, endpoint: str, bucket: tuple[Any, str]) -> None:
    client, name = bucket
    client.put_object(Bucket=name, Key="a.txt", Body=large_text(1))
    with proxy(endpoint) as (address, requests):
        requests.cut_after, requests.cuts = 100, 1000
        done = download(tmp_path, f"s3://{name}/a.txt", env={"AWS_ENDPOINT_URL": address})
    refused(done, 69, f"s3://{name}/a.txt", "5 times in a row", "run again")
    nothing_made(tmp_path)


def test_bytes_that_s3_itself_knows_to_be_wrong_are_fetched_again(
    tmp_path: Path, endpoint: str, bucket: tuple[Any, str]
) -> None:
    client, name = bucket
    client.put_object(Bucket=name, Key="a.txt", Body=large_text(1), ChecksumAlgorithm="CRC32")
    with proxy(endpoint) as (address, requests):
        requests.corrupt = True
        done = download(tmp_path, f"s3://{name}/a.txt", env={"AWS_ENDPOINT_URL": address})
        refused(done, 69, f"s3://{name}/a.txt", "5 times in a row")
        assert requests.ranges() == [f"bytes=0-{MEGABYTE - 1}"] * 5
    nothing_made(tmp_path)


@pytest.mark.parametrize("known_by", ["checksum", "metadata", "etag"])
def test_wrong_bytes_are_refused(tmp_path: Path, endpoint: str, bucket: tuple[Any, str], known_by: str) -> None:
    client, name = bucket
    body = large_text(1)
    options: dict[str, Any] = {}
    if known_by == "checksum":
        options = {"ChecksumAlgorithm": "SHA256"}
    elif known_by == "metadata":
        options = {"Metadata": {"sha256": hashlib.sha256(body).hexdigest()}}
    client.put_object(Bucket=name, Key="a.txt", Body=body, **options)
    said = {"checksum": "SHA-256 checksum", "metadata": "metadata 'sha256'", "etag": "ETag (MD5)"}[known_by]
    with proxy(endpoint) as (address, requests):
        requests.corrupt = requests.strip_checksums = True
        env = {"AWS_ENDPOINT_URL": address}
        refused(download(tmp_path, f"s3://{name}/a.txt", env=env), 65, f"s3://{name}/a.txt", said)
        nothing_made(tmp_path)
        requests.corrupt = False
        assert content(made(tmp_path, f"s3://{name}/a.txt", env=env)[0]) == body


def test_an_object_that_changes_meanwhile_is_not_mixed(tmp_path: Path, endpoint: str, bucket: tuple[Any, str]) -> None:
    client, name = bucket
    client.put_object(Bucket=name, Key="a.txt", Body=b"a" * 66 * MEGABYTE)
    with proxy(endpoint) as (address, requests):
        requests.hold_after = 0
        process = subprocess.Popen(
            command(tmp_path, f"s3://{name}/a.txt"),
            env=environment({"AWS_ENDPOINT_URL": address}), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while len(requests.ranges()) < 8:  # all that are asked for at once, of nine parts
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        client.put_object(Bucket=name, Key="a.txt", Body=b"b" * 66 * MEGABYTE)
        requests.release.set()
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 69, errors
    assert errors.splitlines() == [f"error: s3://{name}/a.txt: changed or removed while it was downloaded; run again"]
    nothing_made(tmp_path)


def test_what_s3_refuses(tmp_path: Path, endpoint: str, bucket: tuple[Any, str]) -> None:
    client, name = bucket
    client.put_object(Bucket=name, Key="notes/a.md", Body=b"x")
    env = {"AWS_ENDPOINT_URL": endpoint}
    refused(download(tmp_path, "s3://no-such-bucket-here/x", env=env), 64, "there is no bucket 'no-such-bucket-here'")
    refused(download(tmp_path, f"s3://{name}/nothing", env=env), 64, f"there is nothing at s3://{name}/nothing")
    refused(download(tmp_path, f"s3://{name}/notes", env=env), 64, "no file to read", ".jsonl.gz")
    refused(download(tmp_path, "s3://Not_A_Bucket!/x", env=env), 64, "Not_A_Bucket!")
    refused(download(tmp_path, f"s3://{name}/x", env={"AWS_ENDPOINT_URL": "nonsense"}), 64, "nonsense")
    nothing_made(tmp_path)


def test_no_credentials(tmp_path: Path, endpoint: str) -> None:
    env = {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"), "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }  # fmt: skip
    refused(download(tmp_path, "s3://bucket/x", env=env), 77, "credentials")


def test_an_endpoint_that_is_down(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = download(tmp_path, "s3://bucket/x", env={"AWS_ENDPOINT_URL": address})
    refused(done, 69, "S3 does not answer", "run again")
    nothing_made(tmp_path)


def test_an_endpoint_that_fails(tmp_path: Path, endpoint: str) -> None:
    with proxy(endpoint) as (address, requests):
        requests.fail_with = 503
        refused(download(tmp_path, "s3://bucket/x", env={"AWS_ENDPOINT_URL": address}), 69, "503", "run again")
        assert len(requests.seen) > 1, "boto3 was to try again"


def test_access_denied(tmp_path: Path) -> None:
    """In a server of its own, for access control is switched on for all of it."""
    import boto3

    with moto_server() as address:
        keys = {
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "region_name": "us-east-1",
            "endpoint_url": address,
        }
        boto3.client("s3", **keys).create_bucket(Bucket="closed")
        iam = boto3.client("iam", **keys)
        iam.create_user(UserName="nobody")
        key = iam.create_access_key(UserName="nobody")["AccessKey"]
        request = urllib.request.Request(
            f"{address}/moto-api/reset-auth", data=b"0", headers={"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request, timeout=10).close()
        env = {"AWS_ENDPOINT_URL": address}
        known = env | {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
        refused(
            download(tmp_path, "s3://closed/x", env=known),
            77,
            "s3://closed/x: access denied (AccessDenied",
            "s3:GetObject",
        )
        refused(download(tmp_path, "s3://closed/x", env=env), 77, "s3://closed/x: access denied (InvalidAccessKeyId")
    nothing_made(tmp_path)


def test_many_at_once_share_what_they_fetch(tmp_path: Path, endpoint: str, bucket: tuple[Any, str]) -> None:
    client, name = bucket
    body = large_text(20)
    client.put_object(Bucket=name, Key="a.txt", Body=body)
    arguments = command(tmp_path, f"s3://{name}/a.txt")
    env = environment({"AWS_ENDPOINT_URL": endpoint})
    processes = [
        subprocess.Popen(arguments, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(3)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors.decode()
    directory, _ = made(tmp_path, f"s3://{name}/a.txt", env={"AWS_ENDPOINT_URL": endpoint})
    assert content(directory) == body
    assert {entry.name for entry in (tmp_path / "datasets").iterdir()} == {".index", ".staging", directory.name}
