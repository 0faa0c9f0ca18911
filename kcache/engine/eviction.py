"""Eviction: makes room below the cap by deleting the least recently used entries, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from kcache.backend import Backend
from kcache.errors import DiskFullError, FullError
from kcache.util import log
from kcache.util.units import format_size

#: A trim evicts entries until at most this share of the cap is stored, so that the next puts need
#: not evict any.
LOW_WATER = 0.9
#: A put evicts at most this many entries in addition to those that it must evict. So a put takes
#: little time (evicting 10 % of 100,000 entries would take a second), and little memory, because
#: LMDB keeps 2 pages in memory for each evicted entry.
EVICT_BATCH = 64
#: A trim or a clear ends its batch after this many entries, so that other processes can write.
DELETE_BATCH = 1024
#: The same limit if the backend has no room left. It is smaller, because LMDB needs room for copies
#: of 3 pages of its index for each entry in a batch.
FREE_BATCH = 16


class Eviction:
    """Deletes the least recently used entries of a backend until the rest is small enough.

    Threads: only one thread may evict at a time, so the caller must hold a lock. Processes: several
    processes may evict at the same time; if one finds that an entry is already gone, it reads the
    usage again. Exceptions of the backend are passed on to the caller.

    Args:
        backend: the backend to evict from.
        max_size: the cap, in stored bytes.
        evict: deletes the entry under a key, counts the eviction, and returns the bytes freed.

    Attributes:
        low_water: how many bytes remain stored after a trim.
    """

    def __init__(self, backend: Backend, max_size: int, evict: Callable[[str], int]) -> None:
        self._backend = backend
        self._max_size = max_size
        self._evict = evict
        self.low_water = int(max_size * LOW_WATER)

    def put(self, key: str, blob: bytes, cost: int) -> bool:
        """Make room for `blob` and put it under `key`; return whether there was enough room.

        `cost` is the stored size of `blob` in bytes, or more.
        """
        allowed, low, is_retry = self._max_size - cost, self.low_water - cost, False
        while True:
            try:
                with self._backend.batch():
                    if self._backend.usage().bytes > allowed:
                        self._evict_to(allowed, low if low >= 0 else allowed)
                        if self._backend.usage().bytes > allowed:
                            return False
                    self._backend.put(key, blob)
                    return True
            except FullError as error:
                if is_retry:
                    raise
                is_retry = True
                log.debug("no room for entry %s below the cap (%s): evicting others", key, error)
                if isinstance(error, DiskFullError):
                    cap = format_size(self._max_size)
                    log.warning_once(
                        f"the disk is full, and the cache has not reached its cap of {cap}: the "
                        "least recently used entries are evicted to store others"
                    )
                tenth_less = int(self._backend.usage().bytes * LOW_WATER)
                self.trim_to(tenth_less, most=FREE_BATCH)

    def trim_to(self, goal: int, *, most: int = DELETE_BATCH) -> int:
        """Evict as many bytes as the backend has above `goal`; return the bytes freed.

        Entries that other processes put during the call are not evicted in addition. Other
        processes can write after every `most` evicted entries.
        """
        excess = self._backend.usage().bytes - goal
        freed = 0
        while freed < excess:
            with self._backend.batch():
                step = self._evict_to(goal, goal, most=most)
            if not step:
                break
            freed += step
        return freed

    def unused(self, since: float) -> int:
        """Evict the entries that were last used before `since`; return the bytes freed.

        `since` is in nanoseconds since the epoch.
        """
        return sum(self.each(info.key for info in self._backend.scan() if info.used_ns < since))

    def each(self, keys: Iterable[str]) -> Iterator[int]:
        """Evict the entries under `keys`; yield how many bytes each has freed.

        Other processes can write after each batch.
        """
        left = iter(keys)
        while batch := list(islice(left, DELETE_BATCH)):
            with self._backend.batch():
                freed = [*map(self._evict, batch)]
            yield from freed

    def _evict_to(self, needed: int, wanted: int, *, most: int | None = None) -> int:
        """Evict until at most `needed` bytes are stored, then continue towards `wanted` bytes.

        The second part evicts at most `EVICT_BATCH` entries. Both parts together evict at most
        `most` entries, if `most` is given. Return the bytes freed.
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
            size = self._evict(info.key)
            freed, used = freed + size, used - size
            if size == 0 or (used <= needed and extra == 0):
                used = self._backend.usage().bytes  # another process may have evicted or written
        return freed
