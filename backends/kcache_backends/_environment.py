"""Environment: the LMDB database of one directory, one per process, whatever happens to its files.

Files of the directory::

    lock                      the mark that the directory is ours; byte 0 is locked while somebody
                              opens, exchanges or discards the database, byte 1 while somebody
                              writes to it
    db/data.mdb, db/lock.mdb  the database, and LMDB's table of readers
    new/, old/                an exchange under way: the compacted copy, and what it replaces

Order of the locks: `_changing`, byte 1, `_transaction`, byte 0, `_state`. Whoever waits for another
process holds `_changing` at most, so that a read and a fork wait for no other process. A finalizer
takes no lock that is not free.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import ClassVar

import lmdb

from kcache.errors import BackendError
from kcache.util.safe_path import make_private
from kcache_backends._lmdb_errors import MissingError
from kcache_backends._lmdb_files import LockFile, check_size, is_recognised, mark
from kcache_backends._lmdb_folder import DATA, Folder, check_parents
from kcache_backends._lmdb_forks import keep_for_ever, watch
from kcache_backends._lmdb_opening import (
    Opened,
    database,
    discard,
    exchange,
    identity_of,
    open_alone,
    open_read_only,
    settle,
)

__all__ = ["HARDLY", "PATIENCE", "Environment"]

#: How long a writer waits for another process, in seconds. LMDB's own lock is waited for without
#: end, so only who holds the one in `lock` asks for it.
PATIENCE = 10.0
#: A writer that waited so long does not wait again for this many seconds: a process that was
#: stopped (by a debugger, say) usually stays so for longer.
GIVEN_UP = 60.0
#: ... but for so long at most, in seconds: others that write may have to be waited for.
HARDLY = 0.1
#: How long a fork waits for a transaction of this process, in seconds; a commit takes some 10 ms.
FORK_PATIENCE = 1.0
#: While another process opens or exchanges the database, reads go on without a place in the table
#: of readers, and for so many seconds: then it is tried again.
PROVISIONAL = 1.0
_OPENING, _WRITING = 0, 1
#: How often an operation is tried whose database another process or thread exchanges meanwhile.
_TRIES = 4
#: A reader that is so many transactions behind is not reading, but stopped.
_BEHIND = 16
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)

#: Until when it is not worth while to wait for a lock of a directory, in seconds.
_given_up: dict[tuple[str, int], float] = {}


class Environment:
    """The LMDB database of one real path, shared by whatever uses it in this process.

    LMDB must not open a file twice in one process; `of` returns the environment that is there.
    A file that is damaged is discarded; one that somebody removed is made anew. A directory that
    holds anything but ours is left as it is.

    Threads: safe to share. Processes: one that is stopped in the middle of a change keeps others
    from changing anything, `PATIENCE` at first and then not at all; reads go on. Fork: a child
    opens its own, and leaves the parent's alone.

    Args:
        root: the directory, a real path.
        map_size: the most that `data.mdb` may grow to, bytes.
        read_only: create and change nothing.
    """

    _all: ClassVar[weakref.WeakValueDictionary[str, Environment]] = weakref.WeakValueDictionary()
    _guard = threading.RLock()

    def __init__(self, root: str, map_size: int, *, read_only: bool) -> None:
        self.root = root
        self._data = os.path.join(root, "db", DATA)
        self.map_size = map_size
        self.read_only = read_only
        #: The open database, or None.
        self.open: lmdb.Environment | None = None
        #: The thread that has a write transaction, and that transaction.
        self.writer = 0
        self.txn: lmdb.Transaction[bytes] | None = None
        #: How many bytes of entries there may be, since the disk was found to be full; 0: any.
        self.full_at = 0
        #: Uses that a backend could not write when it was closed.
        self.left_uses: deque[dict[str, int]] = deque()
        self._opened: tuple[int, int] | None = None
        #: Whether it is open for reading only because there was no right to more.
        self._unwritable = False
        #: Until when it is open for reading only because another process was opening it; 0: it is
        #: not.
        self._provisional = 0.0
        #: Whether it is to be opened anew, with a larger map or for writing.
        self._outgrown = False
        #: Whether this process is exchanging it: what is open can be read until that is done.
        self._exchanging = False
        #: Databases that were exchanged, to be closed when nobody writes.
        self._retired: list[lmdb.Environment] = []
        self._users: set[object] = set()
        self._lock_file: LockFile | None = None
        #: Whether this process is a child that inherited it open, and so can't use it.
        self._inherited = False
        #: Locks that are held during a fork.
        self._held: list[threading.RLock] = []
        #: Whether the interpreter is about to end.
        self._exiting = False
        self._make_locks()
        watch(self)

    def _make_locks(self) -> None:
        #: Held by the thread that writes, or wants to; it may wait for another process.
        self._changing = threading.RLock()
        #: Held during a transaction that writes.
        self._transaction = threading.RLock()
        #: Held while the database is opened or closed; for milliseconds.
        self._state = threading.RLock()

    @classmethod
    def of(cls, root: str, map_size: int, user: object, *, read_only: bool) -> Environment:
        """Return the environment of `root`, with one more user."""
        with cls._guard:
            found = cls._all.get(root)
            if found is None:
                found = cls._all[root] = cls(root, map_size, read_only=read_only)
            if not found._users:
                found.map_size, found.read_only = map_size, read_only
            found._users.add(user)
        if map_size > found.map_size or (found.read_only and not read_only):
            found.map_size = max(found.map_size, map_size)
            found.read_only &= read_only
            found._outgrown = found.open is not None
        return found

    def let_go(self, user: object) -> None:
        """Forget a user; the last one closes the database, or leaves that to who uses it now.

        Takes no lock that is not free: it may be called by the garbage collector.
        """
        self._users.discard(user)
        self._tidy()

    def is_mine(self) -> bool:
        """Tell whether this thread is in the middle of an operation."""
        locks = (self._changing, self._transaction, self._state)
        return any(lock._is_owned() for lock in locks)  # type: ignore[attr-defined]  # pyright: ignore

    def _tidy(self) -> None:
        """Close what nobody uses any more, if nobody is in the way; whoever is does it later."""
        while (self._retired or (self.open is not None and not self._users)) and not self.is_mine():
            if not self._transaction.acquire(blocking=False):
                return
            try:
                if not self._state.acquire(blocking=False):
                    return
                try:
                    self._close_retired()
                    if not self._users:
                        self._close()
                        self._lock_file = None
                finally:
                    self._state.release()
            finally:
                self._transaction.release()

    @contextmanager
    def _turn(self, patience: float) -> Generator[None]:
        """Be the only thread that wants to write, in the block."""
        if not self._changing.acquire(timeout=patience):
            raise TimeoutError(errno.ETIMEDOUT, "another thread is writing", self.root)
        try:
            yield
        finally:
            self._changing.release()
            self._tidy()

    @contextmanager
    def _stateful(self) -> Generator[None]:
        with self._state:
            yield
        self._tidy()

    def _close_retired(self) -> None:
        while self._retired:
            env = self._retired[-1]
            if self.open is env:  # an interrupt (Ctrl-C) came between two lines of `_retire`
                self.open = self._opened = None
            if self._exiting:  # beside daemon threads, which the interpreter ends in the middle
                keep_for_ever(env)
            else:
                env.close()
            self._retired.pop()

    def _close(self) -> None:
        """Close the database; the caller holds `_transaction`.

        Closed beside another thread's write transaction, py-lmdb would wait for that to end.
        """
        with self._state:  # nobody opens it anew before it is closed
            self._retire()
            self._close_retired()

    def _retire(self) -> None:
        if self.open is not None:
            self._retired.append(self.open)  # first, so that an interrupt (Ctrl-C) loses nothing
        self.open = self._opened = None
        self._outgrown, self._provisional, self._unwritable = False, 0.0, False

    # -- opening -------------------------------------------------------------------------------

    def get(self) -> lmdb.Environment:
        """Return the open database, opening it if need be; wait for no other process.

        Raises:
            lmdb.Error, OSError: it can't be opened.
            MissingError: there is none, and this is for reading only.
        """
        return self.open or self._open_now()

    def _open_now(self) -> lmdb.Environment:
        with self._stateful():
            if self.open is None:
                if self._retired and self._transaction.acquire(blocking=False):
                    try:
                        self._close_retired()  # what an interrupt has left open
                    finally:
                        self._transaction.release()
                if self._inherited:
                    raise BackendError(f"{self.root}: the process was forked while it wrote here")
                if self.read_only:
                    return self._opened_as(open_read_only(self.root, self.map_size))
                return self._opened_as(self._open_to_read())
            return self.open

    def _opened_as(self, opened: Opened) -> lmdb.Environment:
        if self._exiting:
            keep_for_ever(opened.env)
        self.open, self._opened = opened
        return opened.env

    def _open_to_read(self) -> Opened:
        """Open the database, for reading only if another process is opening or exchanging it."""
        try:
            with self._prepared() as root, self._alone(root, 0.0):
                return open_alone(root, self.map_size)
        except TimeoutError:
            opened = open_read_only(self.root, self.map_size, lock=False)
            self._provisional = time.monotonic() + PROVISIONAL
            return opened
        except OSError as error:
            return self._open_denied(error)

    def _open_to_write(self, patience: float) -> lmdb.Environment:
        """Return the database open for writing, if it can be; the caller holds `_changing`.

        Raises:
            TimeoutError: another process opens or exchanges it all the time.
            lmdb.Error, OSError: it can't be opened.
        """
        env = self.open
        if env is not None and not (self._unwritable or self._provisional or self.lost()):
            return env
        if self._inherited:
            return self.get()
        try:
            with (
                self._prepared() as root,
                self._alone(root, patience),
                self._transaction,
                self._stateful(),
            ):
                self._close()
                return self._opened_as(open_alone(root, self.map_size))
        except OSError as error:
            with self._transaction, self._stateful():
                self._close()
                return self._opened_as(self._open_denied(error))

    def _open_denied(self, error: OSError) -> Opened:
        """Open for reading where medium or rights allow no more at present; else raise `error`."""
        if error.errno in _DENIED:
            with suppress(MissingError):
                opened = open_read_only(self.root, self.map_size)
                self._unwritable = True
                return opened
        raise error

    @contextmanager
    def _prepared(self) -> Generator[Folder]:
        """Yield the directory, made if it is not there, recognised as ours and marked."""
        check_parents(self.root)
        make_private(self.root)
        with Folder(self.root) as root:
            with self._state:  # recognising opens a database, which one thread only may
                known = self.open is not None and not self.lost()
                if not is_recognised(root, known=known):
                    mark(root)
            yield root

    # -- locks between processes ---------------------------------------------------------------

    def _locks(self) -> LockFile:
        file = self._lock_file
        if file is None or file.lost():
            with self._prepared() as root:
                file = self._lock_file = LockFile(root)
        return file

    def _alone(self, root: Folder, patience: float) -> AbstractContextManager[None]:
        """Keep other processes from opening or exchanging the database while the block runs."""
        file = self._lock_file
        if file is None or not file.is_in(root):
            file = self._lock_file = LockFile(root)
        return self._hold(file, _OPENING, patience)

    @contextmanager
    def _hold(self, file: LockFile, which: int, patience: float) -> Generator[None]:
        """Hold a lock between processes; wait in vain once, and then hardly for a while."""
        place = (self.root, which)
        if time.monotonic() < _given_up.get(place, 0.0):
            patience = min(patience, HARDLY)
        with ExitStack() as stack:
            try:
                stack.enter_context(file.held(which, patience))
            except TimeoutError:
                if patience > HARDLY:
                    _given_up[place] = time.monotonic() + GIVEN_UP
                raise
            _given_up.pop(place, None)
            yield

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def writing(self, patience: float = PATIENCE) -> Generator[lmdb.Transaction[bytes]]:
        """Yield a write transaction of this thread, committed at the end of the block.

        Raises:
            TimeoutError: another process, or thread, neither finishes its own nor dies.
            lmdb.Error, OSError: the database can't be opened or written.
        """
        with self._turn(patience):
            for _ in range(_TRIES):
                env = self._open_to_write(patience)
                with self._hold(self._locks(), _WRITING, patience), self._transaction:
                    txn = self._begin(env)
                    if txn is not None:
                        with self._carried_out(txn):
                            yield txn
                        return
            raise lmdb.Error("the database is exchanged all the time")

    def _begin(self, env: lmdb.Environment) -> lmdb.Transaction[bytes] | None:
        """Return a write transaction, or None if another process exchanged or enlarged the file."""
        if env is not self.open:  # a fork closed it meanwhile, which it can't do any more
            env = self._open_to_write(HARDLY)
        try:
            txn = env.begin(write=True)
        except lmdb.MapResizedError:
            self.adopt_size()
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
        """Tell whether what is open is no longer what should be."""
        if self.open is None or self._exchanging:
            return False
        if self._outgrown or (self._provisional and time.monotonic() >= self._provisional):
            return True
        return self._identity() != self._opened

    def _identity(self) -> tuple[int, int] | None:
        try:
            return identity_of(os.stat(self._data, follow_symlinks=False))
        except OSError:
            return None

    def renew(self) -> bool:
        """Let go of what is open if it is no longer what should be, and tell; wait for nobody."""
        if not self.lost():
            return False
        with self._stateful():
            if self._transaction.acquire(blocking=False):
                try:
                    self._close()
                finally:
                    self._transaction.release()
            elif self._outgrown:
                return False  # it is the same file, which must not be open twice
            elif self._provisional:
                self._retire()
                self._retired.pop().close()  # nobody can be writing to it
            else:
                self._retire()
        return True

    def reopen(self) -> None:
        """Close the database; the next use opens what is at its place by then."""
        with self._turn(PATIENCE), self._transaction:
            self._close()

    def adopt_size(self) -> None:
        """Take up the size that another process, with a larger cap, has given to the file.

        Raises:
            lmdb.Error: it is no size that we would give; or another thread is writing.
        """
        if not self._transaction.acquire(timeout=HARDLY):
            raise lmdb.Error("another thread is writing to a database that was enlarged")
        try:
            with Folder(self.root) as root, database(root, "db") as place:
                check_size(place, self.map_size)
            self.get().set_mapsize(0)
        finally:
            self._transaction.release()

    def discard(self, damaged: lmdb.Environment | None, *, patience: float = 0.0) -> None:
        """Start afresh, unless somebody did so already; `damaged` is what was found to be damaged.

        If somebody is in the way for longer than `patience`, that is left to whoever comes next.

        Raises:
            OSError: the files can't be removed.
        """
        if self.read_only:
            return
        with suppress(TimeoutError), self._turn(patience):
            if damaged is not self.open:
                return
            with self._transaction:
                theirs = self.lost()
                self._close()
            if not theirs:
                with self._prepared() as root, self._alone(root, patience):
                    discard(root)

    def exchange(self, txn: lmdb.Transaction[bytes]) -> None:
        """Replace the database by a copy without its free pages.

        The caller is writing, so that nobody else is.

        Raises:
            TimeoutError: somebody is opening it.
            lmdb.Error, OSError, BackendError: it can't be done; nothing has changed.
        """
        env = self.get()
        try:
            self._exchanging = True
            with Folder(self.root) as root, self._alone(root, 0.0):
                exchange(root, env)
        finally:
            self._exchanging = False
        # Who has the old file open finds nothing there, looks, and opens the new one.
        with suppress(lmdb.MapFullError):
            txn.drop(env.open_db(None, txn), delete=False)

    def remove(self) -> None:
        """Remove the database, of which nothing is wanted; the next use makes an empty one.

        Takes no room, unlike `exchange`. The caller is writing, so that nobody else is.

        Raises:
            TimeoutError: somebody is opening it.
            OSError, BackendError: it can't be done; nothing has changed.
        """
        with Folder(self.root) as root, self._alone(root, 0.0):
            settle(root)
            discard(root)

    def make_room(self) -> None:
        """Do what can be done after a write found no room, so that evicting does; wait for nobody.

        A process that is stopped while it reads keeps every page that was in use then. It stays
        with the old file; others go on with a compacted one.
        """
        env = self.open
        if self._lock_file is not None:
            self._lock_file.give_reserve()
        if env is None or self.writer:
            return
        env.reader_check()  # a killed reader keeps pages from being used again
        last: int = env.info()["last_txnid"]
        places = (line.split() for line in env.readers().splitlines()[1:])
        if any(int(txn) + _BEHIND < last for *_, txn in places if txn.isdigit()):
            with self.writing(HARDLY) as txn:
                self.exchange(txn)
            self.renew()

    def file_size(self) -> int:
        """Return the length of the data file, bytes; 0 if there is none."""
        try:
            return os.stat(self._data).st_size
        except OSError:
            return 0

    @contextmanager
    def files(self) -> Generator[str]:
        """Yield a path of the directory of the database, whose file was checked.

        Raises:
            lmdb.Error: it is no file that we have written.
        """
        with Folder(self.root) as root, database(root, "db", "old") as place:
            check_size(place, self.map_size)
            yield place.lasting_path

    # -- forks ---------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Close the database, and keep it closed until after the fork.

        LMDB can't be used in a child that inherits it open, nor let go of there. The next use in
        either process opens it again, in 0.2 ms. A fork within a transaction of its own thread, or
        beside one that takes longer than `FORK_PATIENCE`, leaves it open; the child goes without.
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
        """Begin with nothing of the parent's."""
        self._inherited = self._inherited or self.open is not None
        for each in (self.open, self.txn, *self._retired):
            if each is not None:
                keep_for_ever(each)
        self._held = []
        Environment._guard = threading.RLock()
        self._make_locks()
        self._retired = []
        self._exchanging = False
        self.left_uses.clear()
        self.open = self._opened = self._lock_file = self.txn = None
        self.writer = 0

    def at_exit(self) -> None:
        """Leave what daemon threads use to the operating system."""
        self._exiting = True
        for env in (self.open, *self._retired):
            if env is not None:
                keep_for_ever(env)
