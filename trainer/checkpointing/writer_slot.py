"""What the durable tier keeps over in-process restarts: its writer, its staging buffer, and the save in flight."""

from __future__ import annotations

from trainer.checkpointing.staging import AnonymousBuffer, Warming
from trainer.checkpointing.transfer import Copying
from trainer.checkpointing.writer import ForkedQueue, Job


class WriterSlot:
    """What outlives an in-process restart: the queue with its process, and the staging buffer."""

    def __init__(self, deadline: float) -> None:
        self.queue = ForkedQueue(deadline)
        self.staging: AnonymousBuffer | None = None
        self._warming = Warming()
        self.in_flight: Job | None = None
        self.copying: Copying | None = None
        """The copy of a save that the writer has not been told of."""
        self.starting = False
        """Between the description of a save and its start: where a restart's exception leaves neither done nor undone."""
        self.scheduled = ""
        """Name of the newest save's directory, once it has started."""
        self.step = -1
        self.started = 0.0

    @property
    def cold(self) -> bool:
        """Whether nobody has begun to make the staging buffer."""
        return self.staging is None and not self._warming.begun

    def warm(self, size: int) -> None:
        """Begin to make the staging buffer in the background."""
        self._warming.begin(lambda: self._make(size).buffer.populate())

    def _make(self, size: int) -> AnonymousBuffer:
        self.staging = AnonymousBuffer(size)
        return self.staging

    def buffer(self, size: int) -> AnonymousBuffer:
        """The staging buffer. Raises ``OSError`` when there is no memory for it."""
        self._warming.wait()
        if self.staging is None or self.staging.buffer.size != size:
            if self.staging is not None:
                self.staging.close()
            return self._make(size)
        return self.staging
