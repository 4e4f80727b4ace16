"""Recovery inside a node: one mechanism per file behind one Protocol, composed by ``build``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config import RunConfig
from trainer.recovery.base import Limits, Recovery, Watch

if TYPE_CHECKING:
    from trainer.events import EventLog
    from trainer.recovery.in_process import Leave
    from trainer.rendezvous import Meeting

__all__ = ["Limits", "Recovery", "Watch", "build"]


def build(config: RunConfig, watch: Watch, events: EventLog, meeting: Meeting, leave: Leave) -> Recovery:
    """The mechanism of ``config.recovery``. ``combined`` is in-process inside in-job."""
    from trainer.recovery.plain import Plain

    mechanism: Recovery = Plain()
    if config.recovery in ("in-process", "combined"):
        from trainer.recovery.in_process import InProcess

        mechanism = InProcess(config, watch, events, meeting, leave)
    if config.recovery in ("in-job", "combined"):
        from trainer.recovery.in_job import InJob

        mechanism = InJob(mechanism, watch)
    return mechanism
