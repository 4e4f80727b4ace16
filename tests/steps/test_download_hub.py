"""The hf:// source with the real huggingface_hub, against a small HTTP server that answers what the hub answers."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow
import pytest
from download_support import as_bytes, documents, download, made, nothing_made, refused, tokens
from pyarrow import parquet

from steps.source_hub import matches

FIRST, SECOND = "1" * 40, "2" * 40


def table(*texts: str | None, column: str = "text") -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), column: list(texts)}), file, row_group_size=2)
    return file.getvalue()


@dataclass
class Hub:
    """One dataset, ``owner/name``, by commit; ``main`` is the newest."""

    commits: dict[str, dict[str, bytes]]
    token: str = ""
    """Asked for when not empty."""
    gated: bool = False
    wrong_bytes: int = 0
    """Answer so many downloads of ``wrong_name`` with other bytes."""
    wrong_name: str = ""
    status: int = 0
    """Answer everything so."""
    seen: list[tuple[str, str]] = field(default_factory=list)

    def downloads(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path in self.seen if method == "GET" and "/resolve/" in path]

    def describe(self, commit: str) -> bytes:
        files = [
            {
                "rfilename": name, "size": len(body), "blobId": "0" * 40,
                "lfs": {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130},
            }
            for name, body in self.commits[commit].items()
        ]  # fmt: skip
        return json.dumps({"id": "owner/name", "sha": commit, "siblings": files}).encode()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.seen.append((self.command, path))
            newest = list(hub.commits)[-1]
            if hub.status:
                self._answer(hub.status)
            elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._answer(403 if hub.gated else 401, {"X-Error-Code": "GatedRepo" if hub.gated else "RepoNotFound"})
            elif not path.startswith(("/api/datasets/owner/name", "/datasets/owner/name/")):
                self._answer(404, {"X-Error-Code": "RepoNotFound"})
            elif path.startswith("/api/"):
                revision = path.partition("/revision/")[2] or "main"
                commit = newest if revision == "main" else revision
                if commit not in hub.commits:
                    self._answer(404, {"X-Error-Code": "RevisionNotFound"})
                else:
                    self._answer(200, {"Content-Type": "application/json"}, hub.describe(commit))
            else:
                commit, _, name = path.removeprefix("/datasets/owner/name/resolve/").partition("/")
                self._file(commit, name)

        do_HEAD = do_GET

        def _file(self, commit: str, name: str) -> None:
            body = hub.commits[commit][name]
            headers = {
                "X-Repo-Commit": commit,
                "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
                "Accept-Ranges": "bytes",
            }
            if self.command == "GET" and hub.wrong_bytes and name == hub.wrong_name:
                hub.wrong_bytes -= 1
                body = bytes([body[0] ^ 1]) + body[1:]
            self._answer(200, headers, body)

        def _answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            return

    return Handler


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[dict[str, str]]:
    """Serve ``hub``; yields the environment that leads there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HUB_DISABLE_TELEMETRY": "1"}
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


@pytest.fixture
def hub() -> Hub:
    return Hub(
        {
            FIRST: {"data/train-00000.parquet": table("old one", "old two")},
            SECOND: {
                "README.md": b"no text of the dataset",
                "data/train-00001.parquet": table("four"),
                "data/train-00000.parquet": table("one", "two", None, "three"),
                "data/test-00000.parquet": table("held out, for a test"),
                "extra/notes.jsonl": b'{"text": "some notes"}\n',
            },
        }
    )


def test_a_glob_of_parquet_files_at_the_newest_commit(tmp_path: Path, hub: Hub) -> None:
    with serving(hub) as env:
        env["HF_HOME"] = str(tmp_path / "home")
        directory, manifest = made(tmp_path, "hf://datasets/owner/name/data/train-*.parquet", env=env)
        assert tokens(directory) == as_bytes("one", "two", "three", "four")
        assert SECOND in manifest.revision and directory.name.startswith("name-")
        assert sorted(hub.downloads()) == ["train-00000.parquet", "train-00001.parquet"]
        made(tmp_path, "hf://datasets/owner/name/data/train-*.parquet", env=env)
        assert len(hub.downloads()) == 2, "a second call fetches nothing"
    assert not list((tmp_path / "datasets/.staging").iterdir())


