"""ShardCounters: the number of bytes and entries in each of 256 shards, in one file of 8 KiB.

Record of 32 bytes per shard, little-endian: u64 bytes, u64 entries, u64 that is 1 while an
operation is under way, u64 check. The check is a linear combination of the other three, with
odd coefficients, plus a constant. So one record verifies itself, and the sums of the four fields
verify all 256 records at once.

A process writes a record only while it holds the shard's lock. For a put, it adds to the record and
then writes the file. For a delete, it marks the record, removes the file and then subtracts. So
after a kill at any instant, the record is at or above the truth, and is marked: an operation is
under way. The next process that acquires the lock therefore counts the shard again.

The functions at the end call `os` for the backend, and handle the errors that are expected.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from stat import S_ISDIR, S_ISREG
from typing import NamedTuple, Self

from kcache.util.locks import Backoff, pread, pwrite, release, unlock
from kcache.util.open_file import NotOursError, OwnFile, open_own
from kcache.util.path_safety import make_directory

SHARDS = 256
#: Larger than the size of any real file or directory.
ANY_SIZE = 1 << 62

#: How long a process waits for a lock, in seconds. A holder keeps it for a few milliseconds.
PATIENCE = 10.0

#: Matches the names of the temporary files that the `file` backend makes, and may remove.
is_temporary = partial(re.fullmatch, r"\.[0-9a-f]{16}(-[0-9a-f]+)+\.tmp")

_RECORD = struct.Struct("<4Q")
_ALL = struct.Struct(f"<{4 * SHARDS}Q")
_MASK = (1 << 64) - 1
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_SALT = 0x6B63616368652F31


class ShardCount(NamedTuple):
    """How many bytes and entries one shard holds.

    `under_way` is 1 if the last writer has not finished: it is still at work, or was killed.
    """

    bytes: int
    entries: int
    under_way: int = 0


def _pack(count: ShardCount) -> bytes:
    return _RECORD.pack(*count, _check(*count))


def _check(size: int, entries: int, under_way: int, records: int = 1) -> int:
    """Return the check of a record, modulo 2**64.

    If the arguments are sums over several records, the result is the sum of the records' checks.
    """
    return (size * _ODD[0] + entries * _ODD[1] + under_way * _ODD[2] + records * _SALT) & _MASK


def _unpack(raw: bytes) -> ShardCount | None:
    if len(raw) < _RECORD.size:
        return None
    *values, check = _RECORD.unpack(raw)
    return ShardCount(*values) if _check(*values) == check else None


def open_counters(path: str, make: Callable[[], object], patience: Backoff) -> ShardCounters:
    """Open the file of the counters for reading and writing; create it if it does not exist.

    If shards exist already when the file is created, their records are invalid at first, so that
    these shards are counted. All other records are zero.

    Args:
        path: the path of the file.
        make: called before the file is created; raises OSError if the directory is not a cache.
        patience: waits for another process that creates the file.

    Raises:
        NotOursError: the file at the path was not made by kcache.
        TimeoutError: another process creates the file, and did not finish in time.
    """
    try:
        file = open_own(path, os.O_RDWR)
    except FileNotFoundError:
        make()
        file = open_own(path, os.O_RDWR | os.O_CREAT)
    if file.status.st_size < _ALL.size:  # no process has locked a shard yet
        patience.lock(file, 0, _ALL.size)
        if os.fstat(file.fd).st_size < _ALL.size:
            found, empty = {*os.listdir(os.path.dirname(path))}, _pack(ShardCount(0, 0))
            records = (bytes(len(empty)) if f"{n:02x}" in found else empty for n in range(SHARDS))
            pwrite(file.fd, b"".join(records), 0)
        unlock(file, 0, _ALL.size)
    return ShardCounters(file)


class ShardCounters:
    """The counters of one directory, open for one operation; a `with` statement closes them.

    Threads and processes: after `lock`, no other thread or process can lock the same shard until
    the file is closed. Reading needs no lock.

    Attributes:
        file: the open file, which is closed at the end of the `with` block.
        locks_work: whether the file system has locks that exclude other processes.
    """

    def __init__(self, file: OwnFile) -> None:
        self.file = file
        self.locks_work = True
        self._locked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._locked:
            release(self.file)
        self.file.close()

    def removed(self) -> bool:
        """Return whether the file of the counters was deleted after it was opened."""
        return os.fstat(self.file.fd).st_nlink == 0

    def lock(self, shard: int, patience: Backoff, seconds: float | None = None) -> None:
        """Lock a shard against other threads and processes; see `Backoff.lock`.

        Raises:
            TimeoutError: the lock was not released in time; its holder may be a stopped process.
        """
        self._locked = True
        start, length = shard * _RECORD.size, _RECORD.size
        self.locks_work = patience.lock(self.file, start, length, seconds=seconds)

    def read(self, shard: int) -> ShardCount | None:
        """Return the record of one shard, or None if the record is damaged."""
        return _unpack(pread(self.file.fd, _RECORD.size, shard * _RECORD.size))

    def read_all(self) -> list[ShardCount | None]:
        """Return the records of all shards, with None in place of each damaged record."""
        raw = pread(self.file.fd, _ALL.size, 0)
        return [_unpack(raw[at : at + _RECORD.size]) for at in range(0, _ALL.size, _RECORD.size)]

    def write(self, shard: int, count: ShardCount) -> None:
        """Write the record of one shard, which the caller has locked."""
        pwrite(self.file.fd, _pack(count), shard * _RECORD.size)

    def totals(self) -> tuple[int, int] | None:
        """Return (bytes, entries) of all shards from one read, or None if a record is damaged.

        A record that is being written at the same time may look damaged, too.
        """
        raw = pread(self.file.fd, _ALL.size, 0)
        if len(raw) < _ALL.size:
            return None
        words = _ALL.unpack(raw)
        size, entries, under_way, checks = (sum(words[n::4]) for n in range(4))
        is_sound = _check(size, entries, under_way, SHARDS) == checks & _MASK
        return (size, entries) if is_sound else None


# -- files and directories -------------------------------------------------------------------------


def size_of(path: str) -> int | None:
    """Return the length of the regular file at `path`, or None if there is no regular file."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if S_ISREG(status.st_mode) else None


def is_directory(path: str) -> bool:
    """Return whether a path is a directory, and not a link."""
    try:
        return S_ISDIR(os.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def require_own_shard(directory: str) -> None:
    """Make the directory of a shard unless it exists. A symbolic link to a directory is rejected.

    Raises:
        NotOursError: the path exists, but is not a directory.
        FileNotFoundError: the parent directory does not exist.
    """
    if not is_directory(directory):
        with suppress(FileExistsError):
            make_directory(directory)
        if not is_directory(directory):
            raise NotOursError("it is not a directory that kcache made", directory)
