"""Environment: the LMDB database of one directory, whatever happens to its files.

Files of the directory::

    lock                      the mark that the directory is ours; byte 0 is locked while somebody
                              opens, exchanges or discards the database, byte 1 while somebody
                              writes to it
    db/data.mdb, db/lock.mdb  the database, and LMDB's table of readers
    new/, old/                an exchange under way: the compacted copy, and what it replaces
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import ClassVar

import lmdb

from kcache.util.forks import at_fork
from kcache_backends._lmdb_connection import PATIENCE, Connection
from kcache_backends._lmdb_files import check_size
from kcache_backends._lmdb_folder import Folder
from kcache_backends._lmdb_locks import HARDLY, OPENING, WRITING, ClosedError
from kcache_backends._lmdb_opening import database, discard, exchange, settle

__all__ = ["HARDLY", "PATIENCE", "Environment"]

#: How often an operation is tried if another process or thread exchanges its database.
_TRIES = 4
#: A reader that is this many transactions behind is stopped; it is not reading.
_BEHIND = 16


class Environment(Connection):
    """The LMDB database of one real path, shared by whatever uses it in this process.

    LMDB must not open a file twice in one process; `of` returns the environment that is there, and
    the registry keeps it until it has closed its database. A damaged file is discarded; a file that
    somebody removed is created again. A directory that holds foreign files is left as it is.

    Threads: safe to share. Processes: one that is stopped in the middle of a change keeps others
    from changing anything, `PATIENCE` at first and then not at all; reads go on. Fork: a child
    opens its own, and leaves the parent's alone.
    """

    _all: ClassVar[dict[str, Environment]] = {}
    _guard = threading.RLock()

    def __init__(self, root: str, map_size: int, *, read_only: bool) -> None:
        super().__init__(root, map_size, read_only=read_only)
        #: How many bytes of entries are allowed since the disk was found full; 0: any number.
        self.full_at = 0
        #: Uses that a backend could not write when the program closed it.
        self.left_uses: deque[dict[str, int]] = deque()

    @classmethod
    def of(cls, root: str, map_size: int, user: object, *, read_only: bool) -> Environment:
        """Return the environment of `root`, with one more user."""
        with cls._guard:
            for path, each in list(cls._all.items()):
                if path != root and each.is_idle():
                    del cls._all[path]
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

    @classmethod
    def forget_guard(cls) -> None:
        """Make a new lock in a child process: a thread that is not there may have the old one."""
        cls._guard = threading.RLock()

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def writing(self, patience: float = PATIENCE) -> Generator[lmdb.Transaction[bytes]]:
        """Yield a write transaction of this thread, committed at the end of the block.

        Raises:
            TimeoutError: another process, or thread, neither finishes its own nor dies.
            lmdb.Error, OSError: the database can't be opened or written.
        """
        failure: Exception = lmdb.Error("others replace the database all the time")
        with self._with(self._changing, patience):
            for _ in range(_TRIES):
                txn = None
                try:
                    env = self._open_to_write(patience)
                    with (
                        self._locks.held(WRITING, patience),
                        self._with(self._transaction, patience),
                    ):
                        txn = self._begin(env)
                        if txn is not None:
                            with self._carried_out(txn):
                                yield txn
                            return
                except ClosedError:
                    self.reopen()  # this notices the error, and closes the database
                    raise
                except FileNotFoundError as error:
                    if txn is not None:
                        raise
                    # Another process is removing the directory; it is created again.
                    failure = error
                    with suppress(FileNotFoundError), self._prepared():
                        pass
            raise failure

    def _begin(self, env: lmdb.Environment) -> lmdb.Transaction[bytes] | None:
        """Return a write transaction; None if another process exchanged or enlarged the file."""
        if env is not self.open:  # a fork closed it in the meantime and can't close it again
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
        """Make a transaction this thread's for the block, and end it even after an interrupt."""
        try:
            self.txn, self.writer = txn, threading.get_ident()
            yield
            self._require_whole()
            self.txn, self.writer = None, self._nobody
            txn.commit()
        except BaseException:
            self.txn, self.writer = None, self._nobody
            with suppress(lmdb.Error):  # the transaction has ended already
                txn.abort()
            raise

    # -- replacing -----------------------------------------------------------------------------

    def reopen(self) -> None:
        """Close the database; the next use opens the file that is at its path then."""
        with (
            self._with(self._changing, PATIENCE),
            self._with(self._transaction, PATIENCE),
            self._with(self._state, PATIENCE),
        ):
            self._close()

    def adopt_size(self) -> None:
        """Take up the size that another process, with a larger cap, has given to the file.

        Raises:
            lmdb.Error: it is no size that kcache would give; or another thread is writing.
        """
        if not self._transaction.acquire(timeout=HARDLY):
            raise lmdb.Error("another thread is writing to a database that was enlarged")
        try:
            with Folder(self.root) as root, database(root, "db") as place:
                check_size(place, self.map_size)
            env = self.get()
            self._require_whole()
            env.set_mapsize(0)
            self._measure(env)
        finally:
            self._transaction.release()

    def discard(self, damaged: lmdb.Environment | None, *, patience: float = 0.0) -> None:
        """Replace the `damaged` database by an empty one, unless somebody did so already.

        If another process holds the lock for longer than `patience`, the next user does it.

        Raises:
            OSError: the files can't be removed.
        """
        if self.read_only:
            return
        with suppress(TimeoutError), self._with(self._changing, patience):
            if damaged is not self.open:
                return
            with self._with(self._transaction, HARDLY), self._with(self._state, PATIENCE):
                theirs = self.lost()
                self._close()
            if not theirs:
                with self._prepared() as root, self._locks.held(OPENING, patience, root):
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
            self._exchanging = txn
            with Folder(self.root) as root, self._locks.held(OPENING, 0.0, root):
                exchange(root, env)
        finally:
            self._exchanging = None
        # A process that has the old file open finds no entries there. It looks again and opens the
        # new file.
        with suppress(lmdb.MapFullError):
            txn.drop(env.open_db(None, txn), delete=False)

    def remove(self) -> None:
        """Remove the database with all entries; the next use makes an empty one.

        It needs no free space, unlike `exchange`. The caller is writing, so that nobody else is.

        Raises:
            TimeoutError: somebody is opening it.
            OSError, BackendError: it can't be done; nothing has changed.
        """
        with Folder(self.root) as root, self._locks.held(OPENING, 0.0, root):
            settle(root)
            discard(root)

    def make_room(self) -> None:
        """Free what can be freed after a write found no room, so that evicting can write.

        It waits for nobody. A process that is stopped while it reads keeps every page that was in
        use then. It keeps the old file; others go on with a compacted one.
        """
        env = self.open
        self._locks.give_reserve()
        if env is None or self.txn is not None:
            return
        # As long as a killed reader is in the table, LMDB can't use its pages again.
        env.reader_check()
        last: int = env.info()["last_txnid"]
        readers = (line.split() for line in env.readers().splitlines()[1:])
        if any(int(txn) + _BEHIND < last for *_, txn in readers if txn.isdigit()):
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

    def after_fork_in_child(self) -> None:
        """Forget everything that belongs to the parent."""
        super().after_fork_in_child()
        self.left_uses.clear()


at_fork(in_child=Environment.forget_guard)
