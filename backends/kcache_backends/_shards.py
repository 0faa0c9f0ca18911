"""ShardCounters: bytes and entries of each of 256 shards, in one file of 8 KiB.

Record of 32 bytes per shard, little-endian: u64 bytes, u64 entries, u64 generation whose lowest
bit says "an operation is under way", u64 check. The check is an odd linear combination of the
other three plus a constant. So one record verifies itself, and the sums verify all 256 at once.
A process writes a record only while it holds the shard's lock. For a put, it adds to the record and
then changes the tree. For a delete, it changes the tree and then subtracts. So after a kill at any
instant, the record is at or above the truth, and its lowest bit is set. The next process that takes
the lock sees the bit and counts the shard again.

Below the counters are the calls of `os` of the backend, with the errors that are expected.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from stat import S_ISDIR, S_ISREG
from typing import NamedTuple, Self

from kcache.errors import CorruptEntryError
from kcache.util.locks import Backoff, is_locked, lock, pread, pwrite, unlock
from kcache.util.open_file import NotOursError, OwnFile, open_own
from kcache.util.path_safety import foreign, make_directory

SHARDS = 256
#: Larger than the size of any real file or directory.
ANY_SIZE = 1 << 62

#: How long a process waits for a lock, in seconds. A holder keeps it for a few milliseconds.
PATIENCE = 10.0

#: Matches the names of the temporary files that the file backend makes. It may remove these.
is_temporary = partial(re.fullmatch, r"\.[0-9a-f]{16}(-[0-9a-f]+)+\.tmp")

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


def open_counters(
    path: str, make: Callable[[], object], exists: Callable[[int], bool]
) -> ShardCounters:
    """Open the counters' file for reading and writing, or make it.

    A new one has zeros, or records that ask for a recount for shards that are there already.

    Args:
        path: the file.
        make: called before the file is made; raises OSError if the directory is not a cache.
        exists: returns whether a shard has a directory.

    Raises:
        NotOursError: something else than a file of kcache is there.
        TimeoutError: the process that makes the file, or writes to a shard, does not finish.
    """
    try:
        return ShardCounters(open_own(path, os.O_RDWR))
    except FileNotFoundError:
        make()
    file = open_own(path, os.O_RDWR | os.O_CREAT)
    # Who opened it empty may have locked a shard already, and counted it.
    lock(file, 0, _ALL.size, timeout=PATIENCE)
    if os.fstat(file.fd).st_size < _ALL.size:
        zero = ShardCount(0, 0, 0)
        empty = _RECORD.pack(*zero, zero.check())
        records = (bytes(_RECORD.size) if exists(n) else empty for n in range(SHARDS))
        pwrite(file.fd, b"".join(records), 0)
    unlock(file, 0, _ALL.size)
    return ShardCounters(file)


class ShardCounters:
    """The counters of one directory, open for one operation; a `with` statement closes them.

    Threads and processes: `lock` excludes both per shard, until the file is closed. Reading needs
    no lock.

    Attributes:
        file: closed with this object at the latest.
        locks_work: whether the file system has locks that exclude other processes.
    """

    def __init__(self, file: OwnFile) -> None:
        self.file = file
        self.locks_work = True
        self._locked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._locked:  # a forked child may have a copy of the file
                unlock(self.file, 0, _ALL.size)
        finally:
            self.file.close()

    def is_known(self) -> bool:
        """Return whether at least one record is sound, so that kcache wrote the file."""
        raw = pread(self.file.fd, _ALL.size, 0)
        return any(_unpack(raw[at : at + _RECORD.size]) for at in range(0, len(raw), _RECORD.size))

    def removed(self) -> bool:
        """Return whether the open file has lost its name."""
        return os.fstat(self.file.fd).st_nlink == 0

    def lock(self, shard: int, patience: Backoff) -> None:
        """Lock a shard, against threads and processes.

        Raises:
            TimeoutError: its holder neither finishes nor dies: a process that was stopped, say.
        """
        self._locked = True
        self.locks_work = patience.lock(self.file, shard * _RECORD.size, _RECORD.size)

    def is_locked(self, shard: int) -> bool:
        """Return whether a shard is being changed; False where there are no locks."""
        try:
            return is_locked(self.file, shard * _RECORD.size, _RECORD.size)
        except OSError:
            return False

    def read(self, shard: int) -> ShardCount | None:
        """Return one shard's record, or None where it is damaged."""
        return _unpack(pread(self.file.fd, _RECORD.size, shard * _RECORD.size))

    def write(self, shard: int, count: ShardCount) -> None:
        """Write one shard's record; the caller holds its lock."""
        record = _RECORD.pack(count.bytes, count.entries, count.generation, count.check())
        pwrite(self.file.fd, record, shard * _RECORD.size)

    def begin(self, shard: int, count: ShardCount, *, size: int = 0, entries: int = 0) -> None:
        """Write the most that the shard may hold while an operation is under way."""
        at_most = (count.bytes + size, count.entries + entries)
        self.write(shard, ShardCount(*at_most, count.generation | _UNDER_WAY))

    def finish(self, shard: int, count: ShardCount, *, size: int = 0, entries: int = 0) -> None:
        """Write what the shard holds after an operation."""
        held = (count.bytes + size, count.entries + entries)
        self.write(shard, ShardCount(*held, (count.generation | _UNDER_WAY) + 1))

    def totals(self) -> tuple[int, int] | None:
        """Return (bytes, entries) of all shards from one read, or None where a record is damaged.

        A record caught in mid-write looks damaged; callers try again before they recount.
        """
        raw = pread(self.file.fd, _ALL.size, 0)
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


# -- files and directories -------------------------------------------------------------------------


def require_ours(status: os.stat_result, name: str) -> None:
    """Reject a file that another user could have changed.

    Raises:
        CorruptEntryError: it is not.
    """
    if problem := foreign(status):
        raise CorruptEntryError(f"{name} can't be trusted: {problem}")


def size_of(path: str) -> int | None:
    """Return the length of a regular file; None for anything else."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if S_ISREG(status.st_mode) else None


def listing(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, status) of the regular files in a directory; some may vanish in between.

    A symbolic link is not followed: its target is not in the cache.
    """
    for name in names_in(directory):
        with suppress(FileNotFoundError):
            status = os.stat(f"{directory}/{name}", follow_symlinks=False)
            if S_ISREG(status.st_mode):
                yield name, status


def names_in(directory: str) -> list[str]:
    """Return the names in a directory; none if its path is a symbolic link."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(directory) if is_directory(directory) else []
    return []


def is_directory(path: str) -> bool:
    """Return whether a path is a directory, and not a link."""
    try:
        return S_ISDIR(os.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def require_own_shard(directory: str, *, make: bool = False) -> None:
    """Reject a shard that is a link, because a put would write elsewhere. With `make`, make it.

    Raises:
        NotOursError: it is; FileNotFoundError: it is not there, or its parent is not.
    """
    try:
        os.readlink(directory)
    except FileNotFoundError:
        if not make:
            raise
        with suppress(FileExistsError):
            make_directory(directory)
    except OSError:  # it is not a link
        return
    else:
        raise NotOursError("it is a link, and kcache makes none", directory)


def require_private(directory: str) -> None:
    """Reject what is not a directory, or one that other users could change.

    Raises:
        NotOursError: it is not.
    """
    status = os.stat(directory)
    if not S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    if problem := foreign(status):
        raise NotOursError(f"it can't be trusted: {problem}", directory)