def test_a_revision_a_folder_and_everything(tmp_path: Path, hub: Hub) -> None:
    with serving(hub) as env:
        env["HF_HOME"] = str(tmp_path / "home")
        old, manifest = made(tmp_path, f"hf://datasets/owner/name@{FIRST}/data", env=env)
        assert tokens(old) == as_bytes("old one", "old two")
        assert FIRST in manifest.revision
        everything, _ = made(tmp_path, "hf://datasets/owner/name", env=env)
        assert [bytes(text).decode() for text in documents(everything)] == [
            "held out, for a test", "one", "two", "three", "four", "some notes",
        ]  # fmt: skip


def test_the_token_comes_from_the_environment(tmp_path: Path, hub: Hub) -> None:
    hub.token = "secret-of-the-test"
    with serving(hub) as env:
        env["HF_HOME"] = str(tmp_path / "home")
        uri = "hf://datasets/owner/name/extra/*"
        denied = download(tmp_path, uri, env=env)
        secret = "HF_TOKEN (on a cluster the key 'token' of secret holdfast-hub)"
        refused(denied, 64, f"no such dataset, or a private one that {secret} may not read")
        hub.gated = True
        refused(download(tmp_path, uri, env=env), 77, "gated", secret)
        hub.status = 403
        refused(download(tmp_path, uri, env=env), 77, "denies access (403)", secret)
        hub.status = 0
        nothing_made(tmp_path)
        done = download(tmp_path, uri, env=env | {"HF_TOKEN": hub.token})
        assert done.returncode == 0, done.stderr
        everything = done.stdout + done.stderr + "".join(path.read_text() for path in tmp_path.rglob("*.json"))
        assert hub.token not in everything


def test_wrong_bytes_are_fetched_again_once_then_refused_and_whole_files_kept(tmp_path: Path, hub: Hub) -> None:
    uri = "hf://datasets/owner/name/data/train-*"
    hub.wrong_name = "data/train-00001.parquet"
    with serving(hub) as env:
        env["HF_HOME"] = str(tmp_path / "home")
        hub.wrong_bytes = 2
        refused(download(tmp_path, uri, env=env), 65, "train-00001.parquet", "the hub's SHA-256")
        nothing_made(tmp_path)
        hub.wrong_bytes = 1
        hub.seen.clear()
        assert tokens(made(tmp_path, uri, env=env)[0]) == as_bytes("one", "two", "three", "four")
        assert hub.downloads() == ["train-00001.parquet"] * 2


def test_what_the_hub_refuses(tmp_path: Path, hub: Hub) -> None:
    with serving(hub) as env:
        env["HF_HOME"] = str(tmp_path / "home")
        refused(download(tmp_path, "hf://datasets/owner/other", env=env), 64, "no such dataset")
        refused(download(tmp_path, "hf://datasets/owner/name@v9", env=env), 64, "no such revision")
        refused(download(tmp_path, "hf://datasets/owner/name/data/*.csv", env=env), 64, "no file to read", ".parquet")
        refused(download(tmp_path, "hf://datasets/owner/--x", env=env), 64, "hf://datasets/owner/--x")
        hub.status = 500
        refused(download(tmp_path, "hf://datasets/owner/name", env=env), 69, "500", "run again")
    nothing_made(tmp_path)


def test_a_hub_that_is_down(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}", "HF_HOME": str(tmp_path / "home")}
        refused(download(tmp_path, "hf://datasets/owner/name", env=env), 69, "the hub does not answer", "run again")
    nothing_made(tmp_path)


@pytest.mark.parametrize(
    ("glob", "name", "fits"),
    [
        ("", "a/b.parquet", True),
        ("a", "a/b.parquet", True),
        ("a/", "a/b.parquet", True),
        ("a/b.parquet", "a/b.parquet", True),
        ("*.parquet", "a/b.parquet", False),
        ("*/*.parquet", "a/b.parquet", True),
        ("**/*.parquet", "b.parquet", True),
        ("**/*.parquet", "a/c/b.parquet", True),
        ("a/**", "a/c/b.parquet", True),
        ("a/?.parquet", "a/b.parquet", True),
        ("a/?.parquet", "a/bb.parquet", False),
        ("a.b", "axb", False),
        ("ab", "abc/d.parquet", False),
    ],
)
def test_globs(glob: str, name: str, fits: bool) -> None:
    assert matches(name, glob) is fits
