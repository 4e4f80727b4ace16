"""What the launchers tell a process through its environment, read afresh at each entry into a frozen value."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

RUN_DIRECTORY = "HOLDFAST_RUN"
ATTEMPT = "HOLDFAST_ATTEMPT"
NODE = "HOLDFAST_NODE"
POD = "HOLDFAST_POD"
NODE_PID = "HOLDFAST_NODE_PID"
SPAWNED_AT = "HOLDFAST_SPAWNED_AT"
FORK_SERVER = "HOLDFAST_FORK_SERVER"
PREDECESSOR = "HOLDFAST_PREDECESSOR"
PROGRESS_FILE = "ARGO_PROGRESS_FILE"
STATUS_FILE = "HOLDFAST_STATUS_FILE"
_gpu_seen = False


@dataclass(frozen=True)
class WorkerEnvironment:
    """Who this worker is. NVRx rewrites RANK and WORLD_SIZE at an in-process restart: read again after one."""

    run_directory: Path
    attempt: int
    node: int
    pod: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    cycle: int
    master_address: str
    master_port: int
    spawned_at: float
    """Wall clock at which the launcher asked for this process, 0 if unknown."""


def read(local_rank: int | None = None) -> WorkerEnvironment:
    """The worker's environment. A missing variable is a defect of whoever started this process (``KeyError``).

    ``local_rank`` is for a process that has hidden its own (see ``rewrite_for_cpu_wrapper``).
    """
    env = os.environ
    return WorkerEnvironment(
        run_directory=Path(env[RUN_DIRECTORY]),
        attempt=int(env[ATTEMPT]),
        node=int(env[NODE]),
        pod=int(env[POD]),
        rank=int(env["RANK"]),
        local_rank=int(env["LOCAL_RANK"]) if local_rank is None else local_rank,
        world_size=int(env["WORLD_SIZE"]),
        local_world_size=int(env["LOCAL_WORLD_SIZE"]),
        cycle=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        master_address=env["MASTER_ADDR"],
        master_port=int(env["MASTER_PORT"]),
        spawned_at=float(env.get(SPAWNED_AT, "0")),
    )


@dataclass(frozen=True)
class NodeEnvironment:
    """Which node this process belongs to; for processes of a node that are no workers."""

    run_directory: Path
    attempt: int
    node: int


def read_node() -> NodeEnvironment:
    env = os.environ
    return NodeEnvironment(Path(env[RUN_DIRECTORY]), int(env[ATTEMPT]), int(env[NODE]))


def address() -> str:
    """An address of this host that its peers can reach: the one its name has, or the loopback where it has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def local_rank() -> int:
    """Which of the node's processes this is, and so which GPU is its own; 0 outside a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def node_pid() -> int:
    """The process id of this node's first process (steps.node), which the node's processes all descend from."""
    return int(os.environ[NODE_PID])


def progress_file() -> Path | None:
    """Where Argo (or the local engine) reads a step's progress as ``n/m``; None where nobody asked for it."""
    return _path(PROGRESS_FILE)


def status_file() -> Path | None:
    """Where the local engine reads what a step is doing, for its live display; None where nobody asked for it."""
    return _path(STATUS_FILE)


def _path(variable: str) -> Path | None:
    value = os.environ.get(variable, "")
    return Path(value) if value else None


def variable(name: str) -> str:
    """A variable that a user or a manifest names (a token, a webhook, PATH); empty where it is not set."""
    return os.environ.get(name, "")


def fork_server() -> str:
    """The socket of this node's fork server."""
    return os.environ[FORK_SERVER]


def predecessor() -> int:
    """The process that had this worker's GPU before, and may not have given it back yet; 0 if there was none."""
    return int(os.environ.get(PREDECESSOR, "0"))


def rewrite_for_cpu_wrapper() -> None:
    """Hide LOCAL_RANK: NVRx >= 0.6 takes it for 'there are GPUs' and runs health checks that fail on a CPU."""
    os.environ.pop("LOCAL_RANK", None)


def has_gpu() -> bool:
    """Whether this machine has a GPU that torch can use. A yes is remembered, and inherited by forks: the driver may need a
    third of a second to say it, while it takes back what a killed process had."""
    global _gpu_seen
    if not _gpu_seen:
        import torch

        _gpu_seen = torch.cuda.is_available()
    return _gpu_seen


def mapping() -> dict[str, str]:
    """A copy of the whole environment, to hand to a child."""
    return dict(os.environ)


def in_cluster() -> bool:
    """Whether this process runs in a pod that may talk to its API server."""
    return "KUBERNETES_SERVICE_HOST" in os.environ
