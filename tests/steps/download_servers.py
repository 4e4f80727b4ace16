"""Real HTTP servers for the tests of steps.download: moto's S3, and a proxy in front of it that misbehaves on request."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """moto's server in a process of its own, which ends with ours; yields its endpoint."""
    process = subprocess.Popen(
        [sys.executable, "-c", MOTO],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait(timeout=10)


@dataclass
class Requests:
    """What passed through the proxy, and what it shall do to the answers of objects."""

    seen: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, Range) of each."""
    cut_after: int = -1
    """Close the connection after so many bytes of a body, ..."""
    cuts: int = 0
    """... so many times."""
    corrupt: bool = False
    """Change the first byte of every object's body."""
    strip_checksums: bool = False
    """Send no checksums with the bodies, like a store that knows none."""
    hold_after: int = 1_000_000
    """Answer so many requests for objects, then hold the others back until ``release`` is set."""
    release: threading.Event = field(default_factory=threading.Event)
    fail_with: int = 0
    """Answer with this status instead."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ranges(self) -> list[str]:
        """The ranges asked for."""
        return [asked for method, _, asked in self.seen if method == "GET" and asked]


def _handler(target: str, requests: Requests) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = self.headers.get("Range", "")
            with requests.lock:
                requests.seen.append((self.command, self.path, asked))
            if requests.fail_with:
                self.send_response(requests.fail_with)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            upstream = http.client.HTTPConnection(target, timeout=30)
            upstream.request(self.command, self.path, headers=dict(self.headers))
            answer = upstream.getresponse()
            body = answer.read()
            of_object = self.command == "GET" and bool(asked)
            if of_object:
                self._hold()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                stripped = of_object and requests.strip_checksums and name.lower().startswith("x-amz-checksum-")
                if name.lower() not in ("connection", "transfer-encoding", "date", "server") and not stripped:
                    self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self._send(body, of_object)
            upstream.close()

        do_HEAD = do_GET

        def _hold(self) -> None:
            with requests.lock:
                requests.hold_after -= 1
                hold = requests.hold_after < 0
            if hold:
                requests.release.wait(60)

        def _send(self, body: bytes, of_object: bool) -> None:
            if of_object and requests.corrupt:
                body = bytes([body[0] ^ 1]) + body[1:]
            with requests.lock:
                cut = of_object and requests.cuts > 0
                requests.cuts -= cut
            body = body[: requests.cut_after] if cut else body
            with contextlib.suppress(ConnectionError):  # a client may be killed in between
                self.wfile.write(body)
            self.close_connection = cut or self.close_connection

        def log_message(self, format: str, *arguments: object) -> None:
            return

    return Handler


@contextlib.contextmanager
def proxy(endpoint: str) -> Iterator[tuple[str, Requests]]:
    """A proxy in front of ``endpoint``; yields its own endpoint and what controls it."""
    requests = Requests()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(endpoint.removeprefix("http://"), requests))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
