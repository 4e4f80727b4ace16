"""What the durable tier keeps over in-process restarts: its writer, its staging buffer, and the save in flight."""

from __future__ import annotations

import contextlib
import threading

from trainer.checkpointing.staging import AnonymousBuffer
from trainer.checkpointing.transfer import Copying
from trainer.checkpointing.writer import ForkedQueue, Job


class WriterSlot:
    """What outlives an in-process restart: the queue with its process, and the staging buffer."""

    def __init__(self, deadline: float) -> None:
        self.queue = ForkedQueue(deadline)
        self.staging: AnonymousBuffer | None = None
        self._warming: threading.Thread | None = None
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
        return self.staging is None and self._warming is None

    def warm(self, size: int) -> None:
        """Begin to make the staging buffer in the background: the kernel takes seconds to clear gigabytes, which no save
        should wait for, and neither should a recovery: it is called once training is under way."""
        if self.cold:
            self._warming = threading.Thread(target=self._warm, args=(size,), name="staging", daemon=True)
            self._warming.start()

    def _warm(self, size: int) -> None:
        with contextlib.suppress(OSError):  # no memory: the first save says so
            self._make(size).buffer.populate()

    def _make(self, size: int) -> AnonymousBuffer:
        self.staging = AnonymousBuffer(size)
        return self.staging

    def buffer(self, size: int) -> AnonymousBuffer:
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        if self.staging is None or self.staging.buffer.size != size:
            if self.staging is not None:
                self.staging.close()
            return self._make(size)
        return self.staging
