"""CacheEngine: a cache over any backend that checks its entries, counts, and stays below a cap."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from kcache.backend import Backend, Usage, check_key
from kcache.config import DEFAULT_MAX_SIZE, DEFAULT_WAIT
from kcache.engine.eviction import Eviction
from kcache.engine.journal import Journal
from kcache.engine.stats import DISK, MEMORY, Counters, Stats, StatsFile
from kcache.entry import Entry, decode, encode
from kcache.errors import BackendError, CorruptEntryError, IncompatibleEntryError
from kcache.util import log
from kcache.util.forks import after_fork, at_end, importing
from kcache.util.memory_tier import MemoryTier, Slot
from kcache.util.units import check_int, parse_age, parse_seconds, parse_size

if TYPE_CHECKING:
    from typing import Self

    from kcache.engine.journal import What
    from kcache.engine.single_flight import SingleFlight

_now = time.perf_counter

#: Hits in memory call `touch` of the backend at most once in this many seconds for each entry.
TOUCH_INTERVAL = 60.0
#: Pairs of the key of an entry that can't be used, and the error that says why.
Damaged = list[tuple[str, CorruptEntryError]]
#: The exceptions of a backend that the engine catches, counts and logs instead of raising them.
SURVIVED = (BackendError, OSError, MemoryError)
#: The counts are written to the statistics file at most once in this many seconds, and at exit.
FLUSH_INTERVAL = 5.0


class Put(Enum):
    """What `CacheEngine.put` did with an entry. As a condition, only `STORED` is true."""

    STORED = "stored"
    #: The entry alone exceeds the cap. It was counted as rejected, and no other entry was evicted.
    TOO_LARGE = "too large"
    #: Not enough entries could be evicted to make room. The entry was counted as rejected.
    NO_ROOM = "no room"
    #: The backend failed, or the cache is read-only.
    FAILED = "failed"

    def __bool__(self) -> bool:
        """Return whether the entry was stored."""
        return self is Put.STORED


class CacheEngine:
    """Stores entries under keys, stays below a cap, and never returns a damaged entry.

    The engine does not depend on kernels or files. It catches every error of the backend, counts it
    in `Stats.errors`, and logs a warning for the first error of each operation. If a read fails,
    the lookup is a miss. If a write fails, nothing is stored.

    The stored bytes never exceed the cap; with the backends `file` and `zstd`, each concurrent
    writer may exceed it by one entry.

    Threads: several threads may use an engine at the same time. Processes: any number may share a
    directory. Crash: the guarantees are those of the backend. Fork: a child may use the engine.

    Args:
        backend: stores the bytes; closed when the engine is closed.
        max_size: the cap, in stored bytes, at least 1.
        memory_size: the size of the memory tier in bytes, including `ITEM_OVERHEAD` for each entry;
            0 switches the tier off, so that every `get` reads the backend.
        producer: what makes the payloads of the entries. Entries of another producer are misses.
        read_only: whether to never write, delete or record a use.
        stats_file: the sums of the counts of all processes. With None, no sums are kept.
        lock_file: the path of the file that processes lock, so that `get_or_create` makes each
            entry only once. With None, only the threads of one process share the work.
        wait: how many seconds `get_or_create` waits while another thread or process makes an entry.
        journal: the path of a cache's directory, whose journal records why entries left the cache.
            With None, nothing is recorded.
        name: the name of the backend, for the journal.
        clock: returns monotonic seconds; for tests.

    Raises:
        ConfigError: `max_size`, `memory_size` or `wait` is out of range.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        max_size: int = DEFAULT_MAX_SIZE,
        memory_size: int = 0,
        producer: str = "",
        read_only: bool = False,
        stats_file: StatsFile | None = None,
        lock_file: str | None = None,
        wait: float = DEFAULT_WAIT,
        journal: str | None = None,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_int("max_size", max_size, 1)
        check_int("memory_size", memory_size, 0)
        self.backend = backend
        self.read_only = read_only
        self.counters = Counters()
        self.memory: MemoryTier[str, Entry] = MemoryTier(memory_size)
        self._noted_in = journal, name
        self._journal: Journal | None = None
        self.producer = producer
        self._producer = producer.encode()
        self._read = backend.get if read_only else backend.use
        self._clock = clock
        self._room = threading.Lock()
        #: The cap, in stored bytes; a migration lowers it for a while.
        self.max_size = max_size
        #: Path of the file of locks between processes; None if there are none.
        self.lock_file = None if read_only else lock_file
        self._wait = parse_seconds(wait, name="wait")
        self._flight: SingleFlight | None = None
        self._stats_file = stats_file
        self._next_flush = clock() + FLUSH_INTERVAL
        self._reported: set[str] = set()
        self._closed = False
        self._at_end = weakref.finalize(self, _end, backend, self.counters, stats_file)
        at_end()
        self._end_with_child()
        after_fork(self)

    # -- the four operations -------------------------------------------------------------------

    def get(self, key: str) -> Entry | None:
        """Return the entry under `key`, or None if there is none; count a hit or a miss.

        It is also a miss if the entry is damaged, if it is of another format version or producer,
        or if the backend fails.

        Raises:
            ConfigError: `key` is not 64 hexadecimal digits.
        """
        entry = self.find(key)
        if entry is None:
            self.counters.add("misses")
        return entry

    def put(self, key: str, entry: Entry, *, decoded: object = None) -> Put:
        """Store `entry` under `key`, evict other entries if needed, and return what was done.

        The memory tier keeps `decoded` together with the entry; see `Slot`.

        Raises:
            ConfigError: `key` is not 64 hexadecimal digits.
            ArgumentTypeError: `entry` has content that can't be encoded; see `encode`.
        """
        check_key(key)
        blob = encode(key, entry, producer=self._producer)
        if self.read_only:
            return Put.FAILED
        if self._clock() >= self._next_flush:
            self._flush_now()
        cost = len(blob) + self.backend.overhead
        if cost > self.max_size:
            self.counters.add("rejected")
            log.debug("entry %s of %d bytes exceeds the cap of %d bytes", key, cost, self.max_size)
            self.note("rejected", key, f"it has {cost} bytes, and the cap is {self.max_size} bytes")
            self._forget(key)
            return Put.TOO_LARGE
        done = Put.FAILED
        with self._room, self._surviving("put"):
            eviction = Eviction(self.backend, self.max_size, partial(self._evict, "evicted"))
            stored = eviction.put(key, blob, cost)
            if self._journal is not None:
                self._journal.flush()
            if stored:
                self.counters.add("puts")
                touch_at = self._clock() + TOUCH_INTERVAL
                self.memory.put(key, entry, len(blob), decoded=decoded, touch_at=touch_at)
                return Put.STORED
            done = Put.NO_ROOM
            self.counters.add("rejected")
            self.note("rejected", key, "nothing could be evicted to make room")
        self.memory.delete(key)
        return done

    def get_or_create(self, key: str, create: Callable[[], Entry]) -> Entry:
        """Return the entry under `key`; on a miss, call `create`, and store and return its result.

        If several threads and processes miss `key` at the same time, one of them calls `create`,
        and the others wait; see `SingleFlight`. If `create` raises an exception, the waiting
        threads of the same process raise copies of the exception, and nothing is stored.

        Raises:
            ConfigError: `key` is not 64 hexadecimal digits.
        """
        entry = self.find(key)
        if entry is not None:
            return entry
        with self.flight.lead(key) as turn:
            for made in turn:
                entry = self.find(key, is_retry=True)
                if entry is None and made is not None:
                    self.counters.hit(key, made.cost, 0.0, MEMORY)
                    entry = made
                if entry is not None:
                    return entry
            self.counters.add("misses")
            turn.result = entry = create()
            self.counters.made(key)
            self.put(key, entry)
            return entry

    def delete(self, key: str, *, noted: bool = True) -> bool:
        """Delete the entry under `key` in memory and backend; return whether the backend had it.

        The deletion of an entry is recorded in the journal, unless `noted` is false.

        Raises:
            ConfigError: `key` is not 64 hexadecimal digits.
        """
        check_key(key)
        removed = self._forget(key) > 0
        if removed and noted:
            self.note("deleted", key)
        return removed

    # -- the whole cache -----------------------------------------------------------------------

    def trim(
        self, max_size: int | str | None = None, *, older_than: float | str | None = None
    ) -> int:
        """Evict the least recently used entries to free space; return how many bytes were freed.

        With `older_than`, in seconds or as text such as `"30d"`, all entries whose last use is
        longer ago are evicted. With `max_size`, entries are evicted until at most this size is
        stored. Without arguments, this size is 90 % of the cap.

        Raises:
            ConfigError: `max_size` is not a size, or `older_than` is not an age.
        """
        eviction = Eviction(self.backend, self.max_size, partial(self._evict, "trimmed"))
        goal = eviction.low_water if max_size is None else parse_size(max_size, name="max_size")
        age = None if older_than is None else parse_age(older_than, name="older_than")
        if self.read_only:
            return 0
        freed = 0
        with self._room, self._surviving("trim"):
            if age is not None:
                freed = eviction.unused(time.time_ns() - age * 1e9)
            if age is None or max_size is not None:
                freed += eviction.trim_to(goal)
            self.journal.flush()
        return freed

    def clear(self) -> int:
        """Delete all entries but keep the statistics; return how many the backend has deleted."""
        self.memory.clear()
        removed = 0
        if not self.read_only:
            with self._surviving("clear"):
                keys = (info.key for info in self.backend.scan())
                for freed in Eviction(self.backend, self.max_size, self._delete).each(keys):
                    removed += freed > 0
            self.memory.clear()
            self.note("cleared")
        return removed

    def stats(self) -> Stats:
        """Return what this engine has counted since it was created."""
        return self.counters.snapshot()

    def total_stats(self) -> Stats:
        """Return the counts of all processes; without a readable file, those of this engine."""
        self.flush()
        with self._surviving("statistics"):
            if self._stats_file is not None:
                return self._stats_file.total()
        return self.stats()

    @property
    def size_bytes(self) -> int:
        """How many bytes all processes have stored; 0 if the backend can't be read."""
        return self._usage().bytes

    @property
    def entry_count(self) -> int:
        """How many entries all processes have stored; 0 if the backend can't be read."""
        return self._usage().entries

    def _usage(self) -> Usage:
        with self._surviving("usage"):
            return self.backend.usage()
        return Usage(0, 0)

    def flush(self, *, timeout: float = 1.0) -> None:
        """Add the counts since the last flush to the statistics file; see `Counters.flush`."""
        with self._surviving("flush"):
            self.counters.flush(self._stats_file, timeout=timeout)

    def close(self) -> None:
        """Write the counts to the statistics file and close the backend. Idempotent."""
        self._closed = True  # from now on, failures of other threads are not warnings
        self._at_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for frontends, which count requests instead of reads --------------------------------------

    def fetch(
        self, key: str, damaged: Damaged, *, memory: bool = True
    ) -> tuple[Slot[Entry] | None, str]:
        """Return the slot of the entry under `key`, and the tier that has it: `MEMORY` or `DISK`.

        The slot is None if there is no entry that can be used. Neither a hit nor a miss is counted.
        If an entry can't be used, its key and an error are appended to `damaged`, so that the
        caller can pass them to `refuse`. If `memory` is false, only the backend is read.
        """
        now = self._clock()
        if now >= self._next_flush:
            self._flush_now()
        slot = self.memory.get(key) if memory else None
        if slot is not None:
            if now >= slot.touch_at:
                slot.touch_at = now + TOUCH_INTERVAL
                if not self.read_only:
                    with self._surviving("touch"):
                        self.backend.touch(key)
            return slot, MEMORY
        check_key(key)
        try:
            changes = self.memory.changes
            blob = self._read(key)
            if blob is not None:
                entry = decode(blob, key, producer=self._producer)
                slot = self.memory.put(
                    key, entry, len(blob), touch_at=now + TOUCH_INTERVAL, unless_since=changes
                )
        except CorruptEntryError as error:
            damaged.append((key, error))
        except SURVIVED as error:
            self.report("get", error)
        return slot, DISK

    def peek(
        self, key: str, damaged: Damaged, *, memory: bool = True
    ) -> tuple[Slot[Entry] | None, str]:
        """Return the same as `fetch`, but change nothing: the use of the entry is not recorded.

        Raises:
            BackendError: the backend can't be read.
        """
        slot = self.memory.peek(key) if memory else None
        if slot is not None:
            return slot, MEMORY
        try:
            blob = self.backend.get(key)
            if blob is not None:
                return Slot(decode(blob, key, producer=self._producer)), DISK
        except CorruptEntryError as error:
            damaged.append((key, error))
        return None, DISK

    @property
    def journal(self) -> Journal:
        """The journal, which records why entries left the cache. It is opened at its first use."""
        if self._journal is None:
            cap, read_only = self.max_size, self.read_only
            made = Journal(*self._noted_in, read_only=read_only, max_size=cap)
            self._journal = self._journal or made  # another thread may have been faster
        return self._journal

    def note(self, what: What, key: str = "", detail: str = "") -> None:
        """Record in the journal what happened to an entry or, without `key`, to all entries."""
        with self._surviving("journal"):
            self.journal.note(what, key, detail)

    @property
    def flight(self) -> SingleFlight:
        """The `SingleFlight` that lets only one thread make an entry; created at its first use."""
        if self._flight is None:
            with importing:
                from kcache.engine.single_flight import SingleFlight  # noqa: PLC0415  8 ms

            with self.counters.lock:
                if self._flight is None:
                    self._flight = SingleFlight(
                        self.lock_file, wait=self._wait, counters=self.counters
                    )
        return self._flight

    def find(self, key: str, *, is_retry: bool = False) -> Entry | None:
        """Return the entry under `key` and count a hit; or return None without counting a miss.

        If the entry can't be used, the reason is counted and logged, except with `is_retry`,
        because the first attempt has already done that.
        """
        started = _now()
        if not isinstance(key, str):
            check_key(key)
        damaged: Damaged = []
        slot, tier = self.fetch(key, damaged)
        if slot is not None:
            self.counters.hit(key, slot.value.cost, _now() - started, tier)
            return slot.value
        if damaged and not is_retry:
            self.refuse(*damaged[0])
        return None

    # -- inside --------------------------------------------------------------------------------

    def refuse(self, key: str, error: CorruptEntryError) -> None:
        """Count that the entry under `key` can't be used; write `error` to the journal and log."""
        self.note("refused", key, str(error))
        if isinstance(error, IncompatibleEntryError):
            self.counters.add("stale")
            log.info("entry %s is ignored: %s", key, error)
        else:
            self.counters.add("corrupt")
            log.warning("entry %s is damaged and is ignored: %s", key, error)

    def _forget(self, key: str) -> int:
        freed = 0 if self.read_only else self._delete(key)
        self.memory.delete(key)  # only now, because a concurrent `get` may have put it there
        return freed

    def _delete(self, key: str) -> int:
        with self._surviving("delete"):
            return self.backend.delete(key)
        return 0

    def _evict(self, event: What, key: str) -> int:
        """Delete an entry to make room, count it, record it as `event`; return the bytes freed."""
        size = self._delete(key)
        self.memory.delete(key)
        if size:
            self.counters.add("evictions")
            self.counters.add("bytes_evicted", size)
            log.debug("evicted %s, %d bytes", key, size)
            self.journal.later(event, key)
        return size

    @contextmanager
    def _surviving(self, operation: str) -> Generator[None]:
        """Catch an error that the backend raises in the `with` block; count it and log it."""
        try:
            yield
        except SURVIVED as error:
            self.report(operation, error)

    def report(self, operation: str, error: BaseException) -> None:
        """Count an error of the backend; log it, as a warning only the first for each operation."""
        self.counters.add("errors")
        say = log.debug if self._closed or operation in self._reported else log.warning
        self._reported.add(operation)
        kind = type(error).__name__
        text = "cache operation %s failed; kcache continues without it (%s: %s)"
        say(text, operation, kind, error)

    def _flush_now(self) -> None:
        self._next_flush = self._clock() + FLUSH_INTERVAL
        self.flush(timeout=0.0)

    def after_fork(self) -> None:
        """Make the engine usable in the child after a fork, without the counts of the parent."""
        self.counters.after_fork()
        self._room = threading.Lock()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:  # it clears its list of finalizers before it calls this function
            util.register_after_fork(self, CacheEngine._end_with_child)

    def _end_with_child(self) -> None:
        """Make multiprocessing close the engine at the end of its child, which skips `atexit`."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(self, self._at_end, exitpriority=0)


def _end(backend: Backend, counters: Counters, stats_file: StatsFile | None) -> None:
    """Write the counts and close the backend; runs at `close`, at garbage collection or at exit."""
    for close in (partial(counters.flush, stats_file, timeout=1.0), backend.close):
        try:
            close()
        except SURVIVED as error:
            log.debug("closing failed: %s", error)
