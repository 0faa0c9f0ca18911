"""LmdbBackend: values in one LMDB database, with an index in the order of use."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import chain, islice
from threading import get_ident

import lmdb

from kcache.backend import EntryInfo, Usage
from kcache.errors import BackendError, ConfigError
from kcache.util.forks import after_fork
from kcache.util.mounts import FileSystem, file_system
from kcache_backends import _lmdb_records as records
from kcache_backends._lmdb_environment import HARDLY, PATIENCE, Environment
from kcache_backends._lmdb_errors import DAMAGE, is_full
from kcache_backends._lmdb_reader import Reader
from kcache_backends._lmdb_room import free_some, require_room

__all__ = ["LmdbBackend"]

_now = time.monotonic

#: The file may grow to this many times the cap. At 1.25 times, fragmentation would leave no room.
MAP_FACTOR = 2
#: ... but its limit is never smaller than this, in bytes.
SMALLEST_MAP = 1 << 20
#: The largest cap, in bytes. The map takes up twice the cap in the address space of a process,
#: which has 128 TiB:
#: https://docs.kernel.org/arch/x86/x86_64/mm.html
LARGEST_CAP = 16 << 40
#: At most this many uses are noted, and the oldest is written after this many nanoseconds at the
#: latest. So a read costs no write transaction. All notes are written at close and before an
#: eviction.
MAX_TOUCHED = 4096
TOUCH_AFTER = 30_000_000_000
#: How many notes a put writes, or a read that has no room for another note. Each takes 10 us and 2
#: pages of memory.
WRITE_TOUCHED = 64
#: kcache checks whether another process has exchanged the database at every change, at every miss,
#: and this many seconds after the last check.
LOOK_AGAIN = 0.1
LOOK_AGAIN_NS = int(LOOK_AGAIN * 1e9)
#: A use that is further in the future than this, in nanoseconds, is a clock's error. It does not
#: count as a use.
FUTURE = 86_400_000_000_000
#: The file is compacted once it is this many times larger than its entries...
SLACK = 3
#: ... and larger than this many bytes. A smaller file is not worth it.
SMALL_FILE = 1 << 20


class LmdbBackend(Reader):
    """Values in an LMDB database: `get` copies from mapped memory, puts are transactions.

    Threads: safe to share. Processes: any number on one machine; writers take turns, readers never
    wait. Crash: a process killed at any instant leaves the last committed state and no lock. Power
    cut: the last puts may be missing. Fork: the child opens the database again. A database that is
    found to be damaged is replaced by an empty one. Most damage is found. Some damage to the pages
    of the tree can kill the process, and so can a program that truncates the file while it is open.

    Stored sizes are whole pages (4 KiB on most machines): `ceil((length + 16) / page)` of them. The
    file never grows beyond twice the cap, or 1 MiB; the table of readers and the lock add 384 KiB.

    Args:
        directory: created, 0700, if it is not there.
        max_size: the cap that the engine will keep, in bytes.
        read_only: create and change nothing.
        clock: nanoseconds since the epoch, for recency.
        file_system: tells what file system a path is on, for tests.

    Raises:
        ConfigError: the cap is larger than 16 TiB.
        BackendError: the directory is on a network file system, where mapped memory and locks don't
            hold between machines.
    """

    overhead = records.OVERHEAD

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_size: int = 1 << 30,
        read_only: bool = False,
        clock: Callable[[], int] = time.time_ns,
        file_system: Callable[[str], FileSystem] = file_system,
    ) -> None:
        if max_size > LARGEST_CAP:
            raise ConfigError(
                f"max_size={max_size!r} is not allowed with LMDB; allowed: at most "
                f"{LARGEST_CAP} (16 TiB), because the file is mapped into memory; use the backend "
                "file or zstd"
            )
        self._root = os.path.realpath(directory)
        place = file_system(self._root)
        if place.shared:
            raise BackendError(
                f"{self._root} is on a network file system ({place.kind} at {place.mount_point}), "
                "where LMDB can't keep its promises; use the backend file or zstd there"
            )
        self._read_only = read_only
        self._max_size = max_size
        self._clock = clock
        self._last_use = 0
        self._touched: dict[str, int] = {}
        #: When the notes must be written; 0 while there are none, so that the first one is noticed.
        self._touch_by = 0
        #: When to check next whether the database at its place is still the open one.
        self._look_at = _now() + LOOK_AGAIN
        self._look_at_ns = 0
        #: Uses that the present transaction has written but not committed yet.
        self._written: dict[str, int] = {}
        #: Whether it has deleted something, and the first error within it.
        self._shrunk = False
        self._failure: BaseException | None = None
        #: Whether the last change failed for lack of room.
        self._tight = False
        self._closed = False
        map_size = max(records.stored_size(MAP_FACTOR * max_size), SMALLEST_MAP)
        #: Identifies this object; the environment must not hold a reference to it.
        self._user = object()
        self._environment = Environment.of(self._root, map_size, self._user, read_only=read_only)
        dropped = weakref.finalize(self, self._environment.let_go, self._user)
        dropped.atexit = False
        if not read_only:
            with suppress(BackendError), self._translated("open"):  # full now, but that may change
                self._environment.get()
        after_fork(self)

    # -- the contract --------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """Return a copy of the value under `key`, or None; never partial bytes."""
        if _now() >= self._look_at:
            self._look_at = _now() + LOOK_AGAIN
            self._renewed()
        name = b"v" + bytes.fromhex(key)
        env = self._environment.open
        if env is not None and not self._environment.writer:
            # The usual case takes the short way: a third of the time of the long one.
            try:
                txn = env.begin()
                try:
                    value = txn.get(name)
                finally:
                    txn.abort()
            except lmdb.Error:
                value = None
            else:
                if value is not None:
                    return value
                if self._is_current(env):
                    return None
        return self._find(lambda txn: self._value(txn, name), buffers=True)

    def use(self, key: str) -> bytes | None:
        """Return what `get` returns, and note the use.

        It repeats the code of `get` and `touch`: another call would cost 2 % of a read.
        """
        now = self._clock()
        if now <= self._last_use:
            now = self._last_use + 1
        self._last_use = now
        env = self._environment.open
        value: bytes | None = None
        if now < self._look_at_ns and env is not None and not self._environment.writer:
            try:
                txn = env.begin()
                try:
                    value = txn.get(b"v" + bytes.fromhex(key))
                finally:
                    txn.abort()
            except lmdb.Error:
                value = env = None
        else:
            env = None
        if value is None and (env is None or not self._is_current(env)):
            value = self.get(key)
            self._look_at_ns = now + LOOK_AGAIN_NS
        if value is not None and not self._read_only:
            self._touched[key] = now
            if now >= self._touch_by or len(self._touched) >= MAX_TOUCHED:
                self._touches_due(now)
        return value

    def _is_current(self, env: lmdb.Environment) -> bool:
        """Tell whether the open database is still the one in place: then a miss is a miss."""
        return not self._closed and not self._renewed() and env is self._environment.open

    def touch(self, key: str) -> None:
        """Note a use of `key`, to be written with the next ones."""
        if not self._read_only:
            self._touched[key] = now = self._now()
            if now >= self._touch_by or len(self._touched) >= MAX_TOUCHED:
                self._touches_due(now)

    def _touches_due(self, now: int) -> None:
        """Write noted uses; the first of them only starts the time that they may wait.

        A hit waits for no writer: while another process writes, the uses wait for the next call.
        Uses that can't be written (a full disk) are dropped: the value matters more than its
        recency.
        """
        first, self._touch_by = self._touch_by == 0, now + TOUCH_AFTER
        many = len(self._touched) >= MAX_TOUCHED
        if many or not first:
            with suppress(BackendError):
                self._write_touched(WRITE_TOUCHED if many else MAX_TOUCHED, patience=0.0)
            if len(self._touched) >= MAX_TOUCHED:
                for key in list(islice(self._touched, WRITE_TOUCHED)):
                    self._touched.pop(key, None)

    def put(self, key: str, value: bytes) -> int:
        """Store `value` under `key` atomically; return its stored size, whole pages."""
        self._touched.pop(key, None)
        raw = bytes.fromhex(key)
        size = records.stored_size(len(value))
        with self._writing("write") as txn, self._noting_failure("write"):
            self._apply_touched(txn, WRITE_TOUCHED)
            old = records.put_info(txn, raw, self._now(), size)
            if self._environment.full_at:
                require_room(self._environment, size + (records.sums(txn) or (0, 0))[0])
            txn.put(b"v" + raw, value)
            records.add_to_sums(txn, size - (old[1] if old else 0), old is None)
        return size

    def delete(self, key: str) -> int:
        """Remove `key`; return the bytes freed, 0 if it was absent."""
        self._touched.pop(key, None)
        raw = bytes.fromhex(key)
        with self._writing("delete") as txn, self._noting_failure("delete"):
            old = records.remove_info(txn, raw)
            if old is None:
                return 0
            txn.delete(b"v" + raw)
            records.add_to_sums(txn, -old[1], -1)
            self._shrunk = True
            return old[1]

    def batch(self) -> AbstractContextManager[None]:
        """Make the changes in the block one transaction; a batch within a batch is part of it."""
        return self._batch()

    @contextmanager
    def _batch(self) -> Generator[None]:
        with self._writing("write"):
            yield

    def usage(self) -> Usage:
        """Return the sums, which every transaction keeps exact."""
        self._renewed()
        return Usage(*(self._find(records.sums) or (0, 0)))

    def coldest(self) -> Iterator[EntryInfo]:
        """Yield entries in the order of the index, `ROWS` per transaction."""
        with suppress(BackendError):
            self._write_touched(patience=HARDLY)
        offered: set[bytes] = set()
        # An entry that a wrong clock dated into the future would stay for ever.
        future = records.time_key(self._now() + FUTURE)
        for info in chain(self._rows(records.cold_rows, future), self._rows(records.cold_rows)):
            raw = bytes.fromhex(info.key)
            # Otherwise it was used since then, and the scan meets it again later.
            if raw not in offered:
                offered.add(raw)
                yield info

    def scan(self) -> Iterator[EntryInfo]:
        """Yield every entry, in the order of the keys."""
        with suppress(BackendError):
            self._write_touched(patience=HARDLY)
        return self._rows(records.entry_rows)

    def check(self, *, repair: bool = False) -> Iterator[str]:
        """Verify the file page by page, then the sums and the index by recency."""
        from kcache_backends._lmdb_check import check  # few calls need it

        with suppress(BackendError):
            self._write_touched(patience=HARDLY)
        self._renewed()
        writing = nullcontext if self._read_only else self._writing
        return check(self._environment, writing, repair=repair and not self._read_only)

    def close(self) -> None:
        """Write the noted uses and release the database. Idempotent.

        The garbage collector may call this in the middle of another operation of this thread. Then
        it waits for nothing, and other users of the database write the uses.
        """
        environment = self._environment
        if self._touched and not self._closed and not self._read_only:
            if not environment.is_mine():
                with suppress(BackendError):
                    self._write_touched(patience=HARDLY)
            if self._touched:
                environment.left_uses.append(self._touched)
        self._closed = True
        with self._translated("close"):
            environment.let_go(self._user)

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def _writing(
        self, operation: str, patience: float = PATIENCE
    ) -> Generator[lmdb.Transaction[bytes]]:
        """Yield this thread's write transaction; the outermost block commits it."""
        environment = self._environment
        if environment.writer == get_ident() and environment.txn is not None:
            yield environment.txn
            return
        if self._closed or self._read_only:
            raise BackendError(f"{self._root} is {'closed' if self._closed else 'read-only'}")
        env: lmdb.Environment | None = None
        try:
            with ExitStack() as stack:
                with self._translated(operation):
                    txn = stack.enter_context(environment.writing(patience))
                    env = environment.open
                    self._shrunk, self._failure = False, None
                yield txn
                with self._noting_failure(operation):
                    stack.close()  # commits
        except BaseException as error:
            self._touched = {**self._written, **self._touched}
            self._written = {}
            self._recover(env, self._failure or error.__cause__)
            raise
        self._written = {}
        if self._shrunk:
            with suppress(BackendError), self._translated("compact"):
                self._compact()
            if self._tight:
                self._free_pages()

    def _recover(self, env: lmdb.Environment | None, cause: BaseException | None) -> None:
        """Do what can be done after a failed transaction, so that the next one may succeed."""
        with suppress(lmdb.Error, OSError, BackendError):
            if isinstance(cause, DAMAGE):
                self._environment.discard(env, patience=HARDLY)
            elif isinstance(cause, lmdb.PanicError):
                self._environment.reopen()
            elif is_full(cause, self._root) and env is not None:
                self._tight = True
                self._environment.make_room()
                free_some(self._environment)

    def _free_pages(self) -> None:
        """Let the next transaction use the pages that the last one freed.

        LMDB keeps these pages for processes that still read the state before the last transaction,
        so there has to be one transaction in between.
        """
        self._tight = False
        with suppress(BackendError), self._writing("write") as txn, self._noting_failure("write"):
            records.add_to_sums(txn, 0, 0)

    def _write_touched(self, most: int = MAX_TOUCHED, patience: float = PATIENCE) -> None:
        """Write the noted uses, if there are any, the oldest first."""
        if self._touched and not self._read_only:
            with self._writing("touch", patience) as txn, self._noting_failure("touch"):
                self._apply_touched(txn, most)

    def _apply_touched(self, txn: lmdb.Transaction[bytes], most: int) -> None:
        touched = self._touched
        while self._environment.left_uses:
            for name, time_of_use in self._environment.left_uses.popleft().items():
                touched.setdefault(name, time_of_use)
        for key in list(islice(touched, most)):
            used = touched.pop(key, None)  # another thread may have deleted it
            if used is not None:
                self._written[key] = used
                records.use(txn, bytes.fromhex(key), used, FUTURE)
        if not touched:
            self._touch_by = 0

    def _compact(self) -> None:
        """Give back the space of deleted entries if that is most of the file.

        It does nothing if the copy beside the file would exceed what the file may grow to, unless
        the file exceeds that already (because of an earlier, larger cap).
        """
        environment = self._environment
        allowed = environment.map_size

        def wanted() -> bool:
            size, used = environment.file_size(), self.usage().bytes
            fits = not used or size + used + SMALL_FILE <= allowed or size > allowed
            return size > SMALL_FILE and fits and (size > SLACK * used or size > allowed > used)

        if not wanted():
            return
        with environment.writing(HARDLY) as txn:
            if wanted():
                if self.usage().entries:
                    environment.exchange(txn)
                else:
                    environment.remove()  # also on a disk without room for a copy
        environment.renew()

    # -- small things --------------------------------------------------------------------------

    def _now(self) -> int:
        """Return the time, later than any that this object has returned before."""
        self._last_use = now = max(self._clock(), self._last_use + 1)
        return now

    def after_fork(self) -> None:
        """Forget, in a child, the uses that the parent writes."""
        self._touched = {}
        self._written = {}
