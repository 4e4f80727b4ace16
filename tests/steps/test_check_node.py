"""The per-node check, run on this machine for what it can be, and on NCCL's own words for what it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steps import check_node
from steps.cluster import GIB
from steps.profiles import PROFILES

EFA_LOG = """
ip-10-0-0-1:12:34 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)
ip-10-0-0-1:12:34 [0] NCCL INFO Using network AWS Libfabric
"""
OLDER_EFA_LOG = "h:1:2 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)\nh:1:2 [0] NCCL INFO Using network Libfabric\n"
SOCKET_LOG = """
h:1:2 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
h:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
h:1:2 [0] NCCL INFO Using network Socket
"""
TCP_LOG = "h:1:2 [0] NCCL INFO NET/OFI Selected provider is tcp;ofi_rxm\nh:1:2 [0] NCCL INFO Using network Libfabric\n"


@pytest.mark.parametrize("log", [EFA_LOG, OLDER_EFA_LOG])
def test_efa_is_recognised(log: str) -> None:
    assert check_node.check_network(PROFILES["p5"], log).status == "pass"


@pytest.mark.parametrize(("log", "named"), [(SOCKET_LOG, "Socket"), (TCP_LOG, "tcp"), ("", "nothing")])
def test_a_silent_fall_back_is_a_failure_that_says_what_is_used_and_what_to_do(log: str, named: str) -> None:
    check = check_node.check_network(PROFILES["p5"], log)
    assert check.status == "fail"
    assert named in check.detail
    assert "vpc.amazonaws.com/efa" in check.fix


def test_the_floor_is_a_floor() -> None:
    assert check_node.check_bandwidth({"bus_gb_per_second": 299.0, "ranks": 8}, 300).status == "fail"
    assert check_node.check_bandwidth({"bus_gb_per_second": 301.0, "ranks": 8}, 300).status == "pass"


def test_a_mount_is_written_and_left_clean(tmp_path: Path) -> None:
    check = check_node.check_mount(tmp_path)
    assert check.status in ("pass", "warn")
    assert "MB/s" in check.detail
    assert list(tmp_path.iterdir()) == []


def test_a_mount_that_is_not_there_fails(tmp_path: Path) -> None:
    assert check_node.check_mount(tmp_path / "absent").status == "fail"


def test_a_full_file_system_fails_and_is_left_clean() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    assert check_node.check_mount(full).status == "fail"


def test_shared_memory_that_is_too_small_says_both_sizes() -> None:
    total = check_node.shutil.disk_usage("/dev/shm").total
    assert check_node.check_shared_memory(total // 2).status == "pass"
    check = check_node.check_shared_memory(total + 10 * GIB)
    assert (check.status, check.exit_code) == ("fail", 64)
    assert f"{total / GIB:.1f} GiB" in check.detail


def test_the_command_on_a_machine_without_gpus(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "steps.check_node", "--root", str(tmp_path), "--profile", "cpu", "--shm-gib", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 5
    assert done.stdout.count("skip") == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_mount_that_belongs_to_root_ends_with_77(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    code = (
        "import os, sys; from pathlib import Path; from steps import check_node; os.setuid(1000); "
        f"c = check_node.check_mount(Path({str(tmp_path)!r})); print(c); sys.exit(c.exit_code)"
    )
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 77, done.stdout + done.stderr


def test_the_all_reduce_runs_and_measures() -> None:
    """Two ranks over gloo where there is no GPU: the same program, another transport."""
    measured, _ = check_node.all_reduce(2, mebibytes=4)
    assert measured["ranks"] == 2
    assert measured["bytes"] == 4 * 1024**2
    assert measured["bus_gb_per_second"] > 0
