"""A node waits for the name of node 0. What resolves is decided by files that only the waiting process sees: they are
mounted over the machine's in a namespace of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from steps import cluster

HOST = cluster.rendezvous_host("mine", 1)
PRIVATE = 'mount --bind "$1" /etc/hosts && mount --bind "$2" /etc/nsswitch.conf || exit 200; shift 2; exec "$@"'
WAITER = """
import sys
from steps.node import wait_for_name
from trainer.errors import exit_with
print("waiting", flush=True)
exit_with(lambda: wait_for_name(sys.argv[1], float(sys.argv[2])) or 0)
"""


def waiter(folder: Path, deadline_seconds: float) -> subprocess.Popen[str]:
    """A process that waits for ``HOST``, which is what ``folder/hosts`` says; returns once it has begun."""
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    process = subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", PRIVATE, "sh", folder / "hosts", folder / "nsswitch.conf",
         sys.executable, "-c", WAITER, HOST, str(deadline_seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    if not process.stdout.readline():
        _, said = process.communicate(timeout=30)
        assert process.returncode == 200 or "unshare" in said, said
        pytest.skip(f"this machine allows no private mounts: {said.strip()}")
    return process


@pytest.mark.timeout(60)
def test_a_name_that_never_appears_is_given_up_in_bounded_time(tmp_path: Path) -> None:
    process = waiter(tmp_path, 2)
    started = time.monotonic()
    _, said = process.communicate(timeout=30)
    assert 1.5 <= time.monotonic() - started < 15
    assert process.returncode == 69
    assert f"the name {HOST} of node 0 did not appear within 2 s" in said
    assert "headless Service" in said


@pytest.mark.timeout(60)
def test_a_name_that_appears_late_is_found(tmp_path: Path) -> None:
    process = waiter(tmp_path, 30)
    time.sleep(1)
    assert process.poll() is None, "it waits"
    with (tmp_path / "hosts").open("a") as hosts:
        hosts.write(f"127.0.0.1 {HOST}\n")
    appeared = time.monotonic()
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "")
    assert time.monotonic() - appeared < 15, "long before its deadline"


ADOPTER = """
import ctypes, subprocess, time
import psutil
from steps.node import PR_SET_CHILD_SUBREAPER, reap_orphans

ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
own = subprocess.Popen(["sh", "-c", "sleep 1; exit 7"])
assert subprocess.run(["sh", "-c", "sleep 0.1 & sleep 0.1 & exit 0"]).returncode == 0
time.sleep(0.5)
children = [child.pid for child in psutil.Process().children()]
reap_orphans(own.pid)
left = [child.pid for child in psutil.Process().children()]
time.sleep(1)
reap_orphans(own.pid)
print(len(children), left == [own.pid], own.wait())
"""


@pytest.mark.timeout(60)
def test_orphans_leave_nothing_behind_and_the_fork_server_keeps_its_code() -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTER], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "3 True 7\n", done.stderr
