"""A rank's own time in a step, by which a slow rank is told from those that wait for it.

The ranks of a sharded model meet many times in each step, so all of them take as long as the slowest. What differs is
the time between two meetings: here, the forward pass of each block, from the moment that its parameters are gathered
until its output is there. On a GPU it is taken from events on the stream, and costs the host nothing to wait for.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from trainer import environment
from trainer.model import Transformer


class ComputeClock:
    """Sums the forward times of a model's blocks. Make it after the model is sharded: its hooks lie inside FSDP's."""

    def __init__(self, model: Transformer) -> None:
        self._cuda = environment.has_gpu()
        self._began: Any = None
        self._seconds = 0.0
        self._pairs: list[tuple[Any, Any]] = []
        for block in model.blocks:
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end, prepend=True)

    def _begin(self, *_: object) -> None:
        self._began = self._event() if self._cuda else time.monotonic()

    def _end(self, *_: object) -> None:
        if self._cuda:
            self._pairs.append((self._began, self._event()))
        else:
            self._seconds += time.monotonic() - self._began

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def take(self) -> float:
        """Seconds since the last call. On a GPU the work must have been waited for."""
        seconds: float = self._seconds + sum(began.elapsed_time(ended) for began, ended in self._pairs) / 1000
        self._seconds, self._pairs = 0.0, []
        return seconds
