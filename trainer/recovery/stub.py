"""What a launcher starts in place of a worker: asks the node's fork server for the worker and stands in for it.

    python -S -E stub.py SOCKET TARGET [ARGUMENT...]

It imports nothing of ours, so that it is up in hundredths of a second: an import of torch is most of a restart.

1. Connect to the fork server and send TARGET, the arguments, the environment, the working directory and the three
   standard file descriptors.
2. Pass on SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 to the worker (through the server, which records it).
3. End as the worker ended: with its code, or by its signal. When this process is killed, its socket closes and the
   server kills the worker.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
import time


def request(
    connection: socket.socket,
    kind: str,
    target: str,
    argv: list[str],
    environment: dict[str, str],
    directory: str,
    descriptors: list[int],
) -> None:
    """Send one request: a length, then JSON; the file descriptors travel with the first byte."""
    body = json.dumps(
        {"kind": kind, "target": target, "argv": argv, "environment": environment, "directory": directory}
    ).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([len(body).to_bytes(4, "big")], rights)
    connection.sendall(body)


def main() -> int:
    path, target, argv = sys.argv[1], sys.argv[2], sys.argv[3:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + 120
    while True:
        try:
            connection.connect(path)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                print(f"no fork server at {path}: {error}", file=sys.stderr)
                return 70
            time.sleep(0.05)
    environment = dict(os.environ, HOLDFAST_SPAWNED_AT=repr(time.time()))
    request(connection, "worker", target, argv, environment, os.getcwd(), [0, 1, 2])  # noqa: PTH109 - pathlib is slow to import

    def forward(number: int, frame: object) -> None:
        connection.sendall(number.to_bytes(1, "big"))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    answer = b""
    while not answer.endswith(b"\n"):
        part = connection.recv(64)
        if not part:
            print("the fork server of this node ended", file=sys.stderr)
            return 75
        answer += part
    code = int(answer)
    if code < 0:
        number = signal.Signals(-code)
        if number is not signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(5)
    return code


if __name__ == "__main__":
    sys.exit(main())
