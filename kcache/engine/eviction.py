"""Eviction: frees space below the cap by deleting the coldest entries, a bounded number at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TypeAlias

from kcache.backend import Backend
from kcache.errors import ConfigError, FullError
from kcache.util import log

__all__ = ["DELETE_BATCH", "EVICT_BATCH", "LOW_WATER", "Eviction", "check_size"]

Evict: TypeAlias = Callable[[str], int]

#: A trim goes down to this share of the cap, so that the next puts have room without a trim.
LOW_WATER = 0.9
#: ... but it removes at most this many entries beyond what the put itself needs. So a put stays
#: short (10 % of 100,000 entries would take a second), and LMDB, which keeps 2 pages in memory for
#: each entry, stays small.
EVICT_BATCH = 64
#: A trim or clear lets other writers go first after this many entries.
DELETE_BATCH = 1024
#: ... and after this many if the backend has no room: LMDB copies 3 pages of its index for each.
FREE_BATCH = 16


class Eviction:
    """Deletes the least recently used entries of a backend until the rest is small enough.

    Threads: one at a time, by the caller's lock. Processes: each evicts on its own, and asks again
    what is stored when others delete the same entries. Exceptions of the backend pass through.

    Args:
        backend: what to evict from.
        max_size: the cap, in stored bytes; may be changed between two calls.

    Every method is given `evict`, which deletes one entry, counts it and returns the bytes freed.
    """

    def __init__(self, backend: Backend, max_size: int) -> None:
        self._backend = backend
        self.max_size = max_size

    def put(self, key: str, blob: bytes, cost: int, evict: Evict) -> bool:
        """Make room for `blob`, of `cost` stored bytes, and put it; tell whether there was room."""
        try:
            return self._put_once(key, blob, cost, evict)
        except FullError as error:
            log.debug("no room for %s below the cap (%s): evicting", key, error)
            self.free_some(evict)
            return self._put_once(key, blob, cost, evict)

    def _put_once(self, key: str, blob: bytes, cost: int, evict: Evict) -> bool:
        with self._backend.batch():
            if not self.make_room(cost, evict):
                return False
            self._backend.put(key, blob)
            return True

    def make_room(self, incoming: int, evict: Evict) -> bool:
        """Evict enough for `incoming` more bytes; tell whether there is room now."""
        allowed = self.max_size - incoming
        low = int(self.max_size * LOW_WATER) - incoming
        if self._backend.usage().bytes > allowed:
            self._evict_to(allowed, low if low >= 0 else allowed, evict)
            return self._backend.usage().bytes <= allowed
        return True

    def free_some(self, evict: Evict) -> None:
        """Evict a tenth of the stored bytes, for a backend that finds no room below the cap."""
        self.trim_to(int(self._backend.usage().bytes * LOW_WATER), evict, most=FREE_BATCH)

    def trim_to(self, goal: int, evict: Evict, *, most: int = DELETE_BATCH) -> int:
        """Evict what exceeds `goal` now; what others put meanwhile does not count.

        Others may write after every `most` entries.
        """
        excess = self._backend.usage().bytes - goal
        freed = 0
        while freed < excess:
            with self._backend.batch():
                step = self._evict_to(goal, goal, evict, most=most)
            if not step:
                break
            freed += step
        return freed

    def unused(self, since: float, evict: Evict) -> int:
        """Evict entries last used before `since`, in nanoseconds since 1970; return bytes freed."""
        freed = 0
        unused = (info.key for info in self._backend.scan() if info.used_ns < since)
        while batch := list(islice(unused, DELETE_BATCH)):
            with self._backend.batch():
                freed += sum(map(evict, batch))
        return freed

    def _evict_to(self, needed: int, wanted: int, evict: Evict, *, most: int | None = None) -> int:
        """Evict until `needed` bytes at most are stored, then on towards `wanted`.

        At most `most` entries in all, if given. Returns the bytes freed.
        """
        freed = 0
        extra = 0
        used = self._backend.usage().bytes
        candidates = islice(self._backend.coldest(), most)
        while used > wanted and (used > needed or extra < EVICT_BATCH):
            extra += used <= needed
            info = next(candidates, None)
            if info is None:
                break
            size = evict(info.key)
            freed, used = freed + size, used - size
            if size == 0 or (used <= needed and extra == 0):
                used = self._backend.usage().bytes  # another process evicts or writes: check again
        return freed


def check_size(name: str, value: int, *, least: int) -> None:
    """Raise ConfigError unless `value` is a number of bytes, `least` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:  # pyright: ignore
        raise ConfigError(f"{name}={value!r} is not allowed; allowed: an integer >= {least}, bytes")
