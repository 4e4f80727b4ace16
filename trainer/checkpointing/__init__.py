"""Checkpointing in tiers behind one Protocol: durable (shared file system) and node-local (memory)."""

from __future__ import annotations

from trainer.checkpointing.base import Completed, Tier, TrainingState
from trainer.checkpointing.durable import DurableTier
from trainer.checkpointing.replicas import Replicator
from trainer.checkpointing.snapshots import Peers, SnapshotSlot, SnapshotTier
from trainer.checkpointing.writer_slot import WriterSlot
from trainer.errors import DataError

__all__ = [
    "Completed", "DurableTier", "Peers", "Replicator", "SnapshotSlot", "SnapshotTier", "Tier", "Tiers", "TrainingState",
    "WriterSlot",
]  # fmt: skip


class Tiers:
    """Several tiers as one: saves in all, resumes from the one with the newest step (the faster one at a tie)."""

    def __init__(self, tiers: dict[str, Tier]) -> None:
        self._tiers = tiers

    def resume(self) -> tuple[int, str]:
        """Load the newest step that loads; returns it and its tier, or ``(0, 'none')``. Collective.

        Raises ``DataError`` when there are checkpoints of this run and none can be used.
        """
        streams = {name: tier.candidates() for name, tier in self._tiers.items()}
        heads: dict[str, int] = {}
        while True:
            for name in list(streams):
                if name not in heads:
                    head = next(streams[name], None)
                    if head is None:
                        del streams[name]
                    else:
                        heads[name] = head
            if not heads:
                refused = [reason for tier in self._tiers.values() for reason in tier.refused]
                if refused:
                    raise DataError(
                        "no checkpoint of this run can be used, and training must not begin again from scratch: "
                        f"{'; '.join(refused)}. They are in the run's quarantine; start another run id to begin anew"
                    )
                return 0, "none"
            name = max(heads, key=lambda name: (heads[name], name == "snapshot"))
            step = heads.pop(name)
            if self._tiers[name].load(step):
                return step, name

    def after_step(self, completed: Completed) -> None:
        for tier in self._tiers.values():
            tier.after_step(completed)

    def busy(self, step: int) -> bool:
        states = [tier.busy(step) for tier in self._tiers.values()]  # every tier looks after its writer
        return any(states)

    def finish(self) -> None:
        for tier in self._tiers.values():
            tier.finish()
