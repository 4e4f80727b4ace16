"""Mutexes within one workflow: first come, first served."""

from __future__ import annotations

from collections import deque


class Locks:
    """Who holds and who waits for each mutex; holders are node ids."""

    def __init__(self) -> None:
        self._holder: dict[str, str] = {}
        self._waiting: dict[str, deque[str]] = {}

    @property
    def used(self) -> bool:
        """Whether there are any mutexes."""
        return bool(self._waiting)

    def acquire(self, names: list[str], key: str) -> str:
        """Take all of ``names`` for ``key`` and return '', or take none, queue up and return the first that is not free."""
        for name in names:
            queue = self._waiting.setdefault(name, deque())
            if self._holder.get(name) != key and key not in queue:
                queue.append(key)
        for name in names:
            holder, queue = self._holder.get(name), self._waiting[name]
            if holder != key and (holder is not None or queue[0] != key):
                return name
        for name in names:
            if self._holder.get(name) != key:
                self._waiting[name].popleft()
                self._holder[name] = key
        return ""

    def release(self, key: str) -> bool:
        """Give back everything ``key`` holds or waits for; whether anything became free."""
        free = [name for name, holder in self._holder.items() if holder == key]
        for name in free:
            del self._holder[name]
        for queue in self._waiting.values():
            if key in queue:
                queue.remove(key)
        return bool(free)
