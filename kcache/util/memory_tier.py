"""MemoryTier: the in-process tier, a map bounded in bytes that evicts the least recently used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from kcache.util.forks import after_fork

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: How many bytes are charged for each item beside its payload: for key, entry, mappings, metadata
#: of the usual size and the map's slot (measured with tracemalloc).
ITEM_OVERHEAD = 4352


class MemoryTier(Generic[K, V]):
    """A map from keys to values whose charged bytes never exceed `max_size`.

    An item is charged the size that its caller states plus `ITEM_OVERHEAD`. An item that is
    larger than the bound is not kept, and removes an older item of its key.

    Threads: every method may be called from any thread. Fork: a child starts with a copy. After an
    interrupt, an item that is gone may still be counted.
    """

    __slots__ = ("__weakref__", "_items", "_lock", "_newest", "_used", "changes", "max_size")

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        #: The most recently used item, if its last use was a read: it need not be moved again.
        self._newest: tuple[V, int] | None = None
        self._used = 0
        self.after_fork()
        #: How often an item was put or removed (reads do not count); see `put`.
        self.changes = 0
        after_fork(self)

    def after_fork(self) -> None:
        """Start with a free lock in a child process."""
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Return the value under `key` and mark it as used, or None."""
        item = self._items.get(key)
        if item is None:
            return None
        if item is not self._newest:
            try:  # `suppress` takes longer than all the rest
                self._items.move_to_end(key)
                self._newest = item
            except KeyError:  # evicted a moment ago
                pass
        return item[0]

    def peek(self, key: K) -> V | None:
        """Return the value under `key`, or None, without marking it as used."""
        item = self._items.get(key)
        return None if item is None else item[0]

    def put(self, key: K, value: V, size: int, *, unless_since: int | None = None) -> None:
        """Keep `value`, whose payload is `size` bytes, and evict what no longer fits.

        With `unless_since`, an earlier `changes`, do so only if nothing has changed since then,
        because a value that was read from elsewhere may be older than a put or delete in between.
        """
        charge = size + ITEM_OVERHEAD
        with self._lock:
            if unless_since is None:
                self.changes += 1
            elif unless_since != self.changes:
                return
            self._newest = None
            old = self._items.pop(key, None)
            if old is not None:
                self._used -= old[1]
            if charge > self.max_size:
                return
            self._used += charge  # before it is there: an interrupt must not leave it uncounted
            self._items[key] = (value, charge)
            while self._used > self.max_size:
                self._used -= self._items.popitem(last=False)[1][1]

    def delete(self, key: K) -> None:
        """Forget `key`, if it is there."""
        with self._lock:
            self.changes += 1
            self._newest = None
            item = self._items.pop(key, None)
            if item is not None:
                self._used -= item[1]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self.changes += 1
            self._newest = None
            self._items.clear()
            self._used = 0

    @property
    def size_bytes(self) -> int:
        """Bytes charged, overhead included."""
        return self._used

    def __len__(self) -> int:
        return len(self._items)
