"""Connection: decides who may open and close an LMDB database of this process, and when."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial

import lmdb

from kcache.errors import BackendError
from kcache.util.forks import is_ending
from kcache.util.safe_path import make_private
from kcache_backends._lmdb_errors import MissingError
from kcache_backends._lmdb_files import is_recognised, mark
from kcache_backends._lmdb_folder import DATA, Folder, check_parents
from kcache_backends._lmdb_forks import keep_for_ever, watch
from kcache_backends._lmdb_locks import CLOSED, HARDLY, OPENING, ClosedError, Locks
from kcache_backends._lmdb_opening import Opened, identity_at, open_alone, open_read_only

__all__ = ["FORK_PATIENCE", "NOBODY_WIDE", "PATIENCE", "Connection"]

#: The value of `Connection.writer` while no thread writes. No thread has one of these numbers.
NOBODY, NOBODY_WIDE = 0, -1

#: How long a thread waits for another thread, or a writer for another process, in seconds. LMDB's
#: own lock waits without end, so only the holder of the lock in the file `lock` asks for it.
PATIENCE = 10.0
#: How long a fork waits for a transaction of this process, in seconds. A commit takes some 10 ms;
#: on a busy disk it can take a second.
FORK_PATIENCE = 5.0
#: While another process opens or exchanges the database, reads go on without a place in the table
#: of readers. After this many seconds kcache tries again to get one.
PROVISIONAL = 1.0
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class Connection:
    """The database of one directory, opened when it is needed and closed when nobody needs it.

    Order of the locks: `_changing`, byte 1, `_transaction`, byte 0, `_state`. A thread that waits
    for another process holds `_changing` at most, so that a read and a fork wait for no other
    process. Every wait has a limit. A finalizer, which may run in the middle of any code, waits at
    most `HARDLY`, and leaves the rest to the thread that holds the lock.

    Threads: safe to share. A thread that holds `_transaction` and `_state` closes the database;
    py-lmdb lets reads of other threads end first. Fork: it is closed before the fork, and each side
    opens it again. Exit: closed beside daemon threads, which can't open it again.

    Args:
        root: the directory, a real path.
        map_size: the most that `data.mdb` may grow to, bytes.
        read_only: create and change nothing.
    """

    def __init__(self, root: str, map_size: int, *, read_only: bool) -> None:
        self.root = root
        self._data = os.path.join(root, "db", DATA)
        self.map_size = map_size
        self.read_only = read_only
        #: The open database, or None.
        self.open: lmdb.Environment | None = None
        #: The thread that has a write transaction, and that transaction. If no thread has one:
        #: `NOBODY`, or `NOBODY_WIDE` if the map is larger than ours, so that a value may be larger,
        #: too.
        self.writer = NOBODY
        self.txn: lmdb.Transaction[bytes] | None = None
        self._nobody = NOBODY
        self._opened: Opened | None = None
        #: Whether it is open for reading only because this process may not write to it.
        self._unwritable = False
        #: Until when it is open for reading only, because another process was opening it. 0: it is
        #: not.
        self._provisional = 0.0
        #: Whether to open it again, with a larger map or for writing.
        self._outgrown = False
        #: The transaction in which this process exchanges the database. The open one can be read
        #: until that is done. If an interrupt leaves this value here, it has no effect on later
        #: transactions.
        self._exchanging: lmdb.Transaction[bytes] | None = None
        #: Databases that were exchanged. They are closed when no thread writes.
        self._retired: list[Opened] = []
        self._users: set[object] = set()
        self._locks = Locks(root)
        #: The reason why this process can't use the database any more and works without it; empty
        #: if it can use it.
        self._given_up = ""
        #: Locks that are held during a fork.
        self._held: list[threading.RLock] = []
        self._make_locks()
        watch(self)

    def _make_locks(self) -> None:
        #: Held by the thread that writes or wants to write. It may wait for another process.
        self._changing = threading.RLock()
        #: Held during a transaction that writes.
        self._transaction = threading.RLock()
        #: Held while the database is opened or closed; for milliseconds.
        self._state = threading.RLock()

    # -- users and locks between threads -------------------------------------------------------

    def let_go(self, user: object) -> None:
        """Forget a user; the last one closes the database, or leaves that to a thread in it.

        It waits for no lock, because the garbage collector may call it.
        """
        self._users.discard(user)
        self._tidy()

    def is_idle(self) -> bool:
        """Tell whether nobody uses it, and nothing is open."""
        return not (self._users or self._retired or self._is_left())

    def _is_left(self) -> bool:
        return not self._users and (self.open is not None or self._locks.is_open())

    def is_mine(self) -> bool:
        """Tell whether this thread is in the middle of an operation."""
        locks = (self._changing, self._transaction, self._state)
        return any(lock._is_owned() for lock in locks)  # type: ignore[attr-defined]  # pyright: ignore

    @contextmanager
    def _with(self, lock: threading.RLock, patience: float) -> Generator[None]:
        """Hold a lock between threads in the block; afterwards close what others left open."""
        if not lock.acquire(timeout=patience):
            raise TimeoutError(errno.ETIMEDOUT, "another thread is writing", self.root)
        try:
            yield
        finally:
            lock.release()
            self._tidy()

    def _tidy(self) -> None:
        """Close what nobody uses any more, unless a thread is in the way, which does it later."""
        while (self._retired or self._is_left()) and not self.is_mine():
            if not self._transaction.acquire(blocking=False):
                return
            try:
                if not self._state.acquire(blocking=False):
                    return
                try:
                    self._close_retired()
                    if not self._users:
                        self._close()
                        self._locks.close()
                finally:
                    self._state.release()
            finally:
                self._transaction.release()

    # -- closing -------------------------------------------------------------------------------

    def _close(self) -> None:
        """Close the database; the caller holds `_transaction` and `_state`.

        Closed beside another thread's write transaction, py-lmdb would wait for that to end.
        """
        self._retire()
        self._close_retired()

    def _retire(self) -> None:
        if self._opened is not None and self._opened not in self._retired:
            self._retired.append(self._opened)  # first, so that an interrupt (Ctrl-C) loses nothing
        self.open = self._opened = None
        self._outgrown, self._provisional, self._unwritable = False, 0.0, False

    def _close_retired(self) -> None:
        while self._retired:
            opened = self._retired[-1]
            if self._opened is opened:  # an interrupt came between two lines of `_retire`
                self.open = self._opened = None
            self._close_one(opened)
            self._retired.pop()

    def _close_one(self, opened: Opened) -> None:
        """Close a database, unless that would close files of the program, or LMDB refuses.

        Then it stays open until the process ends, because LMDB must not open a file twice.
        """
        if self._is_whole(opened):
            opened.env.close()
        else:
            keep_for_ever(opened.env)
            self._given_up = CLOSED

    def _is_whole(self, opened: Opened) -> bool:
        """Tell whether the program has left the descriptors of a database alone, as far as known.

        A program that closes all that it does not know closes ours, too.
        """
        return self._locks.is_whole() and opened.is_whole()

    def _require_whole(self) -> None:
        """Refuse to go on where LMDB would write into, or map, a file of the program.

        Raises:
            ClosedError: the program has closed descriptors of the database.
        """
        opened = self._opened
        if opened is not None and opened.numbers is not None and not opened.numbers.find():
            raise ClosedError(f"{self.root}: {CLOSED}")

    # -- opening -------------------------------------------------------------------------------

    def get(self) -> lmdb.Environment:
        """Return the open database, opening it if need be; wait for no other process.

        Raises:
            lmdb.Error, OSError: it can't be opened.
            MissingError: there is none, and this is for reading only; or the interpreter ends.
        """
        return self.open or self._open_now()

    def _require_use(self) -> None:
        if self._given_up:
            raise BackendError(f"{self.root}: {self._given_up}")
        if is_ending():
            raise MissingError(f"{self.root}: the interpreter ends, and waits for no daemon thread")
        if not self._users:
            raise BackendError(f"{self.root} is closed")

    def _open_now(self) -> lmdb.Environment:
        self._require_use()
        if self.read_only:
            return self._open_unless_open(lambda: open_read_only(self.root, self.map_size))
        try:
            # The process that opens it gets a short wait. If that process was stopped, only the
            # first read waits.
            patience = 0.0 if self._locks.is_stopped else HARDLY
            with self._prepared() as root, self._locks.held(OPENING, patience, root):
                return self._open_unless_open(lambda: open_alone(root, self.map_size))
        except TimeoutError:
            self._locks.is_stopped = True
            return self._open_unless_open(self._open_provisionally)
        except OSError as error:
            return self._open_unless_open(partial(self._open_denied, error))

    def _open_unless_open(self, open_it: Callable[[], Opened]) -> lmdb.Environment:
        """Return the open database, one that can be taken back, or what `open_it` opens."""
        with self._with(self._state, PATIENCE):
            if self.open is None and self._retired and self._transaction.acquire(blocking=False):
                try:
                    self._close_retired()  # left open by an interrupt or a writer
                finally:
                    self._transaction.release()
            self._require_use()
            if self.open is None:
                self._opened = self._taken_back() or open_it()
                self.open = self._opened.env
                self._measure(self.open)
            return self.open

    def _measure(self, env: lmdb.Environment) -> None:
        """Note whether another process, with a larger cap, has enlarged the file."""
        wide = env.info()["map_size"] > self.map_size
        self._nobody = NOBODY_WIDE if wide else NOBODY
        if self.txn is None:
            self.writer = self._nobody

    def _taken_back(self) -> Opened | None:
        """Return a retired database if its file is still in place: it can't be opened twice."""
        at = identity_at(self._data)
        for opened in self._retired:
            if opened.file == at and self._is_whole(opened):
                self._retired.remove(opened)
                return opened._replace(at_place=True)
        return None

    def _open_provisionally(self) -> Opened:
        """Open it for reading, since another process is opening or exchanging it."""
        at = identity_at(os.path.join(self.root, "old", DATA))
        opened = next((each for each in self._retired if each.file == at), None)
        if opened is None or at == ():
            opened = open_read_only(self.root, self.map_size, wait=False)
        else:
            self._retired.remove(opened)
        self._provisional = time.monotonic() + PROVISIONAL
        return opened

    def _open_denied(self, error: OSError) -> Opened:
        """Open for reading if the medium or the rights allow no more; otherwise raise `error`."""
        if error.errno in _DENIED:
            with suppress(MissingError):
                opened = open_read_only(self.root, self.map_size)
                self._unwritable = True
                return opened
        raise error

    def _open_to_write(self, patience: float) -> lmdb.Environment:
        """Return the database open for writing, if it can be; the caller holds `_changing`.

        Raises:
            TimeoutError: another process opens or exchanges it all the time.
            lmdb.Error, OSError: it can't be opened.
        """
        env = self.open
        if env is not None and not (self._unwritable or self._provisional or self.lost()):
            return env
        self._require_use()
        try:
            with (
                self._prepared() as root,
                self._locks.held(OPENING, patience, root),
                self._with(self._transaction, patience),
                self._with(self._state, PATIENCE),
            ):
                self._close()
                return self._open_unless_open(lambda: open_alone(root, self.map_size))
        except (FileNotFoundError, TimeoutError):
            raise
        except OSError as error:
            with self._with(self._transaction, patience), self._with(self._state, PATIENCE):
                self._close()
                return self._open_unless_open(partial(self._open_denied, error))

    @contextmanager
    def _prepared(self) -> Generator[Folder]:
        """Yield the directory, created if it is missing, recognised as ours and marked."""
        check_parents(self.root)
        make_private(self.root)
        with Folder(self.root) as root:
            # To recognise a database means to open it, and only one thread may do that.
            with self._with(self._state, PATIENCE):
                at = identity_at(self._data)
                known = any(each.file == at for each in (*self._retired, self._opened) if each)
                if not is_recognised(root, known=known):
                    mark(root)
            yield root

    # -- changes to the files by others --------------------------------------------------------

    def lost(self) -> bool:
        """Tell whether another file is in place of the open database."""
        opened = self._opened
        if opened is None or (self._exchanging is not None and self._exchanging is self.txn):
            return False
        if self._outgrown or (self._provisional and time.monotonic() >= self._provisional):
            return True
        return identity_at(self._data) != (opened.file if opened.at_place else ())

    def renew(self) -> bool:
        """Release the open database if another file is in its place, and tell; wait for nobody."""
        if not self.lost():
            return False
        with self._with(self._state, PATIENCE):
            if self._transaction.acquire(blocking=False):
                try:
                    self._close()
                finally:
                    self._transaction.release()
            elif self._outgrown:
                return False  # it is the same file, and LMDB must not open a file twice
            elif self._provisional:
                self._retire()
                self._close_one(self._retired.pop())  # no thread or process can be writing to it
            else:
                self._retire()
        return True

    # -- forks and the exit --------------------------------------------------------------------

    def before_fork(self) -> None:
        """Close the database, and keep it closed until after the fork.

        A child that inherits an open database can neither use nor close it. The next use in either
        process opens it again, in 0.2 ms. A fork within a transaction of its own thread, or beside
        one that takes longer than `FORK_PATIENCE`, leaves it open; the child goes without.
        """
        if self.writer == threading.get_ident():
            return
        for lock in (self._transaction, self._state):
            if not lock.acquire(timeout=FORK_PATIENCE):
                return
            self._held.append(lock)
        self._close()

    def after_fork_in_parent(self) -> None:
        """Let the other threads go on."""
        while self._held:
            self._held.pop().release()
        self._tidy()

    def after_fork_in_child(self) -> None:
        """Forget everything that belongs to the parent."""
        if self.open is not None:
            self._given_up = "the process was forked while it wrote here"
        for each in (self.open, self.txn, *self._retired):
            if each is not None:
                keep_for_ever(each)
        self._held = []
        self._make_locks()
        self._retired = []
        self._exchanging = None
        self.open = self._opened = self.txn = None
        self._locks.close()
        self.writer = self._nobody = NOBODY

    def at_exit(self) -> None:
        """Close the database beside daemon threads, which from now on can't open it again.

        So none of them is inside LMDB when the interpreter ends them. If one does not finish its
        transaction in time, the database stays open until the process ends.
        """
        held: list[threading.RLock] = []
        try:
            for lock in (self._transaction, self._state):
                if not lock.acquire(timeout=FORK_PATIENCE):
                    for each in (self.open, *self._retired):
                        keep_for_ever(each)
                    return
                held.append(lock)
            self._close()
        finally:
            for lock in reversed(held):
                lock.release()
