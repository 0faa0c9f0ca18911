"""FileBackend: one file for each entry, in 256 shards. The tree is the truth; no index.

Layout of the directory::

    counters                     bytes and entries of each shard (see `_shards`)
    3f/3f0a...e1                 the value under the key 3f0a...e1; its mtime is its last use
    3f/.3f0a...-4711-9c-1.tmp    a value being written; an orphan if its shard isn't locked
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal

from kcache.backend import Backend, EntryInfo, Usage, is_key
from kcache.errors import BackendError, ConfigError, FullError
from kcache.util.forks import after_fork
from kcache.util.marker import claim
from kcache.util.safe_path import make_private
from kcache_backends._coldest import SAMPLE, ColdSample, Used
from kcache_backends._examine import examine, glance, require_credible, sum_of_shards
from kcache_backends._file_check import ANY_SIZE, alone_with, check_shard, recorded_in
from kcache_backends._files import (
    CREATE,
    READ,
    failure,
    is_no_room,
    is_ours_alone,
    listing,
    make_shard,
    read_on,
    rename,
    require_ours,
    require_own_shard,
    require_private,
    size_of,
)
from kcache_backends._files import sync_directory as sync
from kcache_backends._shards import SHARDS, ShardCount, ShardCounters

__all__ = ["FileBackend"]

#: If this process touched a key less than this many nanoseconds ago, it does not touch it again at
#: once. It notes the use, and writes it after this time, before the next eviction, or at close...
TOUCH_AGAIN = 1_000_000_000
#: ... and keeps at most this many notes.
MAX_NOTED = 4096
#: A value of up to this many bytes is read without a check that its size is credible...
UNCHECKED = 1 << 20
#: ... and a value that is larger than both this and the cap is never read.
MOST_ABOVE_CAP = 32 << 20
_CAN_TOUCH_OPEN = os.utime in os.supports_fd
_COUNTERS = "counters"

_names = [f"{shard:02x}" for shard in range(SHARDS)]
_serial = itertools.count()
#: Process ids repeat in containers, and so would the names of temporary files.
_process = os.urandom(4).hex()


class FileBackend(Backend):
    """Values as files, renamed into place; recency as their mtime.

    Threads: safe to share. Processes: any number; writers of one shard exclude each other with a
    byte-range lock, readers never wait. Crash: a process killed at any instant leaves no torn value
    and no lock; a half-written temporary file is counted until its shard's next writer removes
    it. Power cut: without `durability="full"` the last entries may come back empty or torn, which
    the engine's checksum turns into misses. Fork: the child reopens the counters.

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
            raise ConfigError(f"durability={durability!r} is not allowed; allowed: 'none', 'full'")
        #: No value is larger. One larger than `_unchecked` is checked before it is read.
        self._most = ANY_SIZE if max_size is None else max(max_size, MOST_ABOVE_CAP)
        self._unchecked = min(UNCHECKED, self._most if max_size is None else max_size)
        self._root = os.path.abspath(directory)
        self._read_only = read_only
        self._sync = durability == "full"
        self._clock = clock
        self._last_use = 0
        self._counters: ShardCounters | None = None
        self._opening = threading.Lock()
        self._touch_due: dict[str, int] = {}
        self._noted: dict[str, int] = {}
        self._write_notes_at = 0
        self._cold = ColdSample(self._path, self._fullest, self._look, clock)
        self._closed = False
        if not read_only:
            with suppress(OSError):  # full or read-only now, but that may change
                self._open_counters()
        after_fork(self)

    # -- the contract --------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """Return the value under `key`, or None; never partial bytes."""
        fd = -1
        try:
            fd = os.open(f"{self._root}/{key[:2]}/{key}", READ)
            status = os.fstat(fd)
            require_ours(status, key)
            size = status.st_size
            if size > self._unchecked:
                require_credible(key, size, self._counters, most=self._most)
            value = os.read(fd, size)
            return value if len(value) == size else read_on(key, fd, value, size)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failure("read", error) from error
        finally:
            if fd >= 0:
                os.close(fd)

    def use(self, key: str) -> bytes | None:
        """Return what `get` returns, and record the use through the open file.

        It repeats the code of `get` and `touch`, because calling both takes 15 % longer.
        """
        fd = -1
        try:
            fd = os.open(f"{self._root}/{key[:2]}/{key}", READ)
            status = os.fstat(fd)
            require_ours(status, key)
            size = status.st_size
            if size > self._unchecked:
                require_credible(key, size, self._counters, most=self._most)
            value = os.read(fd, size)
            if len(value) != size:
                value = read_on(key, fd, value, size)
            now = self._clock()
            if now <= self._last_use:
                now = self._last_use + 1
            self._last_use = now
            if now < self._touch_due.get(key, 0):
                self._noted[key] = now
            elif is_ours_alone(status):
                self._record_use(key, fd, now)
            return value
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failure("read", error) from error
        finally:
            if fd >= 0:
                os.close(fd)

    def _record_use(self, key: str, fd: int, now: int) -> None:
        """Set the mtime of an open file, and put off further uses of it for a while."""
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
                except FileNotFoundError:
                    # The shard is new, or another process removed the directory.
                    make_shard(f"{self._root}/{key[:2]}", self._open_counters)
                    self._put(key, value)
            except OSError as error:
                if is_no_room(error) and self._could_make_room(len(value)):
                    raise FullError(f"write {key}: {error.strerror}") from error
                raise
        return len(value)

    def _could_make_room(self, size: int) -> bool:
        """Tell whether a tenth of the stored bytes, which the engine then evicts, is that much."""
        with suppress(BackendError):
            return self.usage().bytes >= 10 * size
        return False

    def delete(self, key: str) -> int:
        """Remove `key`; return the bytes freed, 0 if it was absent."""
        self._cold.deleted(key)
        path = self._path(key)
        shard = int(key[:2], 16)
        with self._translated("delete"), self._changing(shard) as (counters, count):
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
        try:
            if is_ours_alone(os.lstat(self._path(key))):
                os.utime(self._path(key), ns=(now, now))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise failure("touch", error) from error

    def usage(self) -> Usage:
        """Return the sums of the counters: one read of 8 KiB."""
        with self._translated("usage"):
            counters = self._counters
            if counters is None or counters.lost():
                if self._read_only:
                    sizes = [info.size for info in self.scan()]
                    return Usage(sum(sizes), len(sizes))
                counters = self._open_counters()
            for _ in range(3):
                totals = counters.totals()
                if totals is not None:
                    return Usage(*totals)
            return Usage(*sum_of_shards(counters, self._recount))

    def coldest(self) -> Iterator[EntryInfo]:
        """Yield entries, coldest first, from a sample of the fullest shards; see `ColdSample`.

        Exact where the directory holds at most 2,048 entries, or is open for reading only.
        """
        if self._read_only:
            return iter(sorted(self.scan(), key=lambda info: info.used_ns))
        self._write_notes()
        return self._cold.entries()

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
            recorded: list[ShardCount | None] = []
            if self._read_only:
                recorded = recorded_in(f"{self._root}/{_COUNTERS}")
            else:
                self._open_counters()
        mend = repair and not self._read_only
        for shard, name in enumerate(_names):
            alone = partial(alone_with, self._counters, shard, recorded, self._examine)
            with self._translated("check"):
                found = list(check_shard(f"{self._root}/{name}", alone, repair=mend))
            yield from found

    def close(self) -> None:
        """Close the counters. Idempotent."""
        self._write_notes()
        self._closed = True
        self._counters = None  # a thread that still uses them keeps them open until it is done

    # -- writing -------------------------------------------------------------------------------

    def _put(self, key: str, value: bytes) -> None:
        path = self._path(key)
        shard = int(key[:2], 16)
        unique = f"{os.getpid()}-{_process}-{next(_serial)}"
        temporary = f"{self._root}/{key[:2]}/.{key[:16]}-{unique}.tmp"
        with self._changing(shard) as (counters, count):
            try:
                require_own_shard(f"{self._root}/{key[:2]}")
                replaced = size_of(path)
                counters.begin(shard, count, size=len(value), entries=1)
                fd = os.open(temporary, CREATE, 0o600)
                try:
                    self._fill(fd, value)
                finally:
                    os.close(fd)
                rename(temporary, path)
            except BaseException as error:
                with suppress(OSError):
                    os.unlink(temporary)
                # After any other exception (Ctrl-C) the value may be in place, so the next writer
                # counts again.
                if isinstance(error, OSError):
                    with suppress(OSError):
                        counters.finish(shard, count)
                raise
            if replaced is None:
                counters.finish(shard, count, size=len(value), entries=1)
            else:
                self._finish(counters, shard, count, len(value) - replaced, 0)
            if self._sync:
                sync(f"{self._root}/{key[:2]}")
        if counters.removed():
            counters = self._open_counters()  # another writer has created the directory again
            with counters.changing(shard):
                self._recount(counters, shard)

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

    @contextmanager
    def _changing(self, shard: int) -> Generator[tuple[ShardCounters, ShardCount]]:
        """Lock a shard, and yield its counters and exact or overestimated count."""
        counters = self._counters
        if counters is None or counters.gone:
            if self._read_only:
                raise BackendError(f"{self._root} is open for reading only")
            counters = self._open_counters()
        with counters.changing(shard):
            count = counters.read(shard)
            if count is None or (count.under_way and counters.locks_work):
                count = self._recount(counters, shard)  # the last writer was killed
            yield counters, count

    def _recount(self, counters: ShardCounters, shard: int) -> ShardCount:
        """Count a shard, remove orphans, and write its record; the caller holds the lock."""
        return self._examine(counters, shard)[0]

    def _examine(self, counters: ShardCounters, shard: int) -> tuple[ShardCount, list[Used]]:
        """List a locked shard: correct its record and return it with (mtime, key) of each entry."""
        return examine(f"{self._root}/{_names[shard]}", shard, counters, most=self._most)

    # -- for `coldest` -------------------------------------------------------------------------

    def _fullest(self) -> list[tuple[int, int]]:
        with self._translated("coldest"):
            return (self._counters or self._open_counters()).fullest()

    def _look(self, shard: int) -> list[tuple[int, str]]:
        """Return (mtime, key) of the entries of a shard, and correct its record on the way.

        At most `SAMPLE` entries of a shard are examined; it has more beyond half a million in all.
        """
        with self._translated("coldest"):
            counters = self._counters or self._open_counters()
            count = counters.read(shard)
            if count is not None and count.entries > SAMPLE:
                return glance(f"{self._root}/{_names[shard]}", SAMPLE)
            with counters.changing(shard):
                return self._examine(counters, shard)[1]

    # -- opening -------------------------------------------------------------------------------

    def _open_counters(self) -> ShardCounters:
        if self._closed:
            raise BackendError(f"{self._root} is closed")
        with self._opening:
            old = self._counters
            if old is not None and not old.lost():
                return old
            make_private(self._root)
            require_private(self._root)
            opened = ShardCounters(
                f"{self._root}/{_COUNTERS}",
                lambda shard: os.path.isdir(f"{self._root}/{_names[shard]}"),
                # The target of a link is not part of the cache, whoever made the link.
                lambda: claim(os.path.realpath(self._root)),
            )
            self._counters = None if self._closed else opened
            return opened

    def after_fork(self) -> None:
        """Make the child open the counters again: the parent's open file holds the locks."""
        self._opening = threading.Lock()
        self._counters = None

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
