"""What a user can get wrong: each ends with one line that says what to do, the right exit code, and nothing half-made."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
from pathlib import Path

import pyarrow
import pytest
from download_support import command, download, environment, nothing_made, refused
from pyarrow import parquet

TEXT = "a text that is long enough for a sequence\n"


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def cut_gzip() -> bytes:
    whole = gzip.compress(json.dumps({"text": os.urandom(4000).hex()}).encode())
    return whole[: len(whole) // 2]


FILES: dict[str, tuple[str, bytes, int, tuple[str, ...]]] = {
    "empty file": ("a.txt", b"", 64, ("is empty", "no text")),
    "empty lines": ("a.jsonl", b"\n\n", 64, ("is empty",)),
    "not UTF-8": ("a.txt", b"x" * 2_000_000 + b"\xff\xfe", 65, ("a.txt", "not UTF-8", "byte offset 2000000", "iconv")),
    "UTF-8 cut at the end": ("a.txt", "xé".encode()[:-1], 65, ("byte offset 1",)),
    "UTF-16": ("a.txt", TEXT.encode("utf-16"), 65, ("byte offset 0",)),
    "BOM, then not UTF-8": ("a.txt", b"\xef\xbb\xbfabc\xff", 65, ("byte offset 6",)),
    "jsonl not UTF-8": ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', 65, ("byte offset 25",)),
    "gzip not UTF-8": ("a.txt.gz", gzip.compress(b"ab\xff"), 65, ("unpacked", "2;")),
    "cut gzip": ("a.jsonl.gz", cut_gzip(), 65, ("a.jsonl.gz", "cut short")),
    "not gzip": ("a.jsonl.gz", b'{"text": "x"}\n', 65, ("a.jsonl.gz", "not a whole gzip")),
    "damaged gzip": ("a.txt.gz", gzip.compress(TEXT.encode())[:-8] + b"\0" * 8, 65, ("not a whole gzip",)),
    "broken line": ("a.jsonl", b'{"text": "x"}\n{"text": "y"\n', 65, ("a.jsonl:2", "not a line of JSON")),
    "line of another kind": ("a.jsonl", b"[1]\n", 65, ("a.jsonl:1", "a list")),
    "deep line": ("a.jsonl", b"[" * 100_000, 65, ("a.jsonl:1", "not a line of JSON")),
    "half a surrogate": ("a.jsonl", b'{"text": "a\\ud800b"}\n', 65, ("a.jsonl:1", "surrogate")),
    "missing field": (
        "a.jsonl",
        b'{"id": 1, "body": "x"}\n',
        64,
        ("a.jsonl:1", "no field 'text'", "id, body", "?field=NAME"),
    ),
    "field of another type": ("a.jsonl", b'{"text": 5}\n', 65, ("a.jsonl:1", "'text' is a int")),
    "unsupported": ("a.pdf", b"%PDF", 64, ("no file to read", ".jsonl.gz")),
    "not parquet": ("a.parquet", b"PAR1 and no more", 65, ("a.parquet", "not a whole parquet")),
    "shorter than a sequence": ("a.txt", b"1234567", 64, ("--sequence-length", "8 needs more tokens than the 8")),
}


IN_A_FOLDER = ("empty file", "cut gzip", "unsupported")


@pytest.mark.parametrize(("case", "below"), [(case, False) for case in FILES] + [(case, True) for case in IN_A_FOLDER])
def test_files(tmp_path: Path, case: str, below: bool) -> None:
    name, content, code, words = FILES[case]
    write(tmp_path / "data" / name, content)
    uri = f"file://{tmp_path}/data" + ("" if below else f"/{name}")
    done = download(tmp_path / "fsx", uri)
    refused(done, code, *words)
    if case != "shorter than a sequence":  # there the dataset is whole, and only of no use for this run
        nothing_made(tmp_path / "fsx")
    assert not (tmp_path / "fsx/runs/test/outputs").exists()


ADDRESSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "no scheme": ("data/corpus", ("'data/corpus' is not builtin:",)),
    "unknown scheme": ("gs://bucket/x", ("'gs://bucket/x'", "s3://bucket/prefix")),
    "misspelt builtin": ("builtin", ("'builtin' is not builtin:",)),
    "relative": ("file://data/corpus", ("not an absolute path",)),
    "missing": ("file:///no/such/folder", ("/no/such/folder does not exist",)),
    "below a file": ("file:///etc/hostname/x", ("does not exist",)),
    "special": ("file:///dev/null", ("no file to read",)),
    "no bucket": ("s3://", ("names no bucket",)),
    "not a dataset of the hub": ("hf://models/x/y", ("hf://datasets/owner/name",)),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_addresses(tmp_path: Path, case: str) -> None:
    uri, words = ADDRESSES[case]
    refused(download(tmp_path, uri), 64, *words)
    nothing_made(tmp_path)


def test_a_bare_path_is_answered_with_its_uri(tmp_path: Path) -> None:
    refused(download(tmp_path / "fsx", str(tmp_path)), 64, f"did you mean file://{tmp_path}?")


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    refused(download(tmp_path / "fsx", f"file://{tmp_path}/data"), 64, "no file to read")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data/a.txt")
    refused(download(tmp_path / "fsx", f"file://{tmp_path}/data"), 64, "a.txt is not a plain file")


def test_a_parquet_without_the_field(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    refused(download(tmp_path / "fsx", f"file://{tmp_path}/a.parquet"), 64, "no field 'text'", "body")
    parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "a.parquet")
    refused(download(tmp_path / "fsx", f"file://{tmp_path}/a.parquet"), 65, "int64, not text")


def without_privilege(arguments: list[str]) -> list[str]:
    """The command without root's right to pass over permissions."""
    if os.geteuid() != 0:
        return arguments
    if not shutil.which("setpriv"):
        pytest.skip("root reads everything, and there is no setpriv here to give that up")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", *arguments]


