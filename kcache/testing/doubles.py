"""Test doubles: a clock that stands still, a backend in memory, a backend that fails on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from kcache.backend import Backend, EntryInfo, Usage, WrappingBackend, increasing
from kcache.util.forks import after_fork

#: 2026-01-01. If a backend mixes this clock with the system's clock, a test soon fails.
START = 1_767_225_600_000_000_000


class FakeClock:
    """A clock for backends and engines, whose time changes only when `advance` is called.

    Threads: several threads may read the time; only one may advance it.

    Args:
        now_ns: the time at which it starts, in nanoseconds since the epoch.
    """

    def __init__(self, now_ns: int = START) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """Return nanoseconds since the epoch, as `time.time_ns` does."""
        return self.now_ns

    def seconds(self) -> float:
        """Return seconds, as `time.time` and `time.monotonic` do."""
        return self.now_ns / 1e9

    def advance(self, seconds: float = 1.0) -> None:
        """Advance the clock by `seconds`."""
        self.now_ns += round(seconds * 1e9)


class MemoryBackend(Backend):
    """Stores values in a dict, least recently used first. The values are lost with the object.

    Threads: several threads may use one object. Processes: each process has its own values. A
    forked child starts with a copy of its parent's values.

    Args:
        clock: returns the time of a use, in nanoseconds since the epoch.

    Attributes:
        values: the values, least recently used first. Only read this; to change it, use `put` and
            `delete`.
        closed: how often `close` was called. A closed backend still works.
    """

    def __init__(self, *, clock: Callable[[], int] = time.time_ns) -> None:
        self.values: dict[str, bytes] = {}
        self.closed = 0
        self._used: dict[str, int] = {}
        self._size = 0
        self._now = increasing(clock)
        self._lock = threading.Lock()
        after_fork(self)

    def get(self, key: str) -> bytes | None:
        """Return the value under `key`, or None."""
        return self.values.get(key)

    def put(self, key: str, value: bytes) -> int:
        """Store `value` under `key`; return its length."""
        with self._lock:
            self._size += len(value) - len(self.values.pop(key, b""))
            self.values[key] = value
            self._used[key] = self._now()
        return len(value)

    def delete(self, key: str) -> int:
        """Delete `key`; return the length of its value, or 0 if `key` was absent."""
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
        """Return the sum of the lengths of all values, and their number."""
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
        """Count the call in `closed`."""
        self.closed += 1

    def after_fork(self) -> None:
        """Take a new lock in a child process: another thread may have held the old one."""
        self._lock = threading.Lock()


class FaultyBackend(WrappingBackend):
    """Passes each call to another backend, records the call, and fails on demand.

    The guarantees for threads and processes are those of the inner backend. Each object records its
    own calls. Calls in a forked child are not recorded in the parent.

    Args:
        inner: the other backend. The default is a new `MemoryBackend`.

    Attributes:
        faults: maps the name of a method either to an exception, which every call of the method
            raises, or to a function, which is run before every call.
        calls: names of the methods that were called, in order.
        damage: a function that changes a value before `get` or `use` returns it, such as the
            result of `flipped` or `truncated`. If it is None, values are not changed.
    """

    def __init__(self, inner: Backend | None = None) -> None:
        super().__init__(MemoryBackend() if inner is None else inner)
        self.faults: dict[str, BaseException | Callable[[], object]] = {}
        self.calls: list[str] = []
        self.damage: Callable[[bytes], bytes] | None = None

    def get(self, key: str) -> bytes | None:
        return self._damaged(super().get(key))

    def use(self, key: str) -> bytes | None:
        return self._damaged(super().use(key))

    def inner_for(self, method: str) -> Backend:
        """Record a call of `method`; return the inner backend, or raise the fault of the method."""
        self.calls.append(method)
        fault = self.faults.get(method)
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None:
            fault()
        return self.inner

    def _damaged(self, value: bytes | None) -> bytes | None:
        return value if value is None or self.damage is None else self.damage(value)


def flipped(offset: int = 0, bits: int = 1) -> Callable[[bytes], bytes]:
    """Return a function for `FaultyBackend.damage` that XORs the byte at `offset` with `bits`."""

    def flip(value: bytes) -> bytes:
        image = bytearray(value)
        if image:
            image[offset % len(image)] ^= bits
        return bytes(image)

    return flip


def truncated(length: int) -> Callable[[bytes], bytes]:
    """Return a function for `FaultyBackend.damage` that keeps only the first `length` bytes."""
    return lambda value: value[:length]
