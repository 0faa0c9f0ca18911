"""Environment: the LMDB database of one directory, one per process, whatever happens to its files.

Files of the directory::

    lock                      byte 0 is locked while somebody opens, exchanges or discards the
                              database, byte 1 while somebody writes to it
    db/data.mdb, db/lock.mdb  the database, and LMDB's table of readers
    new/, old/                an exchange under way: the compacted copy, and what it replaces
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import ClassVar

import lmdb

from kcache.errors import BackendError, FullError
from kcache.util.locks import RangeLocks
from kcache.util.safe_path import make_private
from kcache_backends._files import failure
from kcache_backends._lmdb_files import (
    DATA,
    TABLE,
    LockFile,
    allocate_readers,
    check_kinds,
    open_checked,
    remove,
    sync,
)

__all__ = ["DAMAGE", "Environment", "MissingError", "translated"]

#: What LMDB raises for a file that is not what it wrote. The cache starts afresh then: a damaged
#: list of free pages may name pages in use, so that nothing in the file can be trusted.
DAMAGE = (
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
#: How long another process is waited for, in seconds. LMDB's own lock is waited for without end,
#: so only who holds the one in `lock` asks for it.
PATIENCE = 10.0
_OPENING, _WRITING = 0, 1
#: Room in the map beyond a file that is larger than it may be, bytes.
_SPARE = 1 << 20
#: How often an operation is tried whose database another process or thread exchanges meanwhile.
_TRIES = 4


_SAME_PID = (
    "; another process with the same process id has it open: containers that share a cache in LMDB "
    "must share their process ids too, or use the backend file or zstd"
)


class MissingError(BackendError):
    """There is no database, and none may be made."""


@contextmanager
def translated(operation: str, place: str) -> Generator[None]:
    """Turn what LMDB and the operating system raise into BackendError."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise FullError(f"{operation} {place}: {error}") from error
    except lmdb.Error as error:
        hint = _SAME_PID if getattr(error, "code", 0) == errno.EAGAIN else ""
        raise BackendError(f"{operation} {place}: {error}{hint}") from error
    except OSError as error:
        raise failure(operation, error) from error


