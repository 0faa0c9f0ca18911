"""MemoryTier: the in-process tier, a map bounded in bytes that evicts the least recently used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from kcache.util.forks import after_fork

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: How many bytes are charged for each item in addition to its payload: for key, entry, mappings,
#: metadata of the usual size and the map's slot (measured with tracemalloc).
ITEM_OVERHEAD = 4352


#: A value and what was decoded from it take this many times the value's encoded size in memory
#: (measured with tracemalloc for manifests).
DECODED_FACTOR = 4


class Slot(Generic[V]):
    """A value in memory, and what its users remember of it.

    Attributes:
        value: as it was put.
        charge: the bytes that are charged for it.
        decoded: what a frontend has made from the value, or None.
        touch_at: when the next use is to be recorded elsewhere; 0.0 for at once.
    """

    __slots__ = ("charge", "decoded", "touch_at", "value")

    def __init__(
        self, value: V, charge: int = 0, decoded: object = None, touch_at: float = 0.0
    ) -> None:
        self.value = value
        self.charge = charge
        self.decoded: Any = decoded
        self.touch_at = touch_at


class MemoryTier(Generic[K, V]):
    """A map from keys to slots whose charged bytes never exceed `max_size`.

    An item is charged the size that its caller states plus `ITEM_OVERHEAD`. An item that is
    larger than the bound is not kept, and removes an older item of its key.

    Threads: every method may be called from any thread. Fork: a child starts with a copy. After an
    interrupt, an item that is gone may still be counted.
    """

    __slots__ = ("__weakref__", "_items", "_lock", "_newest", "_used", "changes", "max_size")

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._items: OrderedDict[K, Slot[V]] = OrderedDict()
        #: The most recently used item, if its last use was a read: it need not be moved again.
        self._newest: Slot[V] | None = None
        self._used = 0
        self.after_fork()
        #: How often an item was put or removed (reads do not count); see `put`.
        self.changes = 0
        after_fork(self)

    def after_fork(self) -> None:
        """Start with a free lock in a child process."""
        self._lock = threading.Lock()

    def get(self, key: K) -> Slot[V] | None:
        """Return the slot under `key`, which now counts as used; None if there is none."""
        slot = self._items.get(key)
        if slot is not None and slot is not self._newest:
            try:  # `suppress` takes longer than all the rest
                self._items.move_to_end(key)
                self._newest = slot
            except KeyError:  # evicted a moment ago
                pass
        return slot

    def peek(self, key: K) -> Slot[V] | None:
        """Return the slot under `key`, or None if there is none; this does not count as a use."""
        return self._items.get(key)

    def put(
        self,
        key: K,
        value: V,
        size: int,
        *,
        decoded: object = None,
        touch_at: float = 0.0,
        unless_since: int | None = None,
    ) -> Slot[V]:
        """Keep `value`, and evict what no longer fits; return its slot.

        Args:
            key: of the value.
            value: what to keep.
            size: bytes of its payload.
            decoded: what was made from it, which is charged, too.
            touch_at: see `Slot`.
            unless_since: an earlier `changes`. The value is kept only if nothing has changed since
                then, because a value that was read from elsewhere may be older than a put or delete
                in between.
        """
        charge = (size if decoded is None else DECODED_FACTOR * size) + ITEM_OVERHEAD
        slot = Slot(value, charge, decoded, touch_at)
        if not self.max_size:
            return slot
        with self._lock:
            if unless_since is None:
                self.changes += 1
            elif unless_since != self.changes:
                return slot
            self._forget(key)
            if charge <= self.max_size:
                self._used += charge  # before it is there: an interrupt must not leave it uncounted
                self._items[key] = slot
            while self._used > self.max_size:
                self._used -= self._items.popitem(last=False)[1].charge
        return slot

    def delete(self, key: K) -> None:
        """Forget `key`, if it is there."""
        with self._lock:
            self.changes += 1
            self._forget(key)

    def _forget(self, key: K) -> None:
        self._newest = None
        if (old := self._items.pop(key, None)) is not None:
            self._used -= old.charge

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
