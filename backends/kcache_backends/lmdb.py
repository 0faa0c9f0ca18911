"""LmdbBackend: values in one LMDB database, with an index in the order of use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

from kcache.backend import Backend, EntryInfo, Usage, increasing
from kcache.errors import BackendError, ConfigError, DiskFullError
from kcache.util.forks import importing
from kcache.util.mounts import FileSystem, file_system
from kcache_backends import _lmdb_records as records
from kcache_backends._lmdb_environment import SHORT_WAIT, Environment
from kcache_backends._lmdb_files import DAMAGE, has_room

#: The file may grow to this many times the cap. At 1.25 times, fragmentation would leave no room.
MAP_FACTOR = 2
#: ... or to this many bytes, if that is more.
SMALLEST_MAP = 1 << 20
#: The largest cap, in bytes. The map takes up twice the cap in the address space of a process,
#: which has 128 TiB:
#: https://docs.kernel.org/arch/x86/x86_64/mm.html
LARGEST_CAP = 16 << 40
#: Uses are noted in memory first, so that a read needs no write transaction. At most `MAX_TOUCHED`
#: uses are noted. Each write transaction writes all of them, and so does the first use that comes
#: `TOUCH_AFTER` nanoseconds after the first noted one. Each use that is written takes 10 us, and 2
#: pages of memory.
MAX_TOUCHED = 1024
TOUCH_AFTER = 30_000_000_000
#: How many rows one read transaction of `coldest` or `scan` reads. A longer transaction would keep
#: LMDB from reusing pages.
ROWS = 256


class LmdbBackend(Backend):
    """Stores values in an LMDB database: `get` copies from mapped memory, `put` is a transaction.

    Threads: several threads may use one object. Processes: any number of processes of one machine
    may use the database; one writes at a time, and readers never wait. Crash: a process killed at
    any instant leaves the last committed state and no lock. Power cut: the last puts may be
    missing afterwards. Fork: the child opens the database again.

    A database that is found to be damaged is replaced by an empty one. So is a database that is
    full because a process was stopped in the middle of a read. Most damage is found, but some
    damage to the pages of the tree can kill the process, and so can a program that truncates the
    file while it is open.

    Stored sizes are whole pages (4 KiB on most machines): `ceil((length + 16) / page)` of them. The
    file never grows beyond the larger of twice the cap and 1 MiB, and shrinks when its last entry
    is deleted; the table of readers adds 128 KiB.

    Args:
        directory: created with mode 0700 if it does not exist.
        max_size: the cap in bytes, which the engine enforces.
        read_only: create and change nothing.
        clock: returns the time of a use, in nanoseconds since the epoch.
        file_system: returns the file system that a path is on; tests pass another function.

    Raises:
        ConfigError: the cap is larger than 16 TiB.
        BackendError: the directory is on a network file system, where LMDB's mapped memory and
            locks do not work between machines.
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
                f"max_size: expected at most {LARGEST_CAP} (16 TiB) with LMDB, which maps the file "
                f"into memory, got {max_size!r}; the `file` and `zstd` backends have no such limit"
            )
        self._root = os.path.realpath(directory)
        place = file_system(self._root)
        if place.shared:
            raise BackendError(
                f"{self._root} is on a network file system ({place.kind} at {place.mount_point}), "
                "where LMDB's locks do not work between machines; use the `file` or `zstd` backend "
                "instead"
            )
        self._read_only = read_only
        self._max_size = max_size
        self._now = increasing(clock)
        map_size = max(records.stored_size(MAP_FACTOR * max_size), SMALLEST_MAP)
        #: None once this backend is closed.
        self._environment: Environment | None = Environment.of(
            self._root, map_size, read_only=read_only
        )
        if not read_only:
            with suppress(BackendError):  # the disk may be full now, but not later
                self.usage()

    # -- the contract --------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """Return a copy of the value under `key`, or None; never partial bytes."""
        name, environment = b"v" + bytes.fromhex(key), self._opened()
        value = environment.read(lambda txn: txn.get(name), recent=True)
        if value is None:
            value = environment.read(lambda txn: txn.get(name))
        # A value that is larger than the cap was stored by a process with a larger cap.
        return None if value is None or len(value) > self._max_size else value

    def touch(self, key: str) -> None:
        """Note a use of `key` in memory. Noted uses are written together later.

        This method never waits for a writer: while another process writes, the uses stay noted
        until a later call. They are dropped if the disk is full, or if `MAX_TOUCHED` uses wait for
        other writers. Then only the order of eviction is less exact.
        """
        environment = self._environment
        if environment is not None and not self._read_only:
            uses = environment.uses
            uses[key] = now = self._now()
            if now >= environment.uses_due or len(uses) >= MAX_TOUCHED:
                if environment.uses_due:  # the first use only sets the time
                    self._write_uses(0.0)
                environment.uses_due = now + TOUCH_AFTER
                if len(uses) >= MAX_TOUCHED:
                    uses.clear()

    def put(self, key: str, value: bytes) -> int:
        """Store `value` under `key` atomically; return its stored size, whole pages."""
        raw, size = bytes.fromhex(key), records.stored_size(len(value))
        environment = self._writable()
        with environment.writing("write") as txn:
            old = records.put_info(txn, raw, self._now(), size)
            if not has_room(environment.env, self._root, size):
                raise DiskFullError(
                    f"write {self._root}: the disk is nearly full; the remaining space is reserved "
                    "for evicting entries"
                )
            txn.put(b"v" + raw, value)
            records.add_to_sums(txn, size - (old[1] if old else 0), old is None)
        return size

    def delete(self, key: str) -> int:
        """Remove `key`; return the number of bytes freed, or 0 if `key` was absent."""
        raw = bytes.fromhex(key)
        environment = self._writable()
        with environment.writing("delete") as txn:
            old = records.remove_info(txn, raw)
            if old is None:
                return 0
            txn.delete(b"v" + raw)
            records.add_to_sums(txn, -old[1], -1)
            return old[1]

    @contextmanager
    def batch(self) -> Generator[None]:
        """Make the block's changes one transaction; an inner batch is part of the outer one."""
        with self._writable().writing("write"):
            yield

    def usage(self) -> Usage:
        """Return the bytes and entries that are stored; every transaction updates both."""
        return Usage(*(self._opened().read(records.sums) or (0, 0)))

    def coldest(self) -> Iterator[EntryInfo]:
        """Yield entries, least recently used first; each read transaction reads `ROWS` of them."""
        self._write_uses(SHORT_WAIT)
        offered: set[bytes] = set()
        # An entry that a wrong clock dated into the future would stay forever, so it comes first.
        future = records.time_key(self._now() + records.FUTURE)
        for after in (future, b""):
            start = after
            while rows := self._opened().read(partial(records.rows, after=start, most=ROWS)):
                for _, raw, used, size in rows:
                    # An entry that was used meanwhile has moved in the index, and is found again.
                    if raw not in offered:
                        offered.add(raw)
                        yield EntryInfo(raw.hex(), size, used)
                start = rows[-1][0] + b"\0"

    def scan(self) -> Iterator[EntryInfo]:
        """Yield what `coldest` yields."""
        return self.coldest()

    def check(self, *, repair: bool = False) -> Iterator[str]:
        """Verify the file page by page, then the sums and the recency index.

        With `repair`, a file with any damage is replaced by an empty one. A read-only backend does
        not block writers, so a file that is being written may look damaged.
        """
        with importing:
            from lmdb import verify  # noqa: PLC0415  only for a check

        environment = self._opened()
        self._write_uses(SHORT_WAIT)
        if environment.read(lambda txn: txn.id()) is None:
            return
        env = environment.env
        with nullcontext() if self._read_only else self.batch():
            try:
                found: list[str] = verify.verify(f"{self._root}/db")  # type: ignore[no-untyped-call]
                found = found[:10] or environment.read(records.problems) or []
            except (verify.VerifyError, *DAMAGE) as error:
                found = [str(error)]
        for each in found:
            yield f"the database is damaged: {each}"
        if found and repair and not self._read_only:
            environment.begin_anew(env)

    def close(self) -> None:
        """Write the noted uses and release the database. Idempotent.

        The noted uses can't be written if the garbage collector calls this method in the middle of
        another operation of this thread. They are then lost, unless another object that has this
        database open writes them later.
        """
        environment = self._environment
        if environment is not None and environment.env and not environment.is_replaced():
            self._write_uses(SHORT_WAIT)
        self._environment = None

    # -- reading -------------------------------------------------------------------------------

    def _opened(self) -> Environment:
        if self._environment is None:
            raise BackendError(f"{self._root} is closed")
        return self._environment

    # -- writing -------------------------------------------------------------------------------

    def _writable(self) -> Environment:
        if self._read_only:
            raise BackendError(f"{self._root} is read-only")
        return self._opened()

    def _write_uses(self, patience: float) -> None:
        """Write the noted uses, unless other writers need more than `patience` seconds."""
        environment = self._opened()
        if environment.uses and not self._read_only:
            with suppress(BackendError), environment.writing("touch", patience):
                pass
