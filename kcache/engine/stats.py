"""Stats: what a cache has done, counted in memory and summed over processes in one file.

The file (``stats``) is a header of 64 bytes and `SLOTS` records of 256 bytes. A process adds its
counts to what a record holds, and locks the bytes of this record meanwhile. So no two processes
write the same record at once, and no record is ever removed.
Record: u32 CRC-32 of the rest, u32 unused, then one IEEE double per field of `FIELDS`.
Record 0 is none of these: it holds the sums at the last `zero`, which reading subtracts.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kcache.directory import open_file_of_cache
from kcache.errors import BackendError
from kcache.util.locks import lock, pread, pwrite, release
from kcache.util.open_file import OwnFile, has_header, open_own


class Stats(NamedTuple):
    """A snapshot of what a cache has done.

    Attributes:
        hits: requests answered from the cache, from memory or from the backend.
        memory_hits: those of `hits` that the memory tier answered.
        misses: requests that the cache could not answer.
        compiles: compiles that were run to the end and succeeded.
        uncacheable: compiles whose result must not be cached (time macros, options that write,
            compiles in this process or that can't be recorded).
        puts: entries written.
        evictions: entries evicted to stay under the cap.
        stale: entries found that no longer apply: a header changed since it was last checked in the
            same place, or another format or producer.
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
        layer_hits: those of `hits` that a layer answered.
        remote_hits: those of `hits` that a remote answered.
        remote_misses: requests for which all remotes answered that they have nothing.
        remote_errors: requests that a remote did not answer, and no other one could.
        remote_puts: kernels handed to the service, to be put to the remotes.
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
        return self._asdict() | {name: getattr(self, name) for name in derived}


#: Names of the counted fields, in the order in which the file holds them. Only ever append to it.
FIELDS: tuple[str, ...] = Stats._fields
_REALS = frozenset(("compile_seconds", "saved_seconds", "hit_seconds"))


def _stats(values: Iterable[float]) -> Stats:
    """Return the snapshot that holds `values`, in the order of `FIELDS`."""
    named = zip(FIELDS, values, strict=True)
    return Stats._make(float(value) if name in _REALS else int(value) for name, value in named)


#: A count of a record stays below this: a double counts exactly up to here.
_MOST = 2.0**53

#: How many hits, or other events, are noted before they are added up.
NOTES = 256


class Counters:
    """The counts of one engine, added to from any thread.

    They are noted first, which is one atomic append. They are added up when a reader asks, or after
    `NOTES` of them. Taking a lock for each would be 3 % of a get from disk.
    """

    __slots__ = ("_added", "_adding", "_flushed", "_flushing", "_totals", "lock", "noted")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._adding, self._flushing = threading.Lock(), threading.Lock()
        self._flushed: tuple[float, ...] = (0,) * len(FIELDS)
        self._totals: dict[str, float] = dict.fromkeys(FIELDS, 0)
        #: (saved seconds, hit seconds, from memory) of hits that are not added up yet.
        self.noted: deque[tuple[float, float, bool]] = deque()
        self._added: deque[tuple[str, float]] = deque()

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the field called `name`."""
        self._added.append((name, amount))
        if len(self._added) >= NOTES:
            self.values()

    def hit(self, saved: float, elapsed: float, from_memory: bool) -> None:
        """Count a hit that took `elapsed` seconds and saved `saved`."""
        self.noted.append((saved, elapsed, from_memory))
        if len(self.noted) >= NOTES:
            self.values()

    def values(self) -> tuple[float, ...]:
        """Return the counts in the order of `FIELDS`."""
        with self._adding:
            totals = self._totals
            while self.noted:
                saved, elapsed, from_memory = self.noted.popleft()
                totals["hits"] += 1
                totals["memory_hits"] += from_memory
                totals["saved_seconds"] += saved
                totals["hit_seconds"] += elapsed
            while self._added:
                name, amount = self._added.popleft()
                totals[name] += amount
            return tuple(totals.values())

    def snapshot(self) -> Stats:
        """Return the counts as they are now."""
        return _stats(self.values())

    def flush(self, file: StatsFile | None) -> None:
        """Add the counts since the last flush to a file, if there is one.

        Raises:
            BackendError: the file can't be written.
        """
        if file is None:
            return
        with self._flushing:
            now = self.values()
            if now != self._flushed:
                file.add([a - b for a, b in zip(now, self._flushed, strict=True)])
                self._flushed = now

    def after_fork(self) -> None:
        """Drop, in a child, the counts that the parent will write."""
        self.lock = threading.Lock()
        self._adding, self._flushing = threading.Lock(), threading.Lock()
        self._flushed = self.values()


class StatsFile:
    """The counts of every process that used a directory, in one file.

    Threads and processes: each `add` locks a record of its own. Crash: only the counts since the
    last `add` are lost; a damaged record counts as zeros. It keeps nothing open, so that it needs
    no care with forks. If the file can't be written, or is not one that this class made, `add`
    raises `BackendError`.
    """

    SLOTS = 128
    _HEADER = b"kcache-stats/1".ljust(64, b"\0")
    _RECORD = 256
    _BODY = struct.Struct(f"<4x{len(FIELDS)}d")
    #: How often a record is read: one that is read while it is written looks damaged.
    _TRIES = 8

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)

    def add(self, amounts: Iterable[float]) -> None:
        """Add counts, in the order of `FIELDS`, to a record."""
        with self._translated(), self._open() as file:
            slot = self._locked_slot(file)
            values = self._read(file, slot)
            self._write(file, slot, [a + b for a, b in zip(values, amounts, strict=True)])
            release(file)

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
            with file:
                sums, baseline = self._sums(file), self._read(file, 0)
        return _stats(max(0.0, a - b) for a, b in zip(sums, baseline, strict=True))

    def zero(self) -> None:
        """Count from here on: remember the present sums and subtract them when reading."""
        with self._translated(), self._open() as file:
            self._write(file, 0, self._sums(file))

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise BackendError(f"statistics in {self.path}: {error.strerror}") from error

    def _open(self) -> OwnFile:
        return open_file_of_cache(self.path, os.O_RDWR, lambda file: has_header(file, self._HEADER))

    def _locked_slot(self, file: OwnFile) -> int:
        """Return a record that no other process adds to, until the file is closed."""
        for slot in range(1, self.SLOTS):
            with suppress(TimeoutError):
                if not lock(file, self._offset(slot), self._RECORD):
                    break
                return slot
        # There are no locks here: share a record, and accept that counts may be lost.
        return 1 + os.getpid() % (self.SLOTS - 1)

    def _offset(self, slot: int) -> int:
        return len(self._HEADER) + slot * self._RECORD

    def _read(self, file: OwnFile, slot: int) -> tuple[float, ...]:
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

    def _write(self, file: OwnFile, slot: int, values: Iterable[float]) -> None:
        body = self._BODY.pack(*values).ljust(self._RECORD - 4, b"\0")
        pwrite(file.fd, zlib.crc32(body).to_bytes(4, "little") + body, self._offset(slot))

    def _sums(self, file: OwnFile) -> list[float]:
        slots = range(1, 1 + (os.fstat(file.fd).st_size - self._offset(1)) // self._RECORD)
        records = [self._read(file, slot) for slot in slots[: self.SLOTS - 1]]
        return [sum(column) for column in zip((0.0,) * len(FIELDS), *records, strict=True)]
