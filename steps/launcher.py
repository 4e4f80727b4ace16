"""The seam between the supervisor (steps.train) and what starts the nodes of a run.

Cut here because everything above is the same on a laptop and on a cluster (attempts, fencing, exit codes), and
everything below differs: processes that we restart ourselves, or pods that a Job controller restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trainer import environment
from trainer.config import RunConfig
from trainer.paths import RunPaths

RENDEZVOUS_PORT = 29500


@dataclass(frozen=True)
class Launch:
    """One attempt of a run."""

    config: RunConfig
    paths: RunPaths
    attempt: int

    @property
    def max_pod_restarts(self) -> int:
        """Restarts of nodes that the attempt may spend in total (a Job's backoffLimit)."""
        return self.config.nodes * self.config.max_restarts


def on_kubernetes(config: RunConfig) -> bool:
    """Whether Kubernetes runs the nodes: as asked for, or (auto) where this process is in a pod itself."""
    return config.launcher == "kubernetes" or (config.launcher == "auto" and environment.in_cluster())


class NodeLost(Exception):
    """A node is gone for good; the supervisor must start the next attempt without waiting for its pods."""


class Launcher(Protocol):
    """Starts the nodes of an attempt, restarts them within the attempt, and says how it ended."""

    stopped_by_user: bool
    """Whether ``wait`` ended because a user stopped the Workflow (``argo stop``): no fault, the run's time stands still."""

    def attach(self) -> int | None:
        """The attempt of a living set of nodes of this run that can be adopted, or none."""

    def start(self, launch: Launch) -> None:
        """Start the nodes of ``launch``; what an earlier attempt left is ended first."""

    def wait(self, launch: Launch, stop: Callable[[], str | None]) -> int:
        """Block until the attempt has ended; returns a code of ``trainer.errors.ExitCode``.

        ``stop()`` gives a reason once the supervisor was asked to stop. Raises ``NodeLost`` when the attempt must be
        replaced by another.
        """

    def release(self) -> None:
        """End whatever this run still has running. Safe to call twice."""
