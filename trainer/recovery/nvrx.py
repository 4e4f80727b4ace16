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
| ``--nnodes MIN:MAX`` | a world of MIN to MAX | a world of MIN, the others are spares | as 0.6 |
| a node that comes back is let in | at once | at the next failure | at the next failure |
| the budget of restarts is spent by | own failures | every round | every round |
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.recovery.base import Limits

STUB = Path(__file__).with_name("stub.py")
WORKER = "trainer.loop:main"
JOIN_TIMEOUT_SECONDS = 600
LAST_CALL_SECONDS = 5
"""How long nodes that could train wait for others that may come."""


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
    """ft_launcher without the pauses that each restart of its workers has, and with 0.4.1's ways between nodes."""
    from nvidia_resiliency_ext.fault_tolerance import launcher

    if version() >= (0, 6):
        from nvidia_resiliency_ext.fault_tolerance import ft_rendezvous_barrier

        let_in_who_waits(ft_rendezvous_barrier._RendezvousBarrierState)
        count_own_restarts(launcher.LocalElasticAgent)
        count_who_came(ft_rendezvous_barrier)
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


def let_in_who_waits(barrier: Any) -> None:
    """Have a node that finds the newest round of ``barrier`` closed open the next one, at which the others join it.

    It waits for a failure otherwise, as a spare. Here there are no spares: it takes a lost node's place, which the others
    may not have noticed yet, or comes after a round that did without it. (Besides, the wait sleeps for a second before it
    looks whether there is a newer round, also after each fault, where the launcher has opened it itself.)
    """
    wait = barrier._wait_for_rendezvous_open

    def wait_for_newest(state: Any, *arguments: Any, **options: Any) -> Any:
        state._sync_from_per_round_state()
        if not state.is_shutdown():
            state.store.compare_set(state.round_done_key, "", "0")  # (where there is none)
        return wait(state, *arguments, **options)

    barrier._wait_for_rendezvous_open = wait_for_newest


def count_own_restarts(agent: Any) -> None:
    """Have ``agent``'s budget of restarts be spent by failures of its own workers, as 0.4.1's is.

    It is spent by every round that somebody opens otherwise, and for a node that comes later by those that it was not in:
    nodes that come back would end a world in which nothing fails.
    """
    decide, run = agent._handle_restart_decision, agent._invoke_run

    def handle_restart_decision(self: Any, *arguments: Any, open_rendezvous: bool = False, **options: Any) -> bool:
        if not open_rendezvous:
            self._remaining_restarts += 1
        return bool(decide(self, *arguments, open_rendezvous=open_rendezvous, **options))

    def invoke_run(self: Any, *arguments: Any, **options: Any) -> Any:
        self._remaining_restarts = self._worker_group.spec.max_restarts
        return run(self, *arguments, **options)

    agent._handle_restart_decision, agent._invoke_run = handle_restart_decision, invoke_run


def count_who_came(module: Any) -> None:
    """Have a round of the barrier in ``module`` end as 0.4.1's does: once the most nodes have come, or the fewest that may
    train and no other within the last call. All who came are in the world; the host says in the store how many."""
    barrier, handler = module._RendezvousBarrierState, module.FtRendezvousBarrierHandler
    perform, close, assign = barrier.perform_rendezvous, barrier._host_close_round, barrier.assign_group_ranks
    perform_handler = handler._perform_rendezvous

    def came(state: Any, joined: int) -> int:
        found = state.get_all_participants(total_participants=joined, expected_round_id=state._round)
        return sum(one is not None and one[2] != getattr(module, "WITHDRAWN", "") for one in found)

    def joined(state: Any) -> int:
        return int(state.store.get(state.join_count_key)) if state.store.check([state.join_count_key]) else 0

    def key(state: Any) -> str:
        return f"{state.prefix}:world_{state._round}"

    def perform_rendezvous(state: Any, node: Any, fewest: int, most: int, **options: Any) -> Any:
        state.fewest = fewest
        return perform(state, node, most, most, **options)

    def close_round(state: Any, node: Any, _: int, most: int, *arguments: Any, **options: Any) -> None:
        last_call = float("inf")
        while (here := came(state, joined(state))) < most and time.monotonic() < last_call:
            if state._get_unhealthy_count() > most - state.fewest:  # (which ends the rendezvous)
                break
            if here >= state.fewest and last_call == float("inf"):
                last_call = time.monotonic() + LAST_CALL_SECONDS
            state._check_timeout_and_closure(node)
            time.sleep(0.1)
        close(state, node, state.fewest, most, *arguments, **options)

    def assign_ranks(state: Any, _: int, most: int, *arguments: Any, **options: Any) -> Any:
        candidates = options.get("active_candidate_participants")  # (0.6 is told how many have joined instead)
        world = min(most, came(state, arguments[0]) if candidates is None else len(candidates))
        state.store.set(key(state), str(world))
        return assign(state, world, most, *arguments, **options)

    def perform_of_handler(self: Any) -> None:
        perform_handler(self)
        self._world_size = int(self._barrier_state.store.get(key(self._barrier_state)))

    barrier.perform_rendezvous, barrier._host_close_round = perform_rendezvous, close_round
    barrier.assign_group_ranks, handler._perform_rendezvous = assign_ranks, perform_of_handler


def launcher_arguments(config: RunConfig, rendezvous: Rendezvous, socket: str) -> list[str]:
    """The launcher's arguments: ft_launcher for ``in-job`` and ``combined``, else torchrun without restarts."""
    in_job = config.recovery in ("in-job", "combined")
    low = config.fewest_nodes
    nodes = str(config.nodes) if low == config.nodes else f"{low}:{config.nodes}"
    configuration = [
        f"is_host={str(rendezvous.is_host).lower()}",
        f"join_timeout={JOIN_TIMEOUT_SECONDS}",
        f"last_call_timeout={1 if config.nodes == 1 else LAST_CALL_SECONDS}",
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
