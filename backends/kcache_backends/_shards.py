"""ShardCounters: bytes and entries of each of 256 shards, in one file of 8 KiB.

Record of 32 bytes per shard, little-endian: u64 bytes, u64 entries, u64 generation whose lowest
bit says "an operation is under way", u64 check. The check is an odd linear combination of the
other three plus a constant. So one record verifies itself, and the sums verify all 256 at once.
A process writes a record only while it holds the shard's lock. For a put, it adds to the record and
then changes the tree. For a delete, it changes the tree and then subtracts. So after a kill at any
instant, the record is at or above the truth, and its lowest bit is set. The next process that takes
the lock sees the bit and counts the shard again.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

from kcache.util.locks import RangeLocks, pread, pwrite
from kcache.util.open_file import open_own

__all__ = ["SHARDS", "ShardCount", "ShardCounters", "read_counts"]

SHARDS = 256

#: How long a process waits for a lock, in seconds. A holder keeps it for a few milliseconds.
PATIENCE = 10.0

_RECORD = struct.Struct("<4Q")
_ALL = struct.Struct(f"<{4 * SHARDS}Q")
_MASK = (1 << 64) - 1
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_SALT = 0x6B63616368652F31
_UNDER_WAY = 1


class ShardCount(NamedTuple):
    """What one shard holds: bytes, entries, and how often its record was written."""

    bytes: int
    entries: int
    generation: int

    @property
    def under_way(self) -> bool:
        """Whether the last writer has not finished: it works, or it was killed."""
        return bool(self.generation & _UNDER_WAY)

    def check(self) -> int:
        """Return the fourth field of the record."""
        return _check(*self)


def _check(size: int, entries: int, generation: int) -> int:
    return (size * _ODD[0] + entries * _ODD[1] + generation * _ODD[2] + _SALT) & _MASK


def _unpack(raw: bytes) -> ShardCount | None:
    if len(raw) < _RECORD.size:
        return None
    *values, check = _RECORD.unpack(raw)
    count = ShardCount(*values)
    return count if count.check() == check else None


def _is_known(raw: bytes) -> bool:
    """Tell whether one record at least is sound, so that the file is one of ours."""
    return any(_unpack(raw[at : at + _RECORD.size]) for at in range(0, len(raw), _RECORD.size))


def _claim_nothing() -> None:
    """Do nothing: the caller knows that the directory is ours."""


def read_counts(path: str) -> list[ShardCount | None]:
    """Return every shard's record, None where it is damaged, without opening them for writing.

    Raises:
        OSError: the file can't be read.
    """
    file = open_own(path, os.O_RDONLY)
    raw = pread(file.fd, _ALL.size, 0)
    return [_unpack(raw[n * _RECORD.size :][: _RECORD.size]) for n in range(SHARDS)]


class ShardCounters:
    """The counters file of one directory, opened for reading and writing.

    Args:
        path: the file; created with zeros, or with records that ask for a recount for shards that
            `exists` says are there already.
        exists: tells whether a shard has a directory.
        claim: called before anything is written unless the file is one of ours already; raises
            OSError if the directory is somebody else's.

    Threads and processes: `changing` excludes both per shard. Reading needs no lock. The file is
    closed with the last reference to this object, so that a thread that works with it keeps it
    open. Fork: the child closes the file, and makes a new object.

    Raises:
        NotOursError: something else than a file of kcache is there.
    """

    def __init__(
        self, path: str, exists: Callable[[int], bool], claim: Callable[[], None] | None = None
    ) -> None:
        self.path = path
        claim = claim or _claim_nothing
        try:
            self._file = open_own(path, os.O_RDWR)
        except FileNotFoundError:
            claim()
            self._file = open_own(path, os.O_RDWR | os.O_CREAT)
        self._locks = RangeLocks(self._file)
        #: Whether the program has closed the descriptor.
        self.gone = False
        raw = pread(self._file.fd, _ALL.size, 0)
        if not _is_known(raw):
            claim()
        if len(raw) < _ALL.size:
            self._initialise(exists)

    def _initialise(self, exists: Callable[[int], bool]) -> None:
        zero = ShardCount(0, 0, 0)
        empty = _RECORD.pack(*zero, zero.check())
        with self._locks.held(_ALL.size, 1, timeout=PATIENCE):
            if os.fstat(self._file.fd).st_size < _ALL.size:
                records = (bytes(_RECORD.size) if exists(n) else empty for n in range(SHARDS))
                pwrite(self._file.fd, b"".join(records), 0)

    @property
    def locks_work(self) -> bool:
        """Whether the file system has locks that exclude other processes."""
        return self._locks.supported

    def lost(self) -> bool:
        """Tell whether the path leads elsewhere: the file was removed, moved or replaced."""
        return self.gone or not self._file.is_at(self.path)

    def removed(self) -> bool:
        """Tell whether somebody removed the file, as far as the file itself tells."""
        return os.fstat(self._file.fd).st_nlink == 0

    @contextmanager
    def changing(self, shard: int) -> Generator[None]:
        """Hold the shard's lock, against threads and processes, while the block runs.

        Raises:
            TimeoutError: its holder neither finishes nor dies: a process that was stopped, say.
            OSError: the program has closed the descriptor. Its number may lead to another file by
                now, such as the counters of another cache, which look as sound as ours.
        """
        with self._locks.held(shard * _RECORD.size, _RECORD.size, timeout=PATIENCE):
            self._require_open()
            yield

    def read(self, shard: int) -> ShardCount | None:
        """Return one shard's record, or None where it is damaged.

        Raises:
            OSError: the program has closed the descriptor, and perhaps opened another file with it.
        """
        count = _unpack(pread(self._file.fd, _RECORD.size, shard * _RECORD.size))
        if (
            count is None
        ):  # a sound record proves that this is the right file; kcache reads one before it writes
            self._require_open()
        return count

    def _require_open(self) -> None:
        if not self._file.is_open():
            self.gone = True
            raise OSError(errno.EBADF, "the program has closed the file", self.path)

    def write(self, shard: int, count: ShardCount) -> None:
        """Write one shard's record; the caller holds its lock."""
        record = _RECORD.pack(count.bytes, count.entries, count.generation, count.check())
        pwrite(self._file.fd, record, shard * _RECORD.size)

    def begin(self, shard: int, count: ShardCount, *, size: int = 0, entries: int = 0) -> None:
        """Write the most that the shard may hold while an operation is under way."""
        at_most = (count.bytes + size, count.entries + entries)
        self.write(shard, ShardCount(*at_most, count.generation | _UNDER_WAY))

    def finish(self, shard: int, count: ShardCount, *, size: int = 0, entries: int = 0) -> None:
        """Write what the shard holds after an operation."""
        held = (max(0, count.bytes + size), max(0, count.entries + entries))
        self.write(shard, ShardCount(*held, (count.generation | _UNDER_WAY) + 1))

    def totals(self) -> tuple[int, int] | None:
        """Return (bytes, entries) of all shards from one read, or None where a record is damaged.

        A record caught in mid-write looks damaged; callers try again before they recount.
        """
        try:
            raw = pread(self._file.fd, _ALL.size, 0)
        except OSError:
            self._require_open()
            raise
        if len(raw) < _ALL.size:
            return None
        words = _ALL.unpack(raw)
        size, entries, generations, checks = (sum(words[n::4]) for n in range(4))
        expected = size * _ODD[0] + entries * _ODD[1] + generations * _ODD[2] + SHARDS * _SALT
        return (size, entries) if (checks - expected) & _MASK == 0 else None

    def fullest(self) -> list[tuple[int, int]]:
        """Return (entries, shard), most entries first; damaged records come first of all."""
        counts = ((self.read(shard), shard) for shard in range(SHARDS))
        return sorted(
            ((_MASK if count is None else count.entries, shard) for count, shard in counts),
            reverse=True,
        )
