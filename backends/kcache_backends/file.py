"""FileBackend: one file for each entry, in 256 shards. The tree is the truth; no index.

Layout of the directory::

    counters                     bytes and entries of each shard (see `_shards`)
    3f/3f0a...e1                 the value under the key 3f0a...e1; its mtime is its last use
    3f/.3f0a...-5f0c1be9.tmp     a value being written; an orphan if its shard isn't locked
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from kcache.backend import NO_ROOM, Backend, EntryInfo, Usage, failure, is_key
from kcache.directory import claim, make_folder
from kcache.errors import BackendError, ConfigError, CorruptEntryError, DiskFullError
from kcache.util.forks import after_fork
from kcache.util.locks import Backoff
from kcache.util.open_file import is_plain, open_own, opened
from kcache_backends._shards import (
    ANY_SIZE,
    PATIENCE,
    SHARDS,
    ShardCount,
    ShardCounters,
    is_directory,
    listing,
    open_counters,
    require_ours,
    require_own_shard,
    require_private,
    size_of,
)
from kcache_backends._survey import SAMPLE, ColdSample, Used, problems, random_entries, recount

#: If this process touched a key less than this many nanoseconds ago, it does not touch it again at
#: once. It notes the use, and writes it after this time, before the next eviction, or at close...
TOUCH_AGAIN = 1_000_000_000
#: ... and keeps at most this many notes.
MAX_NOTED = 4096
#: A value that is larger than both this and the cap is never read.
MOST_ABOVE_CAP = 32 << 20
_CAN_TOUCH_OPEN = os.utime in os.supports_fd
_COUNTERS = "counters"

_names = [f"{shard:02x}" for shard in range(SHARDS)]
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class FileBackend(Backend):
    """Values as files, renamed into place; recency as their mtime.

    Threads: safe to share. Processes: any number; writers of one shard exclude each other with a
    byte-range lock, readers never wait. Crash: a process killed at any instant leaves no torn value
    and no lock; a half-written temporary file is counted until its shard's next writer removes
    it. Power cut: without `durability="full"` the last entries may come back empty or torn, which
    the engine's checksum turns into misses. Fork: it keeps nothing open. A process that is stopped
    in a put or delete delays others that change the same shard, once a minute by `PATIENCE`
    seconds.

    Sizes are lengths of the files. What a file system adds (blocks, directories) is not counted:
    at most 4 KiB per entry and 4 KiB per shard on the usual ones.

    Args:
        directory: created, 0700, if it is not there.
        max_size: the cap. No put has written a larger file: it is removed unread.
        read_only: create and change nothing.
        durability: `"none"`, or `"full"` to fsync each value and its directory before `put`
            returns.
        clock: nanoseconds since the epoch, for recency.

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
        #: No value is larger.
        self._most = ANY_SIZE if max_size is None else max(max_size, MOST_ABOVE_CAP)
        self._root = os.path.abspath(directory)
        self._read_only = read_only
        self._sync = durability == "full"
        self._clock = clock
        self._last_use = 0
        self._touch_due: dict[str, int] = {}
        self._noted: dict[str, int] = {}
        self._write_notes_at = 0
        self._cold: ColdSample | None = None
        #: Threads change shards one after the other: a file system may have no locks.
        self._changing = threading.Lock()
        self._patience = Backoff(PATIENCE)
        self._closed = False
        #: Whether only this user can change the directory, as far as it was checked.
        self._private = False
        if not read_only:
            with suppress(OSError):  # full or read-only now, but that may change
                self._open_counters()
        after_fork(self)

    def after_fork(self) -> None:
        """Start with a free lock in a child process."""
        self._changing = threading.Lock()

    # -- the contract --------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """Return the value under `key`, or None; never partial bytes."""
        return self._load(key, used=False)

    def use(self, key: str) -> bytes | None:
        """Return what `get` returns, and record the use through the open file."""
        return self._load(key, used=True)

    def _load(self, key: str, *, used: bool) -> bytes | None:
        try:
            with opened(f"{self._root}/{key[:2]}/{key}", os.O_RDONLY) as file:
                status = os.fstat(file.fd)
                require_ours(status, key)
                size = status.st_size
                if size > self._most:
                    raise CorruptEntryError(
                        f"the file of {key} has {size} bytes, more than an entry can have"
                    )
                value = os.read(file.fd, size)
                if len(value) != size:
                    raise BackendError(f"read {key}: expected {size} bytes, got {len(value)}")
                if used:
                    now = self._now()
                    if now < self._touch_due.get(key, 0):
                        self._noted[key] = now
                    elif is_plain(status):
                        self._record_use(key, file.fd, now)
                return value
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failure("read", error) from error

    def _record_use(self, key: str, fd: int, now: int) -> None:
        """Set the mtime of an open file. Further uses are only noted for a while."""
        if self._read_only:
            return
        if now >= self._write_notes_at or len(self._touch_due) >= MAX_NOTED:
            self._write_notes()
        # On a read-only file system, the value matters more than its recency.
        with suppress(OSError):
            os.utime(fd if _CAN_TOUCH_OPEN else self._path(key), ns=(now, now))
        self._touch_due[key] = now + TOUCH_AGAIN

    def _write_notes(self) -> None:
        """Write the uses that were noted."""
        noted, self._noted = self._noted, {}
        self._touch_due = {}
        self._write_notes_at = self._last_use + TOUCH_AGAIN
        for key, used in list(noted.items()):  # another thread may still add one
            with suppress(OSError):
                os.utime(self._path(key), ns=(used, used))

    def put(self, key: str, value: bytes) -> int:
        """Store `value` under `key` atomically; return its stored size, `len(value)`."""
        self._noted.pop(key, None)
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
        """Return whether evicting a tenth of the stored bytes, as the engine does, frees `size`."""
        with suppress(BackendError):
            return self.usage().bytes >= 10 * size
        return False

    def delete(self, key: str) -> int:
        """Remove `key`; return the bytes freed, 0 if it was absent."""
        if self._cold is not None:
            self._cold.deleted(key)
        path = self._path(key)
        shard = int(key[:2], 16)
        with self._translated("delete"), self._changing, self._open_counters() as counters:
            count = self._locked(counters, shard)
            size = size_of(path)
            if size is None:
                return 0
            require_own_shard(f"{self._root}/{key[:2]}")
            counters.begin(shard, count)
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._finish(counters, shard, count, -size, -1)
            return size

    def touch(self, key: str) -> None:
        """Record a use of `key` in its file's mtime."""
        if self._read_only:
            return
        now = self._now()
        self._noted.pop(key, None)
        with self._translated("touch"), suppress(FileNotFoundError):
            if is_plain(os.lstat(self._path(key))):
                os.utime(self._path(key), ns=(now, now))

    def usage(self) -> Usage:
        """Return the sums of the counters: one read of 8 KiB; the files if they are read-only."""
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
            for _ in range(3):
                totals = counters.totals()
                if totals is not None:
                    return Usage(*totals)
            counts = [counters.read(n) or self._lock_and_recount(n) for n in range(SHARDS)]
        return Usage(sum(n.bytes for n in counts), sum(n.entries for n in counts))

    def coldest(self) -> Iterator[EntryInfo]:
        """Yield entries, coldest first, from a sample of the fullest shards; see `ColdSample`.

        Exact where the directory holds at most 2,048 entries, or is open for reading only.
        """
        if self._read_only:
            yield from sorted(self.scan(), key=lambda info: info.used_ns)
            return
        self._write_notes()
        if self._cold is None:
            self._cold = ColdSample(self._root, self._open_counters, self._entries_of, self._clock)
        with self._translated("coldest"):
            yield from self._cold.entries()

    def scan(self) -> Iterator[EntryInfo]:
        """Yield every entry, shard by shard."""
        for name in _names:
            with self._translated("scan"):
                found = [
                    EntryInfo(key, status.st_size, status.st_mtime_ns)
                    for key, status in listing(f"{self._root}/{name}")
                    if is_key(key)
                ]
            yield from found

    def check(self, *, repair: bool = False) -> Iterator[str]:
        """Compare the counters with the files; look for orphans and for files of others.

        Open for reading only, it takes no locks: a shard that is being written may look wrong.
        """
        with self._translated("check"):
            if not os.path.isdir(self._root):
                return
            # A copy may be without counters, which the next writer will create.
            recorded: list[ShardCount | None] = [ShardCount(ANY_SIZE, ANY_SIZE, 1)] * SHARDS
            if self._read_only:
                with (
                    suppress(FileNotFoundError),
                    ShardCounters(open_own(f"{self._root}/{_COUNTERS}", os.O_RDONLY)) as counters,
                ):
                    recorded = [counters.read(shard) for shard in range(SHARDS)]
        for shard, count in enumerate(recorded):
            with self._translated("check"):
                found = self._check_shard(shard, count, repair=repair)
            yield from found

    def _check_shard(self, shard: int, recorded: ShardCount | None, *, repair: bool) -> list[str]:
        """Lock a shard, unless open for reading only; return what is wrong with it."""
        folder = f"{self._root}/{_names[shard]}"
        if self._read_only:
            return list(problems(folder, recorded))
        with self._changing, self._open_counters() as counters:
            found = list(problems(folder, self._lock(counters, shard), repair=repair))
            if repair:
                self._recount(counters, shard)
        return found

    def close(self) -> None:
        """Write the uses that were noted. Idempotent."""
        self._write_notes()
        self._closed = True

    # -- writing -------------------------------------------------------------------------------

    def _put(self, key: str, value: bytes) -> None:
        shard = int(key[:2], 16)
        with self._changing, self._open_counters() as counters:
            self._replace(key, value, counters, self._locked(counters, shard))
            removed = counters.removed()
        if removed:  # another writer has created the directory again
            self._lock_and_recount(shard)

    def _replace(self, key: str, value: bytes, counters: ShardCounters, count: ShardCount) -> None:
        """Write a value, then the new totals of its shard."""
        path = self._path(key)
        folder = f"{self._root}/{key[:2]}"
        shard = int(key[:2], 16)
        # Process ids repeat in containers, and so would names that are made of them.
        temporary = f"{folder}/.{key[:16]}-{os.urandom(8).hex()}.tmp"
        try:
            require_own_shard(folder, make=True)
            replaced = size_of(path)
            counters.begin(shard, count, size=len(value), entries=1)
            with opened(temporary, _CREATE) as file:
                self._fill(file.fd, value)
            os.replace(temporary, path)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(temporary)
            # After any other exception (Ctrl-C) the value may be in place, so the next writer
            # counts again.
            if isinstance(error, OSError):
                with suppress(OSError):
                    counters.finish(shard, count)
            raise
        self._finish(counters, shard, count, len(value) - (replaced or 0), replaced is None)
        if self._sync:
            _sync_directory(folder)

    def _finish(
        self, counters: ShardCounters, shard: int, count: ShardCount, size: int, entries: int
    ) -> None:
        """Write what a shard holds now; count it if its record can't have been right."""
        if count.bytes + size < 0 or count.entries + entries < 0:
            self._recount(counters, shard)
        else:
            counters.finish(shard, count, size=size, entries=entries)

    def _fill(self, fd: int, value: bytes) -> None:
        rest = memoryview(value)
        while rest:
            rest = rest[os.write(fd, rest) :]
        if self._sync:
            os.fsync(fd)
        now = self._now()
        if _CAN_TOUCH_OPEN:
            os.utime(fd, ns=(now, now))

    def _locked(self, counters: ShardCounters, shard: int) -> ShardCount:
        """Lock a shard; return its exact or overestimated count. The caller holds `_changing`."""
        count = self._lock(counters, shard)
        if count is None or (count.under_way and counters.locks_work):  # a writer was killed
            count, _ = self._recount(counters, shard)
        return count

    def _lock(self, counters: ShardCounters, shard: int) -> ShardCount | None:
        """Lock a shard; return its record, or None if it is damaged.

        Raises:
            NotOursError: the counters, and so the directory, belong to another program.
        """
        counters.lock(shard, self._patience)
        count = counters.read(shard)
        if count is None and not counters.is_known():
            self._claim()
        return count

    def _lock_and_recount(self, shard: int) -> ShardCount:
        """Lock a shard, count it, and write its record."""
        with self._changing, self._open_counters() as counters:
            self._lock(counters, shard)
            return self._recount(counters, shard)[0]

    def _recount(self, counters: ShardCounters, shard: int) -> tuple[ShardCount, list[Used]]:
        """List a locked shard: correct its record and return it with (mtime, key) of each entry."""
        return recount(f"{self._root}/{_names[shard]}", shard, counters, most=self._most)

    # -- for `coldest` -------------------------------------------------------------------------

    def _entries_of(self, shard: int) -> list[Used]:
        """Return (mtime, key) of the entries of a shard, and correct its record on the way.

        At most `SAMPLE` entries of a shard are examined; it has more beyond half a million in all.
        A shard whose holder was stopped has none.
        """
        with self._changing, self._open_counters() as counters:
            count = counters.read(shard)
            if count is not None and count.entries > SAMPLE:
                return random_entries(f"{self._root}/{_names[shard]}", SAMPLE)
            with suppress(TimeoutError):
                self._lock(counters, shard)
                return self._recount(counters, shard)[1]
        return []

    # -- opening -------------------------------------------------------------------------------

    def _open_counters(self) -> ShardCounters:
        """Open the counters for one operation; make them, with the directory, if need be."""
        if self._closed or self._read_only:
            how = "closed" if self._closed else "read-only"
            raise BackendError(f"{self._root} is {how}")
        if not self._private:
            self._make_root()
        return open_counters(
            f"{self._root}/{_COUNTERS}",
            self._claim,
            lambda shard: is_directory(f"{self._root}/{_names[shard]}"),
        )

    def _make_root(self) -> None:
        make_folder(self._root)
        require_private(self._root)
        self._private = True

    def _claim(self) -> None:
        self._make_root()
        claim(self._root)

    # -- small things --------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self._root}/{key[:2]}/{key}"

    def _now(self) -> int:
        """Return the time, later than any that this object has returned before."""
        self._last_use = now = max(self._clock(), self._last_use + 1)
        return now

    @contextmanager
    def _translated(self, operation: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise failure(operation, error) from error


def _sync_directory(path: str) -> None:
    """Make the names in a directory durable, where the system can."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some systems can't sync a directory
            raise
    finally:
        os.close(fd)
