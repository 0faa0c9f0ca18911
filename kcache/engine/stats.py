"""Stats: what a cache has done, counted in memory and summed over processes in one file.

The file (``stats``) is a header of 64 bytes and `SLOTS` records of 256 bytes. A process claims one
record: it locks the record's bytes for as long as it lives. It adds its counts to what the record
already holds. So no two processes ever write the same record, and no record is ever removed.
Record: u32 CRC-32 of the rest, u32 unused, then one IEEE double per field of `FIELDS`.
Record 0 is never claimed: it holds the sums at the last `zero`, which reading subtracts.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from operator import attrgetter

from kcache.directory import CacheDirectory
from kcache.engine.history import COUNTED, History
from kcache.errors import BackendError
from kcache.util.forks import after_fork
from kcache.util.locks import RangeLocks, pread, pwrite
from kcache.util.marker import open_or_replace
from kcache.util.open_file import OpenFile, has_header, open_own
from kcache.util.record import Record

__all__ = ["FIELDS", "Counters", "Flusher", "Stats", "StatsFile"]


class Stats(Record):
    """A snapshot of what a cache has done.

    Attributes:
        hits: requests answered from the cache, from memory or from the backend.
        memory_hits: those of `hits` that the in-process tier answered.
        misses: requests that the cache could not answer.
        compiles: compiles that were run to the end and succeeded.
        uncacheable: compiles whose result must not be cached (time macros, options that write,
            compiles in this process or that can't be recorded).
        puts: entries written.
        evictions: entries evicted to stay under the cap.
        stale: entries found that no longer apply: a header changed, or another format or producer.
        corrupt: entries found damaged.
        rejected: entries not stored because one alone exceeds the cap, or nothing could be evicted.
        errors: backend operations that failed; no request failed because of them.
        bytes_evicted: stored bytes of the evicted entries.
        compile_seconds: seconds spent in compiles that succeeded.
        saved_seconds: seconds of compiling that hits made unnecessary; each kernel counts
            once per process that gets it.
        hit_seconds: seconds spent in hits.
        coalesced: requests that waited for another thread or process that was making the same
            entry, and got that entry; most of them are `hits`, too.
        wait_timeouts: requests whose wait timed out, and that did the work themselves.
        unlocked: requests that could not lock their key between processes, and went on without a
            lock.
        proofs: compiles that only showed whether a kernel is good in another location; they are
            not in `compiles`.
        layer_hits: those of `hits` that a layer answered.
        remote_hits: those of `hits` that a remote answered.
        remote_misses: requests that no remote could answer.
        remote_errors: requests for which the agent that asks the remotes did not answer.
        remote_puts: kernels handed to the agent, to be put to the remotes.
    """

    hits: int = 0
    memory_hits: int = 0
    misses: int = 0
    compiles: int = 0
    uncacheable: int = 0
    puts: int = 0
    evictions: int = 0
    stale: int = 0
    corrupt: int = 0
    rejected: int = 0
    errors: int = 0
    bytes_evicted: int = 0
    compile_seconds: float = 0.0
    saved_seconds: float = 0.0
    hit_seconds: float = 0.0
    coalesced: int = 0
    wait_timeouts: int = 0
    unlocked: int = 0
    proofs: int = 0
    layer_hits: int = 0
    remote_hits: int = 0
    remote_misses: int = 0
    remote_errors: int = 0
    remote_puts: int = 0

    @property
    def requests(self) -> int:
        """Hits and misses together."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        """Hits per request, 0.0 to 1.0; 0.0 before the first request."""
        return self.hits / self.requests if self.requests else 0.0

    @property
    def avg_compile_time_ms(self) -> float:
        """Mean time of a compile, milliseconds; 0.0 before the first."""
        return 1e3 * self.compile_seconds / self.compiles if self.compiles else 0.0

    @property
    def avg_cache_time_ms(self) -> float:
        """Mean time of a hit, milliseconds; 0.0 before the first."""
        return 1e3 * self.hit_seconds / self.hits if self.hits else 0.0

    def to_dict(self) -> dict[str, int | float]:
        """Return every field and every derived figure under its name, ready for JSON."""
        derived = ("hit_rate", "avg_compile_time_ms", "avg_cache_time_ms")
        return dict(zip(FIELDS, self._values(), strict=True)) | {
            name: getattr(self, name) for name in derived
        }


#: Names of the counted fields, in the order in which the file holds them. Only ever append to it.
FIELDS: tuple[str, ...] = Stats._names
_REALS = frozenset(("compile_seconds", "saved_seconds", "hit_seconds"))


def _stats(values: Iterable[float]) -> Stats:
    """Return the snapshot that holds `values`, in the order of `FIELDS`."""
    return Stats(
        **{
            name: value if name in _REALS else int(value)  # type: ignore[arg-type]
            for name, value in zip(FIELDS, values, strict=True)
        }
    )


#: A count of a record stays below this: a double counts exactly up to here.
_MOST = 2.0**53

#: One call for all fields, because opening and closing a cache each needs them several times.
_values_of: Callable[[object], tuple[float, ...]] = attrgetter(*FIELDS)

#: How many hits are noted before they are added up.
NOTES = 256


class Counters:
    """The counts of one engine, added to from any thread.

    Hits are noted first, which is one atomic append. They are added up when a reader asks, or after
    `NOTES` of them. Taking the lock for each would be 3 % of a get from disk.
    """

    __slots__ = (
        "bytes_evicted",
        "coalesced",
        "compile_seconds",
        "compiles",
        "corrupt",
        "errors",
        "evictions",
        "hit_seconds",
        "hits",
        "layer_hits",
        "lock",
        "memory_hits",
        "misses",
        "noted",
        "proofs",
        "puts",
        "rejected",
        "remote_errors",
        "remote_hits",
        "remote_misses",
        "remote_puts",
        "saved_seconds",
        "stale",
        "uncacheable",
        "unlocked",
        "wait_timeouts",
    )

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: (saved seconds, hit seconds, from memory) of hits that are not added up yet.
        self.noted: deque[tuple[float, float, bool]] = deque()
        self.hits = self.memory_hits = self.misses = 0
        self.compiles = self.uncacheable = self.puts = 0
        self.evictions = self.bytes_evicted = 0
        self.stale = self.corrupt = self.rejected = self.errors = 0
        self.compile_seconds = self.saved_seconds = self.hit_seconds = 0.0
        self.coalesced = self.wait_timeouts = self.unlocked = self.proofs = 0
        self.layer_hits = self.remote_hits = self.remote_misses = 0
        self.remote_errors = self.remote_puts = 0

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the field called `name`."""
        with self.lock:
            setattr(self, name, getattr(self, name) + amount)

    def hit(self, saved: float, elapsed: float, from_memory: bool) -> None:
        """Count a hit that took `elapsed` seconds and saved `saved`."""
        self.noted.append((saved, elapsed, from_memory))
        if len(self.noted) >= NOTES:
            self.values()

    def values(self) -> tuple[float, ...]:
        """Return the counts in the order of `FIELDS`."""
        with self.lock:
            while self.noted:
                saved, elapsed, from_memory = self.noted.popleft()
                self.hits += 1
                self.memory_hits += from_memory
                self.saved_seconds += saved
                self.hit_seconds += elapsed
            return _values_of(self)

    def snapshot(self) -> Stats:
        """Return the counts as they are now."""
        return _stats(self.values())


class StatsFile:
    """The counts of every process that used a directory, in one file.

    The first `add` opens the file, so a process that reads the cache only once does not open it
    before it ends. If somebody removed or replaced the file, it is opened again. Processes: each
    has its own record. Crash: only the counts since the last `add` are lost; a damaged record
    counts as zeros. Fork: the child takes another record. If the file can't be written, or is not
    one that this class made, `add` raises `BackendError`.
    """

    SLOTS = 128
    _HEADER = b"kcache-stats/1".ljust(64, b"\0")
    _RECORD = 256
    _BODY = struct.Struct(f"<4x{len(FIELDS)}d")
    #: How often a record is read: one that is read while it is written looks damaged.
    _TRIES = 8

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._file: OpenFile | None = None
        self._slot = 0
        self._mutex = threading.Lock()
        after_fork(self)

    def add(self, amounts: Iterable[float]) -> None:
        """Add counts, in the order of `FIELDS`, to this process's record."""
        with self._translated(), self._mutex:
            file = self._open()
            values = self._read(file, self._slot)
            sums = [a + b for a, b in zip(values, amounts, strict=True)]
            self._write(file, self._slot, sums)

    def total(self) -> Stats:
        """Return the sums over all processes since the last `zero`; zeros if there is no file.

        Raises:
            BackendError: the file is there and can't be read.
        """
        with self._translated():
            try:
                file = open_own(self.path, os.O_RDONLY)
            except FileNotFoundError:
                return Stats()
            baseline = self._read(file, 0)
            sums = self._sums(file)
        return _stats(max(0.0, a - b) for a, b in zip(sums, baseline, strict=True))

    def zero(self) -> None:
        """Count from here on: remember the present sums and subtract them when reading."""
        with self._translated(), self._mutex:
            file = self._open()
            self._write(file, 0, self._sums(file))

    def close(self) -> None:
        """Release the record. Idempotent."""
        with self._mutex:
            self._file = None

    def after_fork(self) -> None:
        """Make the object usable in a child process, even if the parent was adding at the fork."""
        self._mutex = threading.Lock()
        self._file = None

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise BackendError(f"statistics in {self.path}: {error.strerror}") from error

    def _open(self) -> OpenFile:
        """Return the file that the path leads to, with a record of our own."""
        file = self._file
        if file is not None and file.is_open() and file.is_at(self.path):
            return file
        self._file = None
        file = open_or_replace(self.path, os.O_RDWR, self._is_ours)
        locks = RangeLocks(file)
        slots = range(1, self.SLOTS)
        claimed = (n for n in slots if locks.claim(self._offset(n), self._RECORD))
        # All records are taken, or there are no locks here: share a record, and accept that counts
        # may be lost.
        self._slot = next(claimed, 1 + os.getpid() % (self.SLOTS - 1))
        self._file = file
        return file

    def _is_ours(self, file: OpenFile) -> bool:
        return has_header(file, self._HEADER)

    def _offset(self, slot: int) -> int:
        return len(self._HEADER) + slot * self._RECORD

    def _read(self, file: OpenFile, slot: int) -> tuple[float, ...]:
        for _ in range(self._TRIES):
            raw = pread(file.fd, self._RECORD, self._offset(slot))
            if not any(raw):
                break
            if len(raw) == self._RECORD and int.from_bytes(raw[:4], "little") == zlib.crc32(
                raw[4:]
            ):
                values: tuple[float, ...] = self._BODY.unpack_from(raw, 4)
                # A count that no process can have made would spoil every sum.
                return values if all(0 <= n < _MOST for n in values) else (0.0,) * len(FIELDS)
        return (0.0,) * len(FIELDS)

    def _write(self, file: OpenFile, slot: int, values: Iterable[float]) -> None:
        body = self._BODY.pack(*values).ljust(self._RECORD - 4, b"\0")
        pwrite(file.fd, zlib.crc32(body).to_bytes(4, "little") + body, self._offset(slot))

    def _sums(self, file: OpenFile) -> list[float]:
        slots = range(1, 1 + (os.fstat(file.fd).st_size - self._offset(1)) // self._RECORD)
        records = [self._read(file, slot) for slot in slots[: self.SLOTS - 1]]
        return [sum(column) for column in zip((0.0,) * len(FIELDS), *records, strict=True)]


#: The positions of the history's fields in `FIELDS`.
_BY_THE_HOUR = tuple(map(FIELDS.index, COUNTED))


class Flusher:
    """Adds an engine's counts since the last flush to the statistics file.

    It adds them to the history, too. Counts that could not be added there are added with the next
    flush.
    """

    def __init__(self, counters: Counters, file: StatsFile | None) -> None:
        self._counters = counters
        self.file = file
        files = None if file is None else CacheDirectory(os.path.dirname(file.path))
        self._history = None if files is None else History(files.history)
        self._done = self._told = counters.values()
        self._mutex = threading.Lock()

    def flush(self) -> None:
        """Write the counts since the last flush.

        Raises:
            BackendError: the file can't be written.
        """
        if self.file is None:
            return
        with self._mutex:
            now = self._counters.values()
            if now != self._done:
                self.file.add([a - b for a, b in zip(now, self._done, strict=True)])
                self._done = now
            counts = [now[n] - self._told[n] for n in _BY_THE_HOUR]
            if self._history is not None and self._history.add(counts):
                self._told = now

    def after_fork(self) -> None:
        """Drop, in a child, the counts that the parent will write."""
        self._mutex = threading.Lock()
        self._done = self._told = self._counters.values()

    def close(self) -> None:
        """Write the last counts and release the record; later counts get a new record."""
        if self.file is not None:
            try:
                self.flush()
            finally:
                self.file.close()
