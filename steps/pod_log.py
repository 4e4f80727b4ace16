"""The log of a training pod, streamed to the supervisor's own output as it is written."""

from __future__ import annotations

import threading
import time
from datetime import datetime

from steps.kubernetes_api import ApiServer

IDLE_SECONDS = 60.0
"""A stream in which nothing came for so long is opened again: a frozen kubelet keeps a dead one open for ever."""
PAUSE_SECONDS = 1.0
DRAIN_SECONDS = 3.0


class PodLog:
    """Follows one pod at a time, in a thread of its own, and goes on where it was after a broken stream.

    ``from_now``: of the first pod only what comes from now on is shown (a supervisor that attaches has shown the rest
    before it ended).
    """

    def __init__(self, api: ApiServer, container: str, *, from_now: bool) -> None:
        self._api = api
        self._container = container
        self._from_now = from_now
        self._pod = ""
        self._over = threading.Event()
        self._last_stream = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, pod: str) -> None:
        """Follow ``pod``; nothing happens if that is what is being done."""
        if pod == self._pod:
            return
        self.close()
        self._over, self._last_stream = threading.Event(), threading.Event()
        after = time.time() if self._from_now and not self._pod else 0.0
        self._pod = pod
        self._thread = threading.Thread(target=self._run, args=(pod, after, self._over, self._last_stream), daemon=True)
        self._thread.start()

    def close(self, *, drain: bool = True) -> None:
        """Stop; with ``drain`` only once the stream has ended, or a few seconds later."""
        if self._thread is not None:
            self._last_stream.set()
            if drain:
                self._thread.join(DRAIN_SECONDS)
            self._over.set()
            self._thread = None

    def _run(self, pod: str, after: float, over: threading.Event, last_stream: threading.Event) -> None:
        last = after
        while not over.is_set():
            ending = last_stream.is_set()
            since = max(1, int(time.time() - last) + 2) if last else None
            seen = last
            for line in self._api.follow(pod, self._container, since, IDLE_SECONDS):
                if over.is_set():
                    return
                stamp, _, text = line.decode(errors="replace").partition(" ")
                written = seconds(stamp)
                if written > seen:
                    last = max(last, written)
                    print(text, flush=True)
            if ending:
                return
            last_stream.wait(PAUSE_SECONDS)


def seconds(stamp: str) -> float:
    """A time stamp of the kubelet as seconds since the epoch, 0 if it is none. (Of its nanoseconds micro ones are kept.)"""
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
