"""Checks of the node this runs on, before it trains: a bad one costs all the others their time.

    python -m steps.check_node --root DIR --profile p5

``steps.node`` has it run first in every pod of a cluster.

1. the shared file system takes a write and its fsync, and gives the bytes back;
2. /dev/shm is as large as the profile says;
3. the GPUs are there, all of them;
4. NCCL reaches the other nodes over EFA: a p5 that falls back to TCP does so silently, so NCCL's own log is read;
5. an all-reduce within the node is not slower than a healthy one.

A part that the machine cannot have is skipped with the reason. Ends with 0, or with the contract's code of the first
check that failed, after a table of all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from steps.cluster import GIB
from steps.profiles import PROFILES, Profile
from trainer.config import OneLineParser
from trainer.environment import mapping
from trainer.errors import FULL, ExitCode, exit_with

SHARED_MEMORY = Path("/dev/shm")
WRITE_BYTES = 64 * 1024**2
SLOW_WRITE_BYTES_PER_SECOND = 10e6
ALL_REDUCE_SECONDS = 180
PROVIDER = re.compile(r"NET/OFI Selected provider is ([\w;-]+)", re.IGNORECASE)
NETWORK = re.compile(r"Using network ([^\r\n]+)")


@dataclass(frozen=True)
class Check:
    """The outcome of one check. ``fix`` says what to do about one that failed."""

    name: str
    status: Literal["pass", "warn", "fail", "skip"]
    detail: str
    fix: str = ""
    exit_code: int = int(ExitCode.UNAVAILABLE)


def check_mount(root: Path) -> Check:
    """Write, fsync, read back and remove a file below ``root``."""
    path = root / f".check-{socket.gethostname()}-{secrets.token_hex(4)}"
    block = secrets.token_bytes(1024**2)
    started = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(WRITE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - started
        with path.open("rb") as file:
            same = all(part == block for part in iter(lambda: file.read(len(block)), b""))
            same = same and file.tell() == WRITE_BYTES
    except PermissionError as error:
        fix = f"chown {root} to the user that the pods run as (the Job in templates/cluster/storage-fsx.yaml)"
        return Check("shared file system", "fail", f"{root}: {error.strerror}", fix, int(ExitCode.DENIED))
    except OSError as error:
        if error.errno in FULL:  # training can go on, as it would had it begun before
            fix = "make room: no checkpoint is written until there is some"
            return Check("shared file system", "warn", f"{root}: {error.strerror}", fix)
        return Check("shared file system", "fail", f"{root}: {error.strerror}", "is the claim mounted?")
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    if not same:
        return Check("shared file system", "fail", f"{root} gave back other bytes", "take the mount out of service")
    speed = WRITE_BYTES / seconds
    text = f"{WRITE_BYTES / 1e6:.0f} MB written and synced in {seconds:.2f} s ({speed / 1e6:.0f} MB/s)"
    if speed < SLOW_WRITE_BYTES_PER_SECOND:
        return Check("shared file system", "warn", text, "checkpoints will be slow: raise the file system's throughput")
    return Check("shared file system", "pass", text)


def check_shared_memory(needed: int, path: Path = SHARED_MEMORY) -> Check:
    """``needed`` bytes in total at ``path``."""
    total = shutil.disk_usage(path).total
    text = f"{path} has {total / GIB:.1f} GiB, {needed / GIB:.1f} GiB expected"
    if total < needed * 0.99:
        fix = "mount a memory-backed emptyDir of that size there, and count it in the memory limit"
        return Check("shared memory", "fail", text, fix, int(ExitCode.CONFIGURATION))
    return Check("shared memory", "pass", text)


def check_gpus(profile: Profile) -> Check:
    if not profile.gpus:
        return Check("GPUs", "skip", f"profile {profile.name} has none")
    import torch

    count = torch.cuda.device_count()
    if count != profile.gpus:
        fix = "look at nvidia-smi and the device plugin's log on this node, then replace the node"
        return Check("GPUs", "fail", f"{count} of {profile.gpus} are usable", fix)
    return Check("GPUs", "pass", f"{count} x {torch.cuda.get_device_name(0)}")


def check_network(profile: Profile, log: str) -> Check:
    """Over what NCCL would reach other nodes, by its own log (NCCL_DEBUG=INFO)."""
    if not profile.efa:
        return Check("NCCL network", "skip", f"profile {profile.name} has no EFA")
    provider, network = PROVIDER.search(log), NETWORK.search(log)
    used = network[1].strip() if network else "nothing that its log names"
    if provider is not None and provider[1].lower() == "efa" and used != "Socket":
        return Check("NCCL network", "pass", f"{used}, provider {provider[1]}")
    found = f"NCCL uses {used}" + (
        f", provider {provider[1]}" if provider else ", and the OFI plugin selected no provider"
    )
    fix = "check that the pod asks for vpc.amazonaws.com/efa, that the image has aws-ofi-nccl on LD_LIBRARY_PATH, FI_PROVIDER=efa"
    return Check("NCCL network", "fail", found, fix)


def check_bandwidth(measured: dict[str, float], floor: float) -> Check:
    """``floor`` in GB/s of bus bandwidth."""
    bandwidth = measured["bus_gb_per_second"]
    text = f"{bandwidth:.1f} GB/s over {measured['ranks']} ranks, floor {floor:g} GB/s"
    if bandwidth < floor:
        fix = "look for NVLink errors (nvidia-smi nvlink -e) and throttling, then replace the node"
        return Check("all-reduce", "fail", text, fix)
    return Check("all-reduce", "pass", text)


def all_reduce(ranks: int, mebibytes: int = 512) -> tuple[dict[str, float], str]:
    """Run ``steps.all_reduce`` on this node; returns what it measured, and NCCL's log."""
    with tempfile.TemporaryDirectory() as folder:
        # A file per process: NCCL's lines would otherwise be torn by the ranks' own output.
        debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": f"{folder}/nccl-%h-%p.log"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = subprocess.run(
            [*command, "-m", "steps.all_reduce", f"--mebibytes={mebibytes}"],
            env=mapping() | debug, capture_output=True, text=True, timeout=ALL_REDUCE_SECONDS, check=False,
        )  # fmt: skip
        log = "\n".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("nccl-*")))
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if done.returncode or line is None:
        raise ChildProcessError((done.stderr.strip() or "it printed nothing").splitlines()[-1])
    measured: dict[str, float] = json.loads(line)
    return measured, log


