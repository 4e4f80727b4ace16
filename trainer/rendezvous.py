"""How the ranks meet: one store, process groups of an iteration, and a control group for what must be agreed.

The collectives of training run on the default group (NCCL on GPUs). After an NCCL abort the collectives of the
survivors return garbage without raising, so nothing is decided there: decisions go through a gloo group of their own,
whose collectives fail loudly, and carry a number that must come out right.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainer.environment import WorkerEnvironment


class Disagreement(RuntimeError):
    """A collective gave an impossible result: the ranks are not in the same place."""


class Meeting:
    """The store that rank 0 hosts for the life of its process, and the process groups made on it."""

    def __init__(self, env: WorkerEnvironment, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        store = TCPStore(
            env.master_address,
            env.master_port,
            env.world_size,
            is_master=env.rank == 0 and not env.store_is_hosted,
            timeout=self._timeout,
            wait_for_workers=False,
        )
        self._store = PrefixStore(f"attempt-{env.attempt}/cycle-{env.cycle}", store)
        self._rank = env.rank
        self._shared = 0

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
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"iteration/{iteration}", self._store),
            rank=env.rank,
            world_size=env.world_size,
            timeout=self._timeout,
        )
        return Control(dist.new_group(backend="gloo", timeout=self._timeout), env.rank, env.world_size)


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
