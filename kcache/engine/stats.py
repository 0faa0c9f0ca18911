"""Stats: what a cache has done, counted in memory and summed over processes in one file.

The file (``stats``) is a header of 64 bytes and one record: u32 CRC-32 of the rest, u32 unused,
then one IEEE double per field of `FIELDS`, in 256 bytes. A process locks the record while it adds
its counts.
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
        memory_hits: those of `hits` that the memory tier answered.
        misses: requests that the cache could not answer.
        compiles: compiles that were run to the end and succeeded.
        uncacheable: compiles whose result must not be cached: those with time macros or with
            options that write files, those in this process, and those that can't be recorded.
        puts: entries written.
        evictions: entries evicted to stay under the cap, or by a trim.
        stale: entries found that no longer apply: a header changed since it was last checked in the
            same place, or another format or producer.
        corrupt: entries found damaged.
        rejected: entries not stored because they exceed the cap, or because nothing could be
            evicted.
        errors: backend operations that failed; no request failed because of them.
        bytes_evicted: stored bytes of the evicted entries.
        compile_seconds: seconds spent in compiles that succeeded.
        saved_seconds: seconds of compiling that hits made unnecessary; each kernel counts once in
            each process.
        hit_seconds: seconds spent in hits.
        coalesced: requests that waited for another thread or process that was making the same
            entry, and got that entry; most of them are `hits`, too.
        wait_timeouts: requests whose wait timed out, and that did the work themselves.
        unlocked: requests that could not lock their key between processes, and continued without a
            lock.
        layer_hits: those of `hits` that a layer answered.
        remote_hits: those of `hits` that a remote answered.
        remote_misses: requests for which no remote had the kernel, and all of them answered.
        remote_errors: requests for which no remote had the kernel, and not all of them answered.
        remote_puts: kernels handed to the daemon, to be put to the remotes.
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


#: Where hits come from: the two tiers of the user's own cache, read-only tiers, and remotes.
MEMORY, DISK, LAYER, REMOTE = TIERS = ("memory", "disk", "layer", "remote")
#: How many hits wait to be summed, and how many keys are remembered as seen by this process.
_MAX_WAITING, _MAX_KNOWN = 256, 65_536


class Counters:
    """The counts of one engine.

    Threads: safe to share, also in signal handlers. Fork: see `after_fork`.

    Attributes:
        lock: held for each change.
    """

    __slots__ = ("_flushed", "_flushing", "_hits", "_known", "_totals", "lock")

    def __init__(self) -> None:
        self._totals: dict[str, float] = dict.fromkeys(FIELDS, 0)
        #: Arguments of `hit` that are not summed yet; for `made`, the tier is empty. `append` needs
        #: no lock.
        self._hits: deque[tuple[str, float, float, str]] = deque()
        #: Keys of the entries that this process has made or got from the cache.
        self._known: set[str] = set()
        self._flushed: tuple[float, ...] = (0,) * len(FIELDS)
        self._new_locks()

    def _new_locks(self) -> None:
        # Reentrant, because a signal handler may run while its thread counts.
        self.lock, self._flushing = threading.RLock(), threading.RLock()

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the field called `name`."""
        with self.lock:
            self._totals[name] += amount

    def hit(self, key: str, cost: float, elapsed: float, tier: str) -> None:
        """Count a hit.

        Args:
            key: of the entry.
            cost: seconds that making the entry took.
            elapsed: seconds that the hit took.
            tier: one of `TIERS`.
        """
        self._hits.append((key, cost, elapsed, tier))
        if len(self._hits) > _MAX_WAITING:
            self.values()

    def made(self, key: str) -> None:
        """Record that this process has made an entry, so that its later hits save no time.

        Without a cache, the process would have made the entry once, too.
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
        """Return the counts as they are now."""
        return _stats(self.values())

    def flush(self, file: StatsFile | None, *, timeout: float) -> None:
        """Add the counts since the last flush to a file, if there is one.

        If the file is locked for longer than `timeout` seconds, the counts wait for the next flush.

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
        """Drop the counts that the parent will write; called in the child."""
        self._new_locks()
        self._flushed = self.values()


class StatsFile:
    """The counts of every process that used a directory, in one file.

    Threads and processes: safe to share; the record is locked for each change. Crash: only the
    counts since the last `add` are lost; a damaged record counts as zeros. Fork: no file is kept
    open. If the file can't be opened or written, `add` raises `BackendError`; a file with other
    content is replaced, see `open_file_of_cache`.
    """

    _HEADER = b"kcache-stats/2".ljust(64, b"\0")
    _RECORD = 256
    _BODY = struct.Struct(f"<4x{len(FIELDS)}d")
    #: How often a record is read at most, because it looks damaged while it is being written.
    _TRIES = 8
    #: No count reaches this: a double is an exact integer only below it.
    _MAX = 2.0**53

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)

    def add(self, amounts: Sequence[float], *, timeout: float = 1.0) -> bool:
        """Add counts, in the order of `FIELDS`; return whether the lock was acquired in time.

        Raises:
            BackendError: the file can't be written.
        """
        return self._change(amounts, timeout)

    def zero(self) -> None:
        """Count from zero again.

        Raises:
            BackendError: the file can't be written, or a stopped process holds the lock.
        """
        if not self._change(None, 1.0):
            raise BackendError(f"statistics in {self.path}: another process holds the lock")

    def total(self) -> Stats:
        """Return the sums over all processes since the last `zero`; zeros if there is no file.

        Raises:
            BackendError: the file exists and can't be read.
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
                try:  # without locks on this file system, counts of two processes may be lost
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
                if all(0 <= n < self._MAX for n in values):  # else no process wrote them
                    return values
        return (0.0,) * len(FIELDS)

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise BackendError(f"statistics in {self.path}: {error.strerror}") from error
