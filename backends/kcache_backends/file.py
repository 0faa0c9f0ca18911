"""FileBackend: stores each entry in its own file, in 256 shards (directories), without an index.

Layout of the directory::

    counters                     bytes and entries of each shard (see `_shards`)
    3f/3f0a...e1                 the value under the key 3f0a...e1; its mtime is its last use
    3f/.3f0a...-5f0c1be9.tmp     a value that is being written, while its shard is locked
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal

from kcache.backend import NO_ROOM, Backend, EntryInfo, Usage, failure, increasing
from kcache.directory import claim
from kcache.errors import BackendError, ConfigError, CorruptEntryError, DiskFullError
from kcache.util.forks import after_fork
from kcache.util.locks import Backoff
from kcache.util.open_file import SAFE, is_plain, open_own, opened
from kcache.util.path_safety import foreign
from kcache_backends._shards import (
    ANY_SIZE,
    PATIENCE,
    SHARDS,
    ShardCount,
    ShardCounters,
    open_counters,
    require_own_shard,
    size_of,
)
from kcache_backends._survey import coldest, listed, problems, recount

#: A value that is larger than both the cap and this many bytes is never read.
MOST_ABOVE_CAP = 32 << 20
_COUNTERS = "counters"

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class FileBackend(Backend):
    """Stores each value in a file. The file's mtime is the time of the last use.

    Threads: several threads may use one object. Processes: any number of processes may use the
    directory. Writers of the same shard exclude each other with a byte-range lock. Readers never
    wait. Crash: a process killed at any instant leaves no torn value and no lock. A temporary file
    that it leaves is counted until the next writer of the same shard removes the file. Power cut:
    without `durability="full"`, the last values may be empty or torn afterwards, which the engine's
    checksum turns into misses. Fork: a child may use the object, which keeps no file open.

    If a process is stopped (suspended) in the middle of a put or delete, another process that
    changes the same shard waits for `PATIENCE` seconds, and its change fails. For one minute, its
    further changes of this shard fail at once; then it waits again.

    The size of an entry is the length of its file. What a file system adds (blocks, directories) is
    not counted: at most 4 KiB per entry and 4 KiB per shard on common file systems.

    Args:
        directory: if it does not exist, the first change creates it with mode 0700.
        max_size: the cap in bytes. A file that is larger than both the cap and 32 MiB is never
            read, and is removed when its shard is next counted.
        read_only: create and change nothing.
        durability: `"none"`, or `"full"` to fsync each value and its directory before `put`
            returns.
        clock: returns the time of a use, in nanoseconds since the epoch.

    Raises:
        ConfigError: `durability` has another value.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_size: int | None = None,
        read_only: bool = False,
        durability: Literal["none", "full"] = "none",
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        if durability not in ("none", "full"):
            raise ConfigError(f"durability: expected 'none' or 'full', got {durability!r}")
        #: A larger file is never read.
        self._most = ANY_SIZE if max_size is None else max(max_size, MOST_ABOVE_CAP)
        self._root = os.path.abspath(directory)
        self._read_only = read_only
        self._sync = durability == "full"
        self._now = increasing(clock)
        #: Held while a shard is changed. It excludes other threads even on a file system without
        #: locks.
        self._changing = threading.Lock()
        self._patience = Backoff(PATIENCE)
        self._closed = False
        #: Whether `claim` has found that the directory is kcache's, or has created the directory.
        self._claimed = False
        after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock in a child process: another thread of the parent may have held it."""
        self._changing = threading.Lock()

    # -- the contract --------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """Return the value under `key`, or None; never partial bytes."""
        return self._load(key, used=False)

    def use(self, key: str) -> bytes | None:
        """Return what `get` returns, and record the use."""
        return self._load(key, used=True)

    def _load(self, key: str, *, used: bool) -> bytes | None:
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | SAFE)
            try:
                status = os.fstat(fd)
                size = status.st_size
                if problem := foreign(status):
                    raise CorruptEntryError(f"{key} can't be trusted: {problem}")
                if size > self._most:
                    raise CorruptEntryError(
                        f"the file of {key} has {size} bytes, but an entry has at most {self._most}"
                    )
                value = os.read(fd, size)
            finally:
                os.close(fd)
            if len(value) != size:
                raise BackendError(f"read {key}: expected {size} bytes, got {len(value)}")
            if used and not self._read_only and is_plain(status):
                with suppress(OSError):  # the value matters more than its recency
                    self._set_time(path)
            return value
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failure("read", error) from error

    def put(self, key: str, value: bytes) -> int:
        """Store `value` under `key` atomically; return its stored size, `len(value)`."""
        with self._translated("write"):
            try:
                try:
                    self._put(key, value)
                except FileNotFoundError:  # another process has removed the directory
                    self._put(key, value)
            except OSError as error:
                if error.errno in NO_ROOM and self._could_make_room(len(value)):
                    raise DiskFullError(f"write {key}: {error.strerror}") from error
                raise
        return len(value)

    def _could_make_room(self, size: int) -> bool:
        """Return whether eviction of a tenth of the stored bytes would free at least `size` bytes.

        The engine evicts a tenth if the disk is full.
        """
        with suppress(BackendError):
            return self.usage().bytes >= 10 * size
        return False

    def delete(self, key: str) -> int:
        """Remove `key`; return the number of bytes freed, or 0 if `key` was absent."""
        path = self._path(key)
        shard = int(key[:2], 16)
        with self._translated("delete"), self._locked(shard) as counters:
            count = self._exact(counters, shard)
            size = size_of(path)
            if size is None:
                return 0
            require_own_shard(f"{self._root}/{key[:2]}")
            counters.write(shard, count._replace(under_way=1))
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._finish(counters, shard, count, -size, -1)
            return size

    def touch(self, key: str) -> None:
        """Record a use of `key` in its file's mtime."""
        if self._read_only:
            return
        with self._translated("touch"), suppress(FileNotFoundError):
            if is_plain(os.lstat(self._path(key))):
                self._set_time(self._path(key))

    def usage(self) -> Usage:
        """Return the sums of the counters, by one read of 8 KiB.

        If the backend or the file system is read-only, the files are counted instead.
        """
        with self._translated("usage"):
            try:
                if not self._read_only:
                    return self._counted()
            except OSError as error:
                if error.errno not in {errno.EROFS, errno.EACCES}:
                    raise
            sizes = [info.size for info in self.scan()]
            return Usage(sum(sizes), len(sizes))

    def _counted(self) -> Usage:
        with self._open_counters() as counters:
            if (totals := counters.totals()) is not None:
                return Usage(*totals)
            counts = [counters.read(n) or self._lock_and_recount(n) for n in range(SHARDS)]
        return Usage(sum(n.bytes for n in counts), sum(n.entries for n in counts))

    def coldest(self) -> Iterator[EntryInfo]:
        """Yield entries, coldest first, from the fullest shards; see `_survey.coldest`.

        The order is exact if there are at most 2,048 entries, or if the backend is read-only.
        """
        if self._read_only:
            yield from sorted(self.scan(), key=lambda info: info.used_ns)
            return
        with self._translated("coldest"):
            yield from coldest(self._counts, self._entries_of, self._now)

    def scan(self) -> Iterator[EntryInfo]:
        """Yield every entry, shard by shard."""
        for shard in range(SHARDS):
            with self._translated("scan"):
                entries, _ = listed(self._folder(shard))
            yield from entries

    def check(self, *, repair: bool = False) -> Iterator[str]:
        """Yield a sentence for each fault: a wrong counter, or files that are not entries.

        A read-only backend locks nothing, so a sentence about a shard that is being written may be
        wrong.
        """
        if os.path.isdir(self._root):
            for shard in range(SHARDS):
                with self._translated("check"):
                    found = self._problems(shard, repair=repair)
                yield from found

    def _problems(self, shard: int, *, repair: bool) -> list[str]:
        """Lock a shard, unless the backend is read-only; return what is wrong with the shard."""
        folder = self._folder(shard)
        if self._read_only:
            # A copy may have no counters. The next writer will create them.
            count: ShardCount | None = ShardCount(ANY_SIZE, ANY_SIZE, 1)
            with (
                suppress(FileNotFoundError),
                open_own(f"{self._root}/{_COUNTERS}", os.O_RDONLY) as file,
            ):
                count = ShardCounters(file).read(shard)
            return list(problems(folder, count))
        with self._locked(shard) as counters:
            found = list(problems(folder, counters.read(shard), repair=repair))
            if repair:
                self._recount(counters, shard)
        return found

    def close(self) -> None:
        """Make all further changes raise `BackendError`. Idempotent."""
        self._closed = True

    # -- writing -------------------------------------------------------------------------------

    def _put(self, key: str, value: bytes) -> None:
        shard = int(key[:2], 16)
        with self._locked(shard) as counters:
            self._replace(key, value, counters, self._exact(counters, shard))
            removed = counters.removed()
        if removed:  # another writer has created the directory again
            self._lock_and_recount(shard)

    def _replace(self, key: str, value: bytes, counters: ShardCounters, count: ShardCount) -> None:
        """Write a value. Raise the record of its shard before, and correct the record afterwards.

        So the record is never too low if this process is killed.
        """
        path = self._path(key)
        folder = f"{self._root}/{key[:2]}"
        shard = int(key[:2], 16)
        # The name is random. Process ids are not unique if several containers share the directory.
        temporary = f"{folder}/.{key[:16]}-{os.urandom(8).hex()}.tmp"
        try:
            require_own_shard(folder)
            replaced = size_of(path)
            counters.write(shard, ShardCount(count.bytes + len(value), count.entries + 1, 1))
            with opened(temporary, _CREATE) as file:
                self._fill(file.fd, value)
            self._set_time(temporary)
            os.replace(temporary, path)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(temporary)
            # After any other exception (Ctrl-C), the value may be in place. Then the record stays
            # marked, so that the next writer counts the shard.
            if isinstance(error, OSError):
                with suppress(OSError):
                    counters.write(shard, count)
            raise
        self._finish(counters, shard, count, len(value) - (replaced or 0), replaced is None)
        if self._sync:
            _sync_directory(folder)

    def _finish(
        self, counters: ShardCounters, shard: int, count: ShardCount, size: int, entries: int
    ) -> None:
        """Write the record of a shard to which `size` bytes and `entries` entries were added.

        If that makes a number negative, the old record `count` was wrong, and the shard is counted.
        """
        if count.bytes + size < 0 or count.entries + entries < 0:
            self._recount(counters, shard)
        else:
            counters.write(shard, ShardCount(count.bytes + size, count.entries + entries))

    def _fill(self, fd: int, value: bytes) -> None:
        rest = memoryview(value)
        while rest:
            rest = rest[os.write(fd, rest) :]
        if self._sync:
            os.fsync(fd)

    @contextmanager
    def _locked(self, shard: int, seconds: float | None = None) -> Generator[ShardCounters]:
        """Open the counters, and hold the lock of a shard, in the block; see `ShardCounters.lock`.

        `seconds` limits the wait for the lock; None stands for `PATIENCE`.
        """
        with self._changing, self._open_counters() as counters:
            counters.lock(shard, self._patience, seconds)
            yield counters

    def _exact(self, counters: ShardCounters, shard: int) -> ShardCount:
        """Return the record of a locked shard; first count the shard if the record may be wrong."""
        count = counters.read(shard)
        if count is None or (count.under_way and counters.locks_work):  # a writer was killed
            count, _ = self._recount(counters, shard)
        return count

    def _lock_and_recount(self, shard: int) -> ShardCount:
        """Lock a shard, count its files, and return its new record."""
        with self._locked(shard) as counters:
            return self._recount(counters, shard)[0]

    def _recount(self, counters: ShardCounters, shard: int) -> tuple[ShardCount, list[EntryInfo]]:
        """Correct the record of a locked shard; return the record and the entries."""
        return recount(self._folder(shard), shard, counters, most=self._most)

    # -- for `coldest` -------------------------------------------------------------------------

    def _counts(self) -> list[ShardCount | None]:
        with self._open_counters() as counters:
            return counters.read_all()

    def _entries_of(
        self, shard: int, count: ShardCount | None, wait: bool
    ) -> list[EntryInfo] | None:
        """Return the entries of a shard. If `count` differs from them, correct the shard's record.

        For the correction, the shard has to be locked. If another process holds the lock, this
        returns None at once. With `wait`, it waits for the lock, and returns an empty list after a
        timeout.
        """
        entries, _ = listed(self._folder(shard))
        if count == (sum(info.size for info in entries), len(entries), 0):
            return entries
        try:
            with self._locked(shard, None if wait else 0.0) as counters:
                return self._recount(counters, shard)[1]
        except TimeoutError:
            return [] if wait else None

    # -- opening -------------------------------------------------------------------------------

    def _open_counters(self) -> ShardCounters:
        """Open the counters for one operation; create counters and directory if necessary."""
        if self._closed or self._read_only:
            how = "closed" if self._closed else "read-only"
            raise BackendError(f"{self._root} is {how}")
        if not self._claimed:
            claim(self._root)
            self._claimed = True
        path = f"{self._root}/{_COUNTERS}"
        return open_counters(path, partial(claim, self._root), self._patience)

    # -- small things --------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self._root}/{key[:2]}/{key}"

    def _folder(self, shard: int) -> str:
        return f"{self._root}/{shard:02x}"

    def _set_time(self, path: str) -> None:
        """Record a use in the mtime of a file."""
        now = self._now()
        os.utime(path, ns=(now, now))

    @contextmanager
    def _translated(self, operation: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise failure(operation, error) from error


def _sync_directory(path: str) -> None:
    """Write the names in a directory to the disk, if the system supports this."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some systems can't sync a directory
            raise
    finally:
        os.close(fd)
