"""MemoryTier: a map in memory with a maximum size, which evicts the least recently used items."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from kcache.util.forks import after_fork

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: How many bytes each item counts in addition to the size that its caller states: for the key, the
#: entry, its mappings, metadata of the usual size, and the slot (measured with tracemalloc).
ITEM_OVERHEAD = 4352


#: A value and the object that was decoded from it together use this many times the value's encoded
#: size in memory (measured with tracemalloc for manifests).
DECODED_FACTOR = 4


class Slot(Generic[V]):
    """A value in the memory tier, and what its users remember about it.

    Attributes:
        value: the value that was put.
        charge: how many bytes of the maximum size the value uses up.
        decoded: an object that a frontend has decoded from the value, or None.
        touch_at: the time from which a use of the value is to be recorded in the backend, too. At
            0.0, the next use is recorded.
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
    """A map from keys to values whose total size in bytes never exceeds `max_size`.

    Each item counts the size that its caller states, plus `ITEM_OVERHEAD`. An item that is larger
    than `max_size` is not stored, but any older item under the same key is still removed. With a
    `max_size` of 0, nothing is stored.

    Threads: every method may be called from several threads at the same time. If a signal handler
    interrupts a method by an exception, the size of a removed item may still count. Fork: a forked
    child starts with a copy of the items.
    """

    __slots__ = ("__weakref__", "_items", "_lock", "_newest", "_used", "changes", "max_size")

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._items: OrderedDict[K, Slot[V]] = OrderedDict()
        #: The last item in `_items`, if it is there because it was read. Another read of this item
        #: need not move it to the end again.
        self._newest: Slot[V] | None = None
        self._used = 0
        self.after_fork()
        #: How often `put`, `delete` or `clear` was called, except `put` with `unless_since`.
        self.changes = 0
        after_fork(self)

    def after_fork(self) -> None:
        """Start with a free lock; also called in the child after a fork."""
        self._lock = threading.Lock()

    def get(self, key: K) -> Slot[V] | None:
        """Return the slot under `key`, or None if there is none, and record a use of the item."""
        slot = self._items.get(key)
        if slot is not None and slot is not self._newest:
            try:  # `suppress` would take longer than the rest of this method
                self._items.move_to_end(key)
                self._newest = slot
            except KeyError:  # another thread has just evicted the item
                pass
        return slot

    def peek(self, key: K) -> Slot[V] | None:
        """Return the slot under `key`, or None if there is none, without recording a use."""
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
        """Store `value` under `key`, and evict the least recently used items that no longer fit.

        Return a slot with the value, even if the value was not stored.

        Args:
            key: the key of the value.
            value: the value.
            size: the size of the encoded value in bytes.
            decoded: an object that was decoded from the value, or None. The value then counts
                `DECODED_FACTOR` times its size.
            touch_at: see `Slot`.
            unless_since: an earlier value of `changes`, or None. If the map was changed since then,
                the value is not stored. This is for a value that was read from the backend: it may
                be older than a put or a delete that came after the read.
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
                self._used += charge  # first, so that no interrupt leaves a stored item uncounted
                self._items[key] = slot
            while self._used > self.max_size:
                self._used -= self._items.popitem(last=False)[1].charge
        return slot

    def delete(self, key: K) -> None:
        """Remove the item under `key`, if there is one."""
        with self._lock:
            self.changes += 1
            self._forget(key)

    def _forget(self, key: K) -> None:
        self._newest = None
        if (old := self._items.pop(key, None)) is not None:
            self._used -= old.charge

    def clear(self) -> None:
        """Remove all items."""
        with self._lock:
            self.changes += 1
            self._newest = None
            self._items.clear()
            self._used = 0

    @property
    def size_bytes(self) -> int:
        """The total size of the items in bytes, including `ITEM_OVERHEAD` for each."""
        return self._used

    def __len__(self) -> int:
        return len(self._items)