class Environment:
    """The LMDB database of one real path, shared by whatever uses it in this process.

    LMDB must not open a file twice in one process; `of` returns the environment that is there.
    A file that is damaged is discarded; one that somebody removed is made anew. Threads: safe to
    share. Fork: a child opens its own, and leaves the parent's alone.

    Args:
        root: the directory, a real path.
        map_size: the most that `data.mdb` may grow to, bytes.
        read_only: create and change nothing.
    """

    _all: ClassVar[weakref.WeakValueDictionary[str, Environment]] = weakref.WeakValueDictionary()
    _guard = threading.RLock()

    def __init__(self, root: str, map_size: int, *, read_only: bool) -> None:
        self.root = root
        self.map_size = map_size
        self.read_only = read_only
        #: The open database, or None.
        self.open: lmdb.Environment | None = None
        #: The thread that has a write transaction, and that transaction.
        self.writer = 0
        self.txn: lmdb.Transaction[bytes] | None = None
        self._opened: tuple[int, int] | None = None
        #: Whether it is open for reading only because there was no right to more.
        self._unwritable = False
        self._users = 0
        self._lock_file: LockFile | None = None
        #: Whether this process is a child that inherited it open, and so can't use it.
        self._inherited = False
        #: Locks that are held during a fork.
        self._held: list[threading.RLock] = []
        self._state = threading.RLock()
        #: Held by the thread that writes, or changes what is open.
        self._changing = threading.RLock()

    @classmethod
    def of(cls, root: str, map_size: int, *, read_only: bool) -> Environment:
        """Return the environment of `root`, and count one more user of it."""
        with cls._guard:
            found = cls._all.get(root)
            if found is None:
                found = cls._all[root] = cls(root, map_size, read_only=read_only)
            if found._users == 0:
                found.map_size, found.read_only = map_size, read_only
            found._users += 1
            if map_size > found.map_size or (found.read_only and not read_only):
                found.map_size = max(found.map_size, map_size)
                found.read_only &= read_only
                found.reopen()
            return found

    def let_go(self) -> None:
        """Count one user less; the last one closes the database."""
        with Environment._guard:
            self._users -= 1
            last = self._users == 0
        if last and self._changing.acquire(timeout=PATIENCE):
            try:
                self._close()
                self._lock_file = None
            finally:
                self._changing.release()

    def _close(self) -> None:
        """Close the database; the caller holds `_changing`.

        Closed beside another thread's write transaction, py-lmdb would wait until that is garbage.
        """
        with self._state:  # nobody opens it anew before it is closed
            env, self.open, self._opened = self.open, None, None
            if env is not None:
                env.close()

    # -- opening -------------------------------------------------------------------------------

    def get(self) -> lmdb.Environment:
        """Return the open database, opening it if need be.

        Raises:
            lmdb.Error, OSError: it can't be opened.
            MissingError: there is none, and this is for reading only.
        """
        return self.open or self._open_now()

    def _open_now(self) -> lmdb.Environment:
        with self._state:
            if self.open is None:
                if self._inherited:
                    raise BackendError(f"{self.root}: the process was forked while it wrote here")
                env = self._open_read_only() if self.read_only else self._open_to_write()
                self._opened = self._identity()
                self.open = env
            return self.open

    def _open_to_write(self) -> lmdb.Environment:
        """Open the database; for reading where medium or rights allow no more at present."""
        self._unwritable = False
        try:
            make_private(self.root)
            with self._alone():
                self._settle()
                try:
                    return self._open_files()
                except DAMAGE:
                    self._discard()
                    return self._open_files()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            with suppress(MissingError):
                env = self._open_read_only()
                self._unwritable = True
                return env
            raise

    def _open_files(self) -> lmdb.Environment:
        place = self._path("db")
        with suppress(FileExistsError):
            os.mkdir(place, 0o700)
        check_kinds(place)
        allocate_readers(os.path.join(place, TABLE))
        env = open_checked(place, self._map_to_open(), read_only=False)
        env.reader_check()
        return env

    def _map_to_open(self) -> int:
        """Return the size of the map: a file that an earlier, larger cap left has room to evict in.

        What evicts copies the pages of the index that it changes: some 3 % of small entries.
        """
        size = self.file_size()
        if size < self.map_size:
            return self.map_size
        return -(-(size + size // 16 + _SPARE) // _SPARE) * _SPARE

    def _open_read_only(self) -> lmdb.Environment:
        place = self._path("db")
        if not os.path.exists(os.path.join(place, DATA)):
            raise MissingError(f"{place}: there is no database, and none is made for reading")
        if os.path.exists(os.path.join(place, TABLE)):
            try:
                return open_checked(place, self.map_size, read_only=True)
            except DAMAGE:
                raise
            except lmdb.Error:
                pass  # no right to write to the table of readers
        # A writer may reuse a page that is being read; what comes of it fails its checksum.
        return open_checked(place, self.map_size, read_only=True, lock=False)

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Keep other processes from opening or exchanging the database while the block runs."""
        file = LockFile(self._path("lock"))
        with file.locks.held(_OPENING, 1, timeout=PATIENCE):
            yield

    def _settle(self) -> None:
        """Finish, or undo, what a killed process left of an exchange; the caller is alone."""
        if not os.path.isdir(self._path("db")):
            # The old one was moved away, so the new one was complete; or there is nothing.
            for name in ("new", "old"):
                if os.path.isdir(self._path(name)):
                    os.rename(self._path(name), self._path("db"))
                    break
        for name in ("new", "old"):
            if os.path.lexists(self._path(name)):
                remove(self._path(name))

    def _discard(self) -> None:
        """Remove the database; the caller is alone. Who has it open goes on with what it has."""
        with suppress(FileNotFoundError):
            os.rename(self._path("db"), self._path("old"))
        remove(self._path("old"))

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Generator[lmdb.Transaction[bytes]]:
        """Yield a write transaction of this thread, committed at the end of the block.

        Raises:
            TimeoutError: another process neither finishes its own nor dies.
            lmdb.Error, OSError: the database can't be opened or written.
        """
        with self._changing:
            for _ in range(_TRIES):
                if self._unwritable or self.lost():
                    self._close()
                env = self.get()
                with self._write_lock().held(_WRITING, 1, timeout=PATIENCE):
                    txn = self._begin(env)
                    if txn is not None:
                        with self._carried_out(txn):
                            yield txn
                        return
            raise lmdb.Error("the database is exchanged all the time")

    def _write_lock(self) -> RangeLocks:
        file = self._lock_file
        if file is None or file.lost():
            file = self._lock_file = LockFile(self._path("lock"))
        return file.locks

    def _begin(self, env: lmdb.Environment) -> lmdb.Transaction[bytes] | None:
        """Return a write transaction, or None if another process exchanged or enlarged the file."""
        try:
            txn = env.begin(write=True)
        except lmdb.MapResizedError:
            env.set_mapsize(0)
            return None
        if not self.lost():
            return txn
        txn.abort()
        return None

    @contextmanager
    def _carried_out(self, txn: lmdb.Transaction[bytes]) -> Generator[None]:
        """Make a transaction this thread's for the block, and end it, interrupts included."""
        try:
            self.txn, self.writer = txn, threading.get_ident()
            yield
            self.txn, self.writer = None, 0
            txn.commit()
        except BaseException:
            self.txn, self.writer = None, 0
            with suppress(lmdb.Error):  # it has ended already
                txn.abort()
            raise

    # -- what may happen to the files ------------------------------------------------------------

    def lost(self) -> bool:
        """Tell whether the open file is no longer the one at its place."""
        return self.open is not None and self._identity() != self._opened

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(os.path.join(self._path("db"), DATA), follow_symlinks=False)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def reopen(self) -> None:
        """Close the database; the next use opens what is at its place by then."""
        with self._changing:
            self._close()

    def adopt_size(self) -> None:
        """Take up the size that another process, with a larger cap, has given to the file."""
        with self._changing:
            self.get().set_mapsize(0)

    def discard(self, damaged: lmdb.Environment | None) -> None:
        """Start afresh, unless somebody did so already; `damaged` is what was found to be damaged.

        Raises:
            OSError: the files can't be removed.
        """
        if self.read_only:
            return
        with self._changing:
            if damaged is not self.open:
                return
            theirs = self.lost()
            self._close()
            if not theirs:
                with self._alone():
                    self._discard()

    def exchange(self, fill: Callable[[str], None]) -> None:
        """Replace the database by what `fill` writes into an empty directory.

        The caller is writing, so that nobody else is.

        Raises:
            lmdb.Error, OSError: it can't be done; nothing has changed.
        """
        with self._alone():
            self._settle()
            new, db, old = (self._path(name) for name in ("new", "db", "old"))
            try:
                os.mkdir(new, 0o700)
                fill(new)
                sync(os.path.join(new, DATA))
                allocate_readers(os.path.join(new, TABLE))
                os.rename(db, old)
                os.rename(new, db)
            finally:
                self._settle()

    def remove(self) -> None:
        """Remove the database, of which nothing is wanted; the next use makes an empty one.

        Takes no room, unlike `exchange`. The caller is writing, so that nobody else is.

        Raises:
            OSError: it can't be done; nothing has changed.
        """
        with self._alone():
            self._settle()
            self._discard()

    def file_size(self) -> int:
        """Return the length of the data file, bytes; 0 if there is none."""
        try:
            return os.stat(os.path.join(self._path("db"), DATA)).st_size
        except OSError:
            return 0

    @property
    def place(self) -> str:
        """The directory of the database itself."""
        return self._path("db")

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    # -- forks ---------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Close the database, and keep it closed until after the fork.

        LMDB can't be used in a child that inherits it open, nor let go of there. The next use in
        either process opens it again, in 0.2 ms. A fork within a transaction of its own thread, or
        beside one that takes longer than `PATIENCE`, leaves it open; the child goes without then.
        """
        if self.writer == threading.get_ident():
            return
        for lock in (self._changing, self._state):
            if not lock.acquire(timeout=PATIENCE):
                return
            self._held.append(lock)
        self._close()

    def after_fork_in_parent(self) -> None:
        """Let the other threads go on."""
        for lock in self._held:
            lock.release()
        self._held = []

    def after_fork_in_child(self) -> None:
        """Begin with nothing of the parent's."""
        if self.open is not None:
            _keep_for_ever(self.open)
            self._inherited = True
        self._held = []
        self._state = threading.RLock()
        self._changing = threading.RLock()
        self.open = self._opened = self._lock_file = self.txn = None
        self.writer = 0


def _keep_for_ever(env: lmdb.Environment) -> None:
    """Keep a forked child from closing its copy of a database of the parent, at its exit too.

    That would free the parent's places in the table of readers, which both share, or wait without
    end for a transaction of a thread that is not there.
    """
    import ctypes  # in few children only

    with suppress(AttributeError):  # PyPy has no reference counts
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(env))


#: Held during a fork: two threads that fork at once take turns.
_forking = threading.RLock()


def _before_fork() -> None:
    _forking.acquire()
    for environment in list(Environment._all.values()):
        environment.before_fork()


def _after_fork_in_parent() -> None:
    for environment in list(Environment._all.values()):
        environment.after_fork_in_parent()
    _forking.release()


def _after_fork_in_child() -> None:
    global _forking  # noqa: PLW0603  a lock of a thread that is not there
    _forking = threading.RLock()
    Environment._guard = threading.RLock()
    for environment in list(Environment._all.values()):
        environment.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
