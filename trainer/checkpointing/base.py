"""What the training loop needs of checkpointing, and the state that a checkpoint holds.

A tier is cut at four calls: find the newest step it can give back, load that step, take note of a completed step, and
finish. The loop knows nothing of files, writers or tiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.optim import moments


@dataclass(frozen=True)
class TrainingState:
    """The live model and optimizer of this iteration; ``tensors`` names everything a checkpoint holds."""

    model: nn.Module
    optimizer: Optimizer

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and moments by name: ``model.<parameter>``, ``optimizer.<parameter>.<exp_avg|exp_avg_sq|step>``.

        Sharded ones are DTensors; a parameter that is tied to another appears once.
        """
        named: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            named[f"model.{name}"] = parameter.detach()
            for key, value in sorted(moments(self.optimizer, parameter).items()):
                named[f"optimizer.{name}.{key}"] = value
        return named


@dataclass(frozen=True)
class Completed:
    """A step that all ranks have completed, and what they agreed on."""

    step: int
    busy: bool
    """A save is in flight on some rank."""
    last: bool
    stopping: bool


class Tier(Protocol):
    """One place that training can resume from."""

    refused: list[str]
    """What was found and cannot be used, and why; the same on every rank."""

    def candidates(self) -> Iterator[int]:
        """Steps that can be resumed from, newest first, the same on every rank. Collective."""

    def load(self, step: int) -> bool:
        """Bring the state of ``step`` into the live tensors; whether it worked on every rank. Collective."""

    def after_step(self, completed: Completed) -> None:
        """Save if it is time to. Every rank calls it with the same value."""

    def busy(self, step: int) -> bool:
        """Whether a save of this rank is in flight; looks after the writer. Called before ``step`` is agreed on."""

    def finish(self) -> None:
        """Wait until what is in flight is durable, or given up. Collective."""

    def close(self) -> None:
        """Let go of buffers and processes; not collective, never blocks."""
