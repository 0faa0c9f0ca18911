"""MemoryBackend: a correct backend in this process's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from kcache.backend import Backend, EntryInfo, Usage
from kcache.util.forks import after_fork

__all__ = ["MemoryBackend"]


class MemoryBackend(Backend):
    """Values in a dict, least recently used first; gone with the object.

    Threads: safe to share. Processes: each has its own; a forked child goes on with a copy.

    Args:
        clock: nanoseconds since the epoch, for recency.

    Attributes:
        values: what is held, least recently used first. For looking at; change it through `put`
            and `delete`.
        closed: how often `close` was called. A closed backend goes on working.
    """

    def __init__(self, *, clock: Callable[[], int] = time.time_ns) -> None:
        self.values: dict[str, bytes] = {}
        self.closed = 0
        self._used: dict[str, int] = {}
        self._size = 0
        self._last_use = 0
        self._clock = clock
        self._lock = threading.Lock()
        after_fork(self)

    def get(self, key: str) -> bytes | None:
        """Return the value under `key`, or None."""
        return self.values.get(key)

    def put(self, key: str, value: bytes) -> int:
        """Hold `value` under `key`; return its length."""
        with self._lock:
            self._size += len(value) - len(self.values.pop(key, b""))
            self.values[key] = value
            self._used[key] = self._now()
        return len(value)

    def delete(self, key: str) -> int:
        """Let go of `key`; return the length of its value, 0 if it was absent."""
        with self._lock:
            freed = len(self.values.pop(key, b""))
            self._used.pop(key, None)
            self._size -= freed
        return freed

    def touch(self, key: str) -> None:
        """Record a use of `key`."""
        with self._lock:
            if key in self.values:
                self.values[key] = self.values.pop(key)
                self._used[key] = self._now()

    def usage(self) -> Usage:
        """Return the sum of the lengths and the number of values."""
        with self._lock:
            return Usage(self._size, len(self.values))

    def coldest(self) -> Iterator[EntryInfo]:
        """Yield entries, least recently used first; only their keys are copied at the start."""
        return self.scan()

    def scan(self) -> Iterator[EntryInfo]:
        """Yield entries, least recently used first."""
        with self._lock:
            names = list(self.values)
        for name in names:
            with self._lock:
                value = self.values.get(name)
                used = self._used.get(name, 0)
            if value is not None:
                yield EntryInfo(name, len(value), used)

    def close(self) -> None:
        """Count the call."""
        self.closed += 1

    def _now(self) -> int:
        """Return the time, later than any that this object has returned before."""
        self._last_use = now = max(self._clock(), self._last_use + 1)
        return now

    def after_fork(self) -> None:
        """Take a new lock in a child process: another thread may have held the old one."""
        self._lock = threading.Lock()
