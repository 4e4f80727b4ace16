"""Recovery inside a node: one mechanism per file behind one Protocol, composed by ``build``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.config import RunConfig
from trainer.recovery.base import Limits, Recovery, Watch

if TYPE_CHECKING:
    from trainer.events import EventLog

__all__ = ["Limits", "Recovery", "Watch", "build"]


def build(config: RunConfig, watch: Watch, events: EventLog, share: Callable[[int], int]) -> Recovery:
    """The mechanism of ``config.recovery``. ``combined`` is in-process inside in-job.

    ``share(value)`` returns rank 0's value on every rank; it is called once, before training.
    """
    from trainer.recovery.plain import Plain

    mechanism: Recovery = Plain()
    if config.recovery in ("in-process", "combined"):
        from trainer.recovery.in_process import InProcess

        mechanism = InProcess(config, watch, events, share)
    if config.recovery in ("in-job", "combined"):
        from trainer.recovery.in_job import InJob

        mechanism = InJob(mechanism, watch)
    return mechanism
