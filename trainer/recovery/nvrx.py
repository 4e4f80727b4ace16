"""What differs between the versions of NVRx, and the command lines of the launchers. Nothing else knows a version.

| | 0.4.1 | 0.6 | 0.7 |
|---|---|---|---|
| ``--ft-restart-policy`` | any-failed, min-healthy | any-failed only | any-failed only |
| rendezvous (each its default) | compare-and-swap | barrier | barrier, the only one |
| NIC monitor on by default | yes | no | no |
| NIC link check before a rendezvous | no such flag | off | on |
| before a restart waits until the GPUs' memory is free | no such flag | polls each 2 s, 50 s long | the same |
| GPU checks of the in-process Wrapper where LOCAL_RANK is set | no | yes | yes |
| sleeps 1 s before it joins a round that is open already | no | yes | yes |
| sleeps 1 s between two signals to workers that have ended | no | yes | yes |
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.recovery.base import Limits

STUB = Path(__file__).with_name("stub.py")
WORKER = "trainer.loop:main"
JOIN_TIMEOUT_SECONDS = 600


def version() -> tuple[int, ...]:
    """The installed NVRx as numbers, ``(0, 4, 1)``."""
    return tuple(int(part) for part in importlib.metadata.version("nvidia-resiliency-ext").split(".")[:3])


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a run meet."""

    host: str
    port: int
    is_host: bool
    id: str


def launcher_target(config: RunConfig) -> str:
    """The launcher of a recovery mode as ``module:function``, for the fork server."""
    if config.recovery in ("in-job", "combined"):
        return "trainer.recovery.nvrx:ft_launcher"
    return "torch.distributed.run:main"


def ft_launcher() -> None:
    """ft_launcher without two pauses of a second that each restart of its workers has, for nothing in most cases."""
    from nvidia_resiliency_ext.fault_tolerance import launcher

    if version() >= (0, 6):
        from nvidia_resiliency_ext.fault_tolerance import ft_rendezvous_barrier

        catch_up_first(ft_rendezvous_barrier._RendezvousBarrierState)
        launcher.terminate_mp_processes = if_any_is_left(launcher.terminate_mp_processes)
    launcher.main()


def if_any_is_left(terminate: Callable[..., None]) -> Callable[..., None]:
    """``terminate``, which signals the workers' process groups, sleeps for a second and signals again, for groups that
    still have a process."""

    def wrapped(*arguments: Any, allowed_pgids: Iterable[int], **options: Any) -> None:
        left = {group for group in allowed_pgids if is_left(group)}
        if left:
            terminate(*arguments, allowed_pgids=left, **options)

    return wrapped


def is_left(group: int) -> bool:
    """Whether the process group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def catch_up_first(barrier: Any) -> None:
    """Have ``barrier`` look for the newest round before it waits for one to open.

    Its wait looks at the round that has ended, then for newer ones, then sleeps for a second, also where it has found
    one that is open: after each fault, since the launcher opens the next round itself.
    """
    wait = barrier._wait_for_rendezvous_open

    def wait_for_newest(state: Any, *arguments: Any, **options: Any) -> Any:
        state._sync_from_per_round_state()
        return wait(state, *arguments, **options)

    barrier._wait_for_rendezvous_open = wait_for_newest


def launcher_arguments(config: RunConfig, rendezvous: Rendezvous, socket: str) -> list[str]:
    """The launcher's arguments: ft_launcher for ``in-job`` and ``combined``, else torchrun without restarts."""
    in_job = config.recovery in ("in-job", "combined")
    low = config.min_nodes or config.nodes
    nodes = str(config.nodes) if low == config.nodes else f"{low}:{config.nodes}"
    configuration = [
        f"is_host={str(rendezvous.is_host).lower()}",
        f"join_timeout={JOIN_TIMEOUT_SECONDS}",
        f"last_call_timeout={1 if config.nodes == 1 else 5}",
    ]
    arguments = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={config.gpus_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous.host}:{rendezvous.port}",
        f"--rdzv-id={rendezvous.id}",
        f"--rdzv-conf={','.join(configuration)}",
        f"--max-restarts={config.max_restarts if in_job else 0}",
        "--monitor-interval=0.1",
    ]
    if in_job:
        arguments += in_job_arguments(Limits.of(config))
    return [*arguments, "--no-python", sys.executable, "-S", "-E", str(STUB), socket, WORKER]


def in_job_arguments(limits: Limits) -> list[str]:
    """ft_launcher's own flags; each is in the installed parser (a test asks it)."""
    arguments = [
        "--ft-workload-check-interval=0.2",
        f"--ft-initial-rank-heartbeat-timeout={limits.startup}",
        f"--ft-rank-heartbeat-timeout={limits.in_job}",
        "--ft-restart-policy=any-failed",
        "--ft-enable-nic-monitor=false",
        "--workers-stop-timeout=5",
        "--ft-log-level=WARNING",
    ]
    if version() >= (0, 6):
        arguments += [
            "--ft-enable-nic-healthcheck=false",
            # A worker waits for its predecessor itself (``await_end``), and a GPU that others use too is never empty.
            "--ft-gpu-memory-reclaim-timeout=0",
        ]
    return arguments
