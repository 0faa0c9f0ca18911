"""FaultyBackend: a wrapper that lets another backend fail on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from kcache.backend import Backend, EntryInfo, Usage
from kcache.testing.memory import MemoryBackend

__all__ = ["Fault", "FaultyBackend", "flipped", "truncated"]


class Fault:
    """Says when a method fails, and with which error.

    Args:
        error: what is raised.
        every: with n, every n-th call fails; 1 is every call.
        times: how many calls fail in all; None for no limit.
    """

    def __init__(self, error: BaseException, *, every: int = 1, times: int | None = None) -> None:
        self.error = error
        self.every = every
        self.times = times
        self.calls = 0
        self.raised = 0

    def strike(self) -> None:
        """Count a call, and raise if it is one that fails."""
        self.calls += 1
        if self.calls % self.every == 0 and (self.times is None or self.raised < self.times):
            self.raised += 1
            raise self.error


class FaultyBackend(Backend):
    """Passes each call to another backend, records it, and fails when you tell it to.

    Threads, processes: as the inner backend. The recorded calls belong to this object.

    Args:
        inner: a new `MemoryBackend` if none is given.

    Attributes:
        faults: method name -> what it raises: an exception on every call, or a `Fault`.
        calls: names of the methods that were called, in order.
        damage: a function that changes a value before `get` or `use` returns it, such as `flipped`
            or `truncated`; None returns it as it is.
    """

    def __init__(self, inner: Backend | None = None) -> None:
        self.inner = MemoryBackend() if inner is None else inner
        self.overhead = self.inner.overhead
        self.faults: dict[str, BaseException | Fault] = {}
        self.calls: list[str] = []
        self.damage: Callable[[bytes], bytes] | None = None

    def get(self, key: str) -> bytes | None:
        return self._damaged(self._entered("get").get(key))

    def put(self, key: str, value: bytes) -> int:
        return self._entered("put").put(key, value)

    def delete(self, key: str) -> int:
        return self._entered("delete").delete(key)

    def touch(self, key: str) -> None:
        self._entered("touch").touch(key)

    def use(self, key: str) -> bytes | None:
        return self._damaged(self._entered("use").use(key))

    def batch(self) -> AbstractContextManager[None]:
        return self._entered("batch").batch()

    def usage(self) -> Usage:
        return self._entered("usage").usage()

    def coldest(self) -> Iterator[EntryInfo]:
        return self._entered("coldest").coldest()

    def scan(self) -> Iterator[EntryInfo]:
        return self._entered("scan").scan()

    def check(self, *, repair: bool = False) -> Iterator[str]:
        return self._entered("check").check(repair=repair)

    def close(self) -> None:
        self._entered("close").close()

    def _entered(self, method: str) -> Backend:
        """Record a call; return the inner backend, unless the call is to fail."""
        self.calls.append(method)
        fault = self.faults.get(method)
        if isinstance(fault, Fault):
            fault.strike()
        elif fault is not None:
            raise fault
        return self.inner

    def _damaged(self, value: bytes | None) -> bytes | None:
        return value if value is None or self.damage is None else self.damage(value)


def flipped(offset: int = 0, bits: int = 1) -> Callable[[bytes], bytes]:
    """Return a damage for `FaultyBackend.damage`: the byte at `offset`, exclusive-or `bits`."""

    def flip(value: bytes) -> bytes:
        image = bytearray(value)
        if image:
            image[offset % len(image)] ^= bits
        return bytes(image)

    return flip


def truncated(length: int) -> Callable[[bytes], bytes]:
    """Return a damage for `FaultyBackend.damage`: all but the first `length` bytes cut off."""
    return lambda value: value[:length]
