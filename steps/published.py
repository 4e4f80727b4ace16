"""The published results that ours are compared with: LLaMA-3.1-8B on p5.48xlarge, 2000 steps (data).

Their efficiency leaves the drain of the last asynchronous save out; their training goodput counts replayed steps as
training; the arms of the fault experiments had faults of different kinds, and all of them saved synchronously, every
500 steps, on two nodes. So a measured number is compared with a published one by the published formula, next to ours.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One published arm; what was not published is None."""

    label: str
    efficiency: float | None = None
    training_goodput: float | None = None
    infrastructure_goodput: float | None = None
    recovery_seconds: float | None = None


PUBLISHED = {
    "sync-1000-2-nodes": Published("synchronous, every 1000 steps, 2 nodes", efficiency=0.57),
    "async-1000-2-nodes": Published("asynchronous, every 1000 steps, 2 nodes", efficiency=0.992),
    "sync-1000-8-nodes": Published("synchronous, every 1000 steps, 8 nodes", efficiency=0.603),
    "async-1000-8-nodes": Published("asynchronous, every 1000 steps, 8 nodes", efficiency=0.998),
    "sync-100-8-nodes": Published("synchronous, every 100 steps, 8 nodes", efficiency=0.147),
    "async-100-8-nodes": Published("asynchronous, every 100 steps, 8 nodes", efficiency=0.296),
    "restart": Published("five faults, plain Kubernetes restart", None, 0.115, 0.358, 270.0),
    "in-process": Published("five faults, in-process restart", None, 0.31, 0.87, 10.0),
    "ft-launcher": Published("five faults, ft_launcher", None, 0.255, 0.859, 17.0),
}