@pytest.mark.parametrize("what", ["file", "folder", "root", "tokenizer"])
def test_permission_denied(tmp_path: Path, what: str) -> None:
    write(tmp_path / "data/sub/a.txt", TEXT.encode())
    write(tmp_path / "tokenizer.json", b"{}")
    root = tmp_path / "fsx"
    root.mkdir()
    closed = {
        "file": tmp_path / "data/sub/a.txt", "folder": tmp_path / "data/sub", "root": root, "tokenizer": tmp_path / "tokenizer.json",
    }[what]  # fmt: skip
    closed.chmod(0o555 if what == "root" else 0)
    flags = ["--tokenizer", str(closed)] if what == "tokenizer" else []
    done = subprocess.run(
        without_privilege(command(root, f"file://{tmp_path}/data", *flags)),
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    refused(done, 77, str(closed), "permission denied", "change its owner or mode")
    nothing_made(root)


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "fsx").write_text("")
    refused(download(tmp_path / "fsx", "builtin:"), 64, "--root", "directory")


TOKENIZERS: dict[str, tuple[dict[str, bytes], tuple[str, ...]]] = {
    "missing": ({}, ("tokenizer.json does not exist", "'byte'")),
    "not JSON": ({"tokenizer.json": b"not json"}, ("not a tokenizer.json",)),
    "other JSON": ({"tokenizer.json": b'{"model": 1}'}, ("not a tokenizer.json",)),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers(tmp_path: Path, case: str) -> None:
    files, words = TOKENIZERS[case]
    for name, content in files.items():
        write(tmp_path / name, content)
    done = download(tmp_path / "fsx", "builtin:", "--tokenizer", str(tmp_path / "tokenizer.json"))
    refused(done, 64, "--tokenizer", *words)
    nothing_made(tmp_path / "fsx")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sequence-lenght", "8"], ["unrecognized arguments: --sequence-lenght"]),
        (["--sequence-length", "many"], ["--sequence-length", "integer"]),
        (["--sequence-length", "1000000"], ["1000000 needs more tokens", "shorter sequence or more text"]),
        (["--run-id", "Upper"], ["--run-id", "lower-case"]),
    ],
)
def test_flags(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    refused(download(tmp_path, "builtin:", *flags), 64, *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("module", "suffix"), [("pyarrow", "a.parquet"), ("huggingface_hub", "")])
def test_a_missing_extra_is_named(tmp_path: Path, module: str, suffix: str) -> None:
    write(tmp_path / "data/a.parquet", b"PAR1")
    uri = f"file://{tmp_path}/data/a.parquet" if suffix else "hf://datasets/owner/name"
    script = f"import sys; sys.modules['{module}'] = None; from trainer.errors import exit_with; from steps.download import main; exit_with(main)"
    arguments = command(tmp_path / "fsx", uri)
    done = subprocess.run(
        [arguments[0], "-c", script, *arguments[3:]], env=environment(), capture_output=True, text=True, timeout=60
    )
    refused(done, 64, "extra 'hf'", "pip install 'holdfast[hf]'")
