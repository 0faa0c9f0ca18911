"""Stats: what a cache has done, counted in memory and summed over all processes in one file.

The file ``stats`` has a header of 64 bytes and a record of 256 bytes: the CRC-32 of the rest of the
record (u32), an unused u32, and one IEEE double for each field in `FIELDS`. A process locks the
record while it adds its counts.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from kcache.directory import open_file_of_cache
from kcache.errors import BackendError
from kcache.util.locks import lock, pread, pwrite, release
from kcache.util.open_file import OwnFile, has_header, open_own


class Stats(NamedTuple):
    """A snapshot of what a cache has done.

    Attributes:
        hits: requests answered from the cache: from memory, the backend, a layer or a remote.
        memory_hits: hits that the memory tier answered.
        misses: requests that the cache could not answer.
        compiles: compiles that succeeded.
        uncacheable: compiles whose result must not be cached: those with time macros or with
            options that write files, those that did not run in a worker, and those whose
            dependencies can't be recorded.
        puts: entries stored.
        evictions: entries evicted to stay below the cap, or by a trim.
        stale: lookups that found an entry that no longer applies. Either a header that it depends
            on has changed since a check in the same directory, or the entry was written in another
            format version or by another producer.
        corrupt: lookups that found a damaged entry.
        rejected: entries that were not stored, because they exceed the cap or because nothing could
            be evicted.
        errors: operations of the backend that failed; no request fails because of them.
        bytes_evicted: stored bytes of the evicted entries.
        compile_seconds: seconds spent in compiles that succeeded.
        saved_seconds: seconds of compiling that hits made unnecessary. Each process counts each
            kernel once.
        hit_seconds: seconds spent in hits.
        coalesced: requests that waited while another thread or process was making the same entry,
            and then got that entry. Most of these requests are hits, too.
        wait_timeouts: requests whose wait timed out, so that they made the entry themselves.
        unlocked: requests that could not lock their key, so that several processes may have made
            the same entry.
        layer_hits: hits that a layer answered.
        remote_hits: hits that a remote answered.
        remote_misses: requests for which every remote answered that it does not have the kernel.
        remote_errors: requests for which no remote returned the kernel, and at least one remote did
            not answer.
        remote_puts: kernels that were passed to the daemon, which uploads them to the remotes.
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
        """The number of requests: hits and misses together."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        """The share of requests that were hits, 0.0 to 1.0; 0.0 before the first request."""
        return self.hits / self.requests if self.requests else 0.0

    @property
    def avg_compile_time_ms(self) -> float:
        """The mean time of a compile in milliseconds; 0.0 before the first compile."""
        return 1e3 * self.compile_seconds / self.compiles if self.compiles else 0.0

    @property
    def avg_cache_time_ms(self) -> float:
        """The mean time of a hit in milliseconds; 0.0 before the first hit."""
        return 1e3 * self.hit_seconds / self.hits if self.hits else 0.0

    def to_dict(self) -> dict[str, int | float]:
        """Return all counts, the hit rate and the mean times by name, as values for JSON."""
        derived = ("hit_rate", "avg_compile_time_ms", "avg_cache_time_ms")
        return self._asdict() | {name: getattr(self, name) for name in derived}


#: The names of the counts, in their order in the file. Append new ones at the end only, because
#: older files have the others in this order.
FIELDS: tuple[str, ...] = Stats._fields
_REALS = frozenset(("compile_seconds", "saved_seconds", "hit_seconds"))


def _stats(values: Iterable[float]) -> Stats:
    """Return the snapshot with the counts in `values`, which are in the order of `FIELDS`."""
    named = zip(FIELDS, values, strict=True)
    return Stats._make(float(value) if name in _REALS else int(value) for name, value in named)


#: Where hits come from: the memory and the backend of the user's own cache, layers, and remotes.
MEMORY, DISK, LAYER, REMOTE = TIERS = ("memory", "disk", "layer", "remote")
#: The largest number of hits that are collected before they are summed, and of keys in `_known`.
_MAX_WAITING, _MAX_KNOWN = 256, 65_536


class Counters:
    """The counts of one engine.

    Threads: all methods may be called from several threads at the same time, and from signal
    handlers. Fork: see `after_fork`.

    Attributes:
        lock: the lock that is held during each change of the sums.
    """

    __slots__ = ("_flushed", "_flushing", "_hits", "_known", "_totals", "lock")

    def __init__(self) -> None:
        self._totals: dict[str, float] = dict.fromkeys(FIELDS, 0)
        #: The arguments of those calls of `hit` and `made` that are not summed yet; for `made`, the
        #: tier is empty. Appending to a deque needs no lock.
        self._hits: deque[tuple[str, float, float, str]] = deque()
        #: The keys of the entries that this process has made or got from the cache.
        self._known: set[str] = set()
        self._flushed: tuple[float, ...] = (0,) * len(FIELDS)
        self._new_locks()

    def _new_locks(self) -> None:
        # The locks are reentrant, because a signal handler may run while its thread holds them.
        self.lock, self._flushing = threading.RLock(), threading.RLock()

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the count called `name`."""
        with self.lock:
            self._totals[name] += amount

    def hit(self, key: str, cost: float, elapsed: float, tier: str) -> None:
        """Count a hit.

        Args:
            key: the key of the entry.
            cost: how many seconds it took to make the entry.
            elapsed: how many seconds the hit took.
            tier: the tier that had the entry, one of `TIERS`.
        """
        self._hits.append((key, cost, elapsed, tier))
        if len(self._hits) > _MAX_WAITING:
            self.values()

    def made(self, key: str) -> None:
        """Record that this process has made the entry under `key`.

        Later hits of this process on this entry then do not count as saved time, because the
        process would have made the entry once without a cache, too.
        """
        self._hits.append((key, 0.0, 0.0, ""))

    def values(self) -> tuple[float, ...]:
        """Return the counts in the order of `FIELDS`."""
        totals, hits, known = self._totals, self._hits, self._known
        with self.lock:
            seconds, tiers = 0.0, dict.fromkeys(("", *TIERS), 0)
            while hits:
                key, cost, elapsed, tier = hits.popleft()
                seconds += elapsed
                tiers[tier] += 1
                if key not in known:
                    if len(known) >= _MAX_KNOWN:
                        known.clear()
                    known.add(key)
                    totals["saved_seconds"] += cost
            totals["hit_seconds"] += seconds
            for tier in TIERS:
                totals["hits"] += tiers[tier]
                if tier is not DISK:
                    totals[f"{tier}_hits"] += tiers[tier]
            return tuple(totals.values())

    def snapshot(self) -> Stats:
        """Return the present counts."""
        return _stats(self.values())

    def flush(self, file: StatsFile | None, *, timeout: float) -> None:
        """Add the counts since the last flush to `file`. If `file` is None, do nothing.

        If another process holds the lock of the file for longer than `timeout` seconds, nothing is
        written, and the next flush adds these counts, too.

        Raises:
            BackendError: the file can't be written.
        """
        if file is None:
            return
        with self._flushing:
            now = self.values()
            added = [a - b for a, b in zip(now, self._flushed, strict=True)]
            if any(added) and file.add(added, timeout=timeout):
                self._flushed = now

    def after_fork(self) -> None:
        """Treat the present counts as flushed in the child after a fork; the parent writes them."""
        self._new_locks()
        self._flushed = self.values()


