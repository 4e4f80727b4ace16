"""How the ranks meet: one store, process groups of an iteration, and a control group for what must be agreed.

The collectives of training run on the default group (NCCL on GPUs). After an NCCL abort the collectives of the
survivors return garbage without raising, so nothing is decided there: decisions go through a gloo group of their own,
whose collectives fail loudly, and carry a number that must come out right.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainer.environment import WorkerEnvironment


class Disagreement(RuntimeError):
    """A collective gave an impossible result: the ranks are not in the same place."""


class Meeting:
    """The store that rank 0 hosts for the life of its process, and the process groups made on it."""

    def __init__(self, env: WorkerEnvironment, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        if env.rank:
            await_listener(env.master_address, env.master_port, timeout)
        # The launcher gives every round of ranks a port of its own, so that a store holds nothing of an earlier round.
        # (Counts of restarts would not tell rounds apart: a replaced node begins to count anew.)
        self._store = TCPStore(
            env.master_address,
            env.master_port,
            env.world_size,
            is_master=env.rank == 0,
            timeout=self._timeout,
            wait_for_workers=False,
        )
        self._rank = env.rank
        self._shared = 0
        self._stores = {env.master_port}
        """Ports of stores: connections to them are not gloo's, even if they were made meanwhile."""
        self._connections: dict[int, str] = {}
        self._connecting: FirstCollectives | None = None

    def share_port(self, port: int) -> int:
        """Rank 0's ``port``, where it will host another store, on every rank, before there is a process group."""
        shared = self.share(port)
        self._stores.add(shared)
        return shared

    def share(self, value: int) -> int:
        """Rank 0's ``value`` on every rank, before there is a process group."""
        self._shared += 1
        key = f"shared/{self._shared}"
        if self._rank == 0:
            self._store.set(key, str(value))
        return int(self._store.get(key))

    def join(self, env: WorkerEnvironment, device: torch.device, iteration: int) -> Control:
        """Make the default process group of this iteration and its control group."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # A connection of its own: what an aborted iteration left waiting at the store holds that connection's lock.
        store = TCPStore(env.master_address, env.master_port, is_master=False, timeout=self._timeout, wait_for_workers=False)
        before = open_sockets()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"iteration/{iteration}", store),
            rank=env.rank,
            world_size=env.world_size,
            timeout=self._timeout,
        )
        control = Control(dist.new_group(backend="gloo", timeout=self._timeout), env.rank, env.world_size)
        self._connections = {fd: name for fd, name in open_sockets().items() if before.get(fd) != name}
        return control

    def connect_gpus(self, device: torch.device) -> None:
        """Begin NCCL's connections, which the first collective of each kind makes: 0.4 s in which a model is built and
        loaded. ``connected`` must be called before any other collective on GPUs."""
        if device.type == "cuda":
            self._connecting = FirstCollectives(device)
            self._connecting.start()

    def connected(self) -> None:
        """Return when NCCL's connections are made. Raises what went wrong with them."""
        thread, self._connecting = self._connecting, None
        while thread is not None and thread.is_alive():
            thread.join(0.1)  # (not at once: a restart in the process raises in this thread)
        if thread is not None and thread.error is not None:
            raise thread.error

    def limit_collectives(self, seconds: float) -> None:
        """From now on a collective of the default group may take ``seconds``; those of the control group are not limited."""
        c10d._set_pg_timeout(timedelta(seconds=seconds))

    def sever(self) -> None:
        """Shut down gloo's connections, so that a rank blocked in a collective raises at once, here and at its peers.

        gloo's own abort does not unblock anybody (torch 2.13: the waiting rank goes on waiting). Callable from any
        thread; what it ends is of no use to anyone after a fault.
        """
        now = open_sockets()
        for fd, name in self._connections.items():
            if now.get(fd) == name:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    # (``getpeername`` raises for a listening socket, whose shutdown would end the process)
                    ends = connection.getsockname(), connection.getpeername()
                    if not any(isinstance(end, tuple) and end[1] in self._stores for end in ends):
                        connection.shutdown(socket.SHUT_RDWR)
        self._connections = {}


def await_listener(host: str, port: int, seconds: float) -> None:
    """Return once somebody listens at ``port`` (or time is up, which whoever connects will see). A store's client that comes
    before its server tries again only after half a second or more."""
    deadline, pause = time.monotonic() + seconds, 0.01
    with contextlib.suppress(OSError):
        host = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])  # (once, not at every try)
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)


class FirstCollectives(threading.Thread):
    """One of each kind of collective that training uses, on what is the default group now."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(name="connect", daemon=True)
        self.error: Exception | None = None
        self._device, self._group, self._ranks = device, dist.group.WORLD, dist.get_world_size()

    def run(self) -> None:
        try:
            torch.cuda.set_device(self._device)
            one, all_ranks = torch.ones(1, device=self._device), torch.ones(self._ranks, device=self._device)
            dist.all_gather_into_tensor(all_ranks, one, group=self._group)
            dist.reduce_scatter_tensor(one, all_ranks, group=self._group)
            dist.all_reduce(one, group=self._group)
        except Exception as error:
            self.error = error


def open_sockets() -> dict[int, str]:
    """The sockets of this process: descriptor -> the kernel's name of it, which no other socket gets."""
    sockets: dict[int, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                sockets[int(entry.name)] = name
    return sockets


class Control:
    """Agreement between all ranks over gloo."""

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self._group = group
        self.rank = rank
        self.world_size = world_size

    def sum(self, *values: float) -> list[float]:
        """The sums over all ranks (float64). Raises ``Disagreement`` when a one from each does not give the world size."""
        tensor = torch.tensor([1.0, *values], dtype=torch.float64)
        dist.all_reduce(tensor, group=self._group)
        total, *sums = tensor.tolist()
        if total != self.world_size:
            raise Disagreement(f"{self.world_size} ranks summed to {total}")
        return sums

    def all(self, holds: bool) -> bool:
        """Whether it holds on every rank."""
        return self.sum(0.0 if holds else 1.0)[0] == 0.0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of ranks, on every rank."""
        body = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([body.numel()]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: body.numel()] = body
        bodies = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(bodies, padded, group=self._group)
        return [pickle.loads(b[: int(s)].numpy().tobytes()) for b, s in zip(bodies, sizes, strict=True)]

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        return self.gather(value if self.rank == 0 else None)[0]