def checks(root: Path, profile: Profile, shm_gib: int, floor: float) -> list[Check]:
    """All checks, in the order in which they are shown."""
    done = [check_mount(root), check_shared_memory(shm_gib * GIB), check_gpus(profile)]
    if done[-1].status != "pass":
        why = "needs the GPUs" if profile.gpus else f"profile {profile.name} has no GPUs"
        return [*done, Check("NCCL network", "skip", why), Check("all-reduce", "skip", why)]
    try:
        measured, log = all_reduce(profile.gpus)
    except (ChildProcessError, subprocess.TimeoutExpired) as error:
        return [
            *done,
            Check("all-reduce", "fail", f"it did not finish: {error}", "read NCCL's log with NCCL_DEBUG=INFO"),
        ]
    return [*done, check_network(profile, log), check_bandwidth(measured, floor)]


def show(found: list[Check]) -> None:
    host = socket.gethostname()
    for check in found:
        print(f"{host}  {check.status:<4}  {check.name:<18}  {check.detail}{f'; {check.fix}' if check.fix else ''}")


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="steps.check_node", description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="where the shared file system is mounted")
    parser.add_argument("--profile", choices=PROFILES, default="cpu", help="what this node should be")
    parser.add_argument("--shm-gib", type=int, default=0, help="size that /dev/shm should have [the profile's]")
    parser.add_argument("--bandwidth-floor", type=float, default=0.0, help="GB/s of bus bandwidth [the profile's]")
    args = parser.parse_args(argv)
    profile = PROFILES[args.profile]
    floor = args.bandwidth_floor or profile.bus_bandwidth_gb
    found = checks(args.root, profile, args.shm_gib or profile.shm_gib, floor)
    show(found)
    return next((check.exit_code for check in found if check.status == "fail"), int(ExitCode.DONE))


if __name__ == "__main__":
    exit_with(main)