class StatsFile:
    """The file with the sums of the counts of all processes that have used a cache's directory.

    A file with other content is replaced, as `open_file_of_cache` describes. A damaged record is
    read as zeros.

    Threads, processes: all methods may be called from several threads and processes at the same
    time, because the record is locked for each change. Crash: the counts that a killed process has
    not yet added are lost. Fork: a forked child may use the object, because no file is kept open.
    """

    _HEADER = b"kcache-stats/2".ljust(64, b"\0")
    _RECORD = 256
    _BODY = struct.Struct(f"<4x{len(FIELDS)}d")
    #: How often a record that looks damaged is read before its counts are taken as zeros. A record
    #: also looks damaged while another process is writing it.
    _TRIES = 8
    #: Every count is below this limit. A double can represent each integer up to it.
    _MAX = 2.0**53

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)

    def add(self, amounts: Sequence[float], *, timeout: float = 1.0) -> bool:
        """Add `amounts`, which are in the order of `FIELDS`, to the sums in the file.

        Return whether this succeeded. If another process holds the lock for longer than `timeout`
        seconds, nothing is added, and the result is False.

        Raises:
            BackendError: the file can't be opened or written.
        """
        return self._change(amounts, timeout)

    def zero(self) -> None:
        """Set all sums in the file to zero.

        Raises:
            BackendError: the file can't be written, or another process holds its lock for longer
                than a second.
        """
        if not self._change(None, 1.0):
            raise BackendError(f"statistics in {self.path}: another process holds the file's lock")

    def total(self) -> Stats:
        """Return the sums of the counts of all processes since the last `zero`.

        If there is no file, all sums are zero.

        Raises:
            BackendError: the file exists but can't be read.
        """
        with self._translated():
            try:
                with open_own(self.path, os.O_RDONLY) as file:
                    return _stats(self._read(file))
            except FileNotFoundError:
                return Stats()

    def _change(self, amounts: Sequence[float] | None, timeout: float) -> bool:
        with self._translated():
            is_sound = partial(has_header, header=self._HEADER)
            with open_file_of_cache(self.path, os.O_RDWR, is_sound) as file:
                try:  # if this file system has no locks, counts of a concurrent process may be lost
                    lock(file, len(self._HEADER), self._RECORD, timeout=timeout)
                except TimeoutError:
                    return False
                values = [0.0] * len(FIELDS)
                if amounts is not None:
                    values = [a + b for a, b in zip(self._read(file), amounts, strict=True)]
                body = self._BODY.pack(*values).ljust(self._RECORD - 4, b"\0")
                image = zlib.crc32(body).to_bytes(4, "little") + body
                pwrite(file.fd, image, len(self._HEADER))
                release(file)
                return True

    def _read(self, file: OwnFile) -> tuple[float, ...]:
        for _ in range(self._TRIES):
            raw = pread(file.fd, self._RECORD, len(self._HEADER))
            if len(raw) == self._RECORD and int.from_bytes(raw[:4], "little") == zlib.crc32(
                raw[4:]
            ):
                values: tuple[float, ...] = self._BODY.unpack_from(raw, 4)
                if all(0 <= n < self._MAX for n in values):  # kcache writes no other values
                    return values
        return (0.0,) * len(FIELDS)

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise BackendError(f"statistics in {self.path}: {error.strerror}") from error
