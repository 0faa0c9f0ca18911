"""Environment: the LMDB database of one folder, opened once in each process."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import ClassVar, TypeVar
from weakref import WeakValueDictionary

import lmdb

from kcache.errors import BackendError, CorruptEntryError
from kcache.util.forks import after_fork, at_end, at_fork, is_ending
from kcache.util.locks import Backoff, unlock
from kcache.util.open_file import NotOursError, OwnFile, identity
from kcache_backends import _lmdb_files as files
from kcache_backends import _lmdb_records as records
from kcache_backends._lmdb_files import DAMAGE

T = TypeVar("T")

#: How long a thread waits for another thread or process, in seconds. LMDB's own lock has no
#: time-out, so a thread acquires it only after it has locked the byte `_WRITING`.
PATIENCE = 10.0
#: How long a thread waits, in seconds, before it leaves work for later.
SHORT_WAIT = 0.1
#: How long a fork waits for a transaction of this process, in seconds. A commit takes some 10 ms;
#: on a busy disk it can take a second.
FORK_PATIENCE = 5.0
#: A hit checks whether the open database was replaced if this many seconds have passed since the
#: last check. Every change and every miss makes this check.
LOOK_AGAIN = 0.1
#: A file that has no entries left is removed if it has more than this many bytes.
SMALL_FILE = 1 << 20
#: If a reader is more than this many transactions behind, its process is considered stopped.
_BEHIND = 16
#: How often a read is tried while other threads or processes open or replace the database, and the
#: pause between two tries, in seconds.
_TRIES, _PAUSE = 5, 1e-3
#: The bytes of the file `lock` that are locked: one to open or replace the database, one to write.
_OPENING, _WRITING = 0, 1
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_CLOSED = "the program has closed descriptors that LMDB had open"


class Environment:
    """The LMDB database at one real path, shared by all backends in this process that use it.

    A process must not open an LMDB file twice, so `of` returns the existing environment if there is
    one. The database is closed with the last reference to this object. A damaged database is
    replaced by an empty one, and a removed database is created again.

    Threads: several threads may use one object. Only the thread that holds `_busy` writes, opens or
    closes the database; the other threads read. When py-lmdb closes the database, it ends the reads
    that are under way, and `read` tries them again. Processes: if a process is stopped in the
    middle of a change, other processes wait `PATIENCE` seconds for the lock, and their change
    fails. During the next minute, their changes fail at once if the lock is still held. Reads are
    not affected. Fork: the database is closed before the fork, and parent and child open it again.
    So a fork waits for a transaction of this process, at most `FORK_PATIENCE` seconds. Exit: if
    daemon threads still run, the exit of the process waits in the same way.

    Args:
        root: the folder, a real path.
        map_size: the size up to which the data file may grow, in bytes.
        read_only: create and change nothing.
    """

    _all: ClassVar[WeakValueDictionary[str, Environment]] = WeakValueDictionary()
    _guard: ClassVar = threading.RLock()

    def __init__(self, root: str, map_size: int, *, read_only: bool) -> None:
        self.root = root
        self._data = files.data_of(root)
        self.map_size = map_size
        self.read_only = read_only
        #: The open database, or None.
        self.env: lmdb.Environment | None = None
        #: The transaction of the thread that writes, which holds `_busy`.
        self.txn: lmdb.Transaction[bytes] | None = None
        #: The first error within the transaction.
        self._error: lmdb.Error | OSError | None = None
        #: When a hit next checks whether the database was replaced (`time.monotonic`).
        self._look_at = 0.0
        #: The times of uses that are not written yet, by key, and the time from which a use writes
        #: them; 0 if there are none.
        self.uses: dict[str, int] = {}
        self.uses_due = 0
        #: The identity of the data file, and of the file behind each descriptor of the database.
        self._file: tuple[int, int] | None = None
        self._numbers: dict[int, tuple[int, int]] = {}
        #: Whether the database must be opened again, with a larger map or for writing.
        self._outgrown = False
        #: Why this process can't open the database any more; empty if it can.
        self._lost = ""
        self._patience = Backoff(PATIENCE)
        #: Held by the thread that writes, also while it waits for other processes.
        self._writer = threading.RLock()
        #: Held to write, open or close the database; and whether a fork holds it.
        self._busy, self._suspended = threading.RLock(), False
        after_fork(self)

    @classmethod
    def of(cls, root: str, map_size: int, *, read_only: bool) -> Environment:
        """Return the environment of `root`; create the environment if there is none.

        If `map_size` is larger than before, or `read_only` is now false, the environment opens its
        database again.
        """
        with cls._guard:
            found = cls._all.get(root)
            if found is None:
                found = cls._all[root] = cls(root, map_size, read_only=read_only)
            elif map_size > found.map_size or (found.read_only and not read_only):
                found.map_size = max(found.map_size, map_size)
                found.read_only &= read_only
                found._outgrown = True
            return found

    def __del__(self) -> None:
        # In the meantime, `of` may return this object to another thread, which then opens it.
        with suppress(Exception), _held(self._busy, SHORT_WAIT):
            self._close()

    def _failed(self, operation: str, error: lmdb.Error | OSError) -> BackendError:
        """Return the exception for an error.

        Within a transaction, return the exception for the transaction's first error, which has
        caused the later ones.
        """
        if self._own_transaction():
            error = self._error = self._error or error
        return files.failed(operation, self.root, error)

    def _own_transaction(self) -> lmdb.Transaction[bytes] | None:
        return self.txn if self.txn is not None and _is_owned(self._busy) else None

    # -- reading -------------------------------------------------------------------------------

    def read(
        self, look: Callable[[lmdb.Transaction[bytes]], T], *, recent: bool = False
    ) -> T | None:
        """Return what `look` returns for a transaction, or None if there is no database.

        The transaction is this thread's write transaction, or else a new read transaction. With
        `recent`, the database that is read may have been replaced up to `LOOK_AGAIN` seconds ago.

        Raises:
            CorruptEntryError: the database is damaged. If possible, an empty one has replaced it.
            BackendError: the database can't be read.
        """
        try:
            if (own := self._own_transaction()) is not None:
                return look(own)
            return self._read(look, recent)
        except (lmdb.Error, OSError) as error:
            raise self._failed("read", error) from error

    def _read(self, look: Callable[[lmdb.Transaction[bytes]], T], recent: bool) -> T | None:
        reason: Exception = lmdb.Error(f"the database was replaced during each of {_TRIES} reads")
        for _ in range(_TRIES):
            env = None
            try:
                if (env := self._current(recent)) is None:
                    return None
                txn = env.begin()
                try:
                    return look(txn)
                finally:
                    txn.abort()
            except DAMAGE as error:
                self.begin_anew(env)
                raise CorruptEntryError(f"{self.root} is damaged: {error}") from error
            except lmdb.Error as error:  # closed by another thread, enlarged by a process, ...
                reason = error
                with suppress(TimeoutError), _held(self._busy, SHORT_WAIT):
                    if env is None or env is self.env:  # an interrupt may have left it closed
                        self._close()
            time.sleep(_PAUSE)
        raise reason

    def _current(self, recent: bool) -> lmdb.Environment | None:
        """Return the database that is at the path now, or None; open it if necessary.

        If the open database was replaced while another thread is writing to it, it is returned,
        because it can't be closed yet. With `recent`, the path is checked only every `LOOK_AGAIN`
        seconds.
        """
        now = time.monotonic()
        if recent and now < self._look_at and (env := self.env) is not None:
            return env
        if self.env is None or self.is_replaced():
            try:
                with _held(self._busy, PATIENCE if self.env is None else 0.0):
                    self._refresh()
            except TimeoutError:
                if self.env is None:
                    raise
        self._look_at = now + LOOK_AGAIN
        return self.env

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def writing(
        self, operation: str, patience: float | None = None
    ) -> Generator[lmdb.Transaction[bytes]]:
        """Yield this thread's write transaction; the outermost block commits it.

        The transaction also writes the noted uses. `patience` limits the wait for other threads and
        processes, in seconds. The default is `PATIENCE`.

        Raises:
            FullError: the disk or the memory map is full.
            BackendError: the database can't be opened or written, or another thread or process does
                not finish its own transaction in time.
        """
        own, begun = self._own_transaction(), False
        try:
            if own is not None:
                yield own
                return
            patience = PATIENCE if patience is None else patience
            with (  # an ExitStack would be a reference cycle
                _held(self._writer, patience),
                self._locked(_WRITING, patience),
                _held(self._busy, patience),
            ):
                with self._transaction() as txn:
                    begun = True
                    yield txn
                if files.is_nearly_full(self.root, 0):
                    # The pages that this transaction freed are usable after one more transaction.
                    with suppress(lmdb.Error, OSError), self._transaction() as txn:
                        records.add_to_sums(txn, 0, 0)
        except (lmdb.Error, OSError) as error:
            if isinstance(error, OSError) and (begun or own is not None):  # from the caller's block
                raise
            raise self._failed(operation, error) from error

    @contextmanager
    def _transaction(self) -> Generator[lmdb.Transaction[bytes]]:
        txn, env = self._begin(), self.env
        uses, self.uses, self.uses_due = self.uses, {}, 0
        try:
            self._error, self.txn = None, txn
            for key, used in list(uses.items()):
                records.use(txn, bytes.fromhex(key), used)
            yield txn
            if self.env is not env or not self._is_whole():
                raise BackendError(f"{self.root}: {self._lost or _CLOSED}")
            txn.commit()
        except BaseException as error:
            if self.env is env:  # otherwise, this is a child of the process that began `txn`
                with suppress(lmdb.Error):
                    txn.abort()
                reason = self._error or error
                # After an error of LMDB or the disk, uses are dropped: they could cause it again.
                if not isinstance(reason, (lmdb.Error, OSError)):
                    self.uses = uses | self.uses
                self._recover(reason)
            if self._error and isinstance(error, lmdb.Error):
                raise self._error from error
            raise
        finally:
            self.txn = None
        with suppress(lmdb.Error, OSError, BackendError):  # one record is always there: the sums
            if env and env.stat()["entries"] == 1 and os.path.getsize(self._data) > SMALL_FILE:
                self._begin_anew()

    def _begin(self) -> lmdb.Transaction[bytes]:
        """Begin a transaction; try again if another process has enlarged the database."""
        for again in (True, False):
            self._refresh()
            try:
                if self.env is not None:
                    return self.env.begin(write=True)
            except lmdb.Error:
                self._close()
                if not again:
                    raise
        raise BackendError(f"{self.root} is read-only")

    def _recover(self, error: BaseException) -> None:
        """After a transaction that failed with `error`, try to make the next transaction succeed.

        If a process was stopped in the middle of a read, LMDB can't reuse any page that was in use
        then. If the map is full for this reason, the database is replaced by an empty one.
        """
        with suppress(lmdb.Error, OSError, BackendError):
            if isinstance(error, lmdb.MapFullError) and self.env is not None:
                self.env.reader_check()  # removes readers that were killed
                last: int = self.env.info()["last_txnid"]
                readers = (line.split() for line in self.env.readers().splitlines()[1:])
                if any(int(at) + _BEHIND < last for *_, at in readers if at.isdigit()):
                    self._begin_anew()
            elif isinstance(error, DAMAGE):
                self._begin_anew()
            elif isinstance(error, (lmdb.Error, OSError)):
                self._close()

    # -- the file ------------------------------------------------------------------------------

    def is_replaced(self) -> bool:
        """Return whether the database must be opened again.

        It must if its file was replaced, or if a larger map or access for writing is needed.
        """
        try:
            found = identity(os.stat(self._data, follow_symlinks=False))
        except OSError:
            return True
        return found != self._file or self._outgrown

    def begin_anew(self, env: lmdb.Environment | None) -> None:
        """Replace the damaged database `env` by an empty one, unless `env` is no longer in use."""
        with suppress(TimeoutError), _held(self._busy, SHORT_WAIT):
            if env is self.env and not self.read_only:
                self._begin_anew()

    # -- opening and closing: the caller holds `_busy` -----------------------------------------

    def _begin_anew(self) -> None:
        with self._locked(_OPENING, SHORT_WAIT):
            theirs = self.is_replaced()
            self._close()
            if not theirs:
                files.discard(self.root)

    def _refresh(self) -> None:
        """Open the database that is at the path, unless it is open already."""
        if self.env is not None and not self.is_replaced():
            return
        self._close()
        if self._lost or is_ending():
            raise BackendError(f"{self.root}: {self._lost or 'the interpreter is shutting down'}")
        self._numbers, self._file = {}, None  # after an interrupt here, the next call opens again
        self._open()
        if self.env is not None:
            self._outgrown = False
            self._file = identity(os.stat(self._data, follow_symlinks=False))

    def _open(self) -> None:
        """Open the database for writing, or only for reading if writing is not permitted.

        The new environment is assigned to `self.env` immediately. If an interrupt came between, and
        the only reference to the environment were lost, this process could not open the database
        again.
        """
        if not self.read_only:
            try:
                with self._locked(_OPENING, PATIENCE) as file:
                    self.env = files.open_database(self.root, self.map_size, read_only=False)
                    self._numbers = files.descriptors(self.root, file.fd)
                    return
            except NotOursError:
                raise
            except OSError as error:
                if error.errno not in _DENIED:
                    raise
        self.env = files.open_database(self.root, self.map_size, read_only=True)

    @contextmanager
    def _locked(self, which: int, patience: float) -> Generator[OwnFile]:
        """Yield the folder's file `lock`, and keep one of its bytes locked in the block.

        Raises:
            NotOursError: the folder holds files of another program.
            OSError: the file can't be opened; TimeoutError: another process kept the lock.
        """
        with files.open_lock(self.root) as file:
            try:
                self._patience.lock(file, which, seconds=patience)
                yield file
            finally:  # a forked child's copy of the file would keep the lock
                unlock(file, which)

    def _is_whole(self) -> bool:
        """Return whether the program has left all known descriptors of the database open."""
        return all(files.leads_to(each, at) for each, at in self._numbers.items())

    def _close(self) -> None:
        """Close the database, unless that would close files of the program.

        It would if the program has closed LMDB's descriptors and opened others with their numbers.
        In that case, the database stays open until the process ends, and is not opened again.
        """
        if self.env is not None and not self._is_whole():
            files.leak(self.env)
            self._lost = _CLOSED
        elif self.env is not None:
            self._numbers = {}
            self.env.close()
        self.env, self._look_at = None, 0.0

    # -- forks and the exit --------------------------------------------------------------------

    def suspend(self) -> None:
        """Close the database, and keep other threads from opening it until `resume` is called.

        The database stays open if this thread is in a transaction, or if the transaction of another
        thread takes longer than `FORK_PATIENCE` seconds.
        """
        self._suspended = not _is_owned(self._busy)
        if self._suspended and self._busy.acquire(timeout=FORK_PATIENCE):
            self._close()

    def resume(self) -> None:
        """End the effect of `suspend`: let other threads open the database."""
        with suppress(RuntimeError):  # it was not suspended
            while self._suspended:
                self._busy.release()

    def after_fork(self) -> None:
        """Forget, in a child process, everything that belongs to the parent."""
        lost = self._lost
        if self.env is not None:
            files.leak(self.env)
            lost = "the process was forked in the middle of a transaction"
            self.env = None
        Environment.__init__(self, self.root, self.map_size, read_only=self.read_only)
        self._lost = lost


def _is_owned(mutex: threading.RLock) -> bool:
    return mutex._is_owned()  # type: ignore[attr-defined,no-any-return]  # pyright: ignore


@contextmanager
def _held(mutex: threading.RLock, patience: float) -> Generator[None]:
    """Hold the lock `mutex`, which excludes other threads, in the block.

    Raises:
        TimeoutError: another thread did not release the lock within `patience` seconds, or this
            thread already holds it.
    """
    if _is_owned(mutex) or not mutex.acquire(timeout=patience):
        raise TimeoutError(errno.ETIMEDOUT, "another thread is writing")
    try:
        yield
    finally:
        mutex.release()


def _before_fork() -> None:
    Environment._guard.acquire()
    for each in list(Environment._all.values()):
        each.suspend()


def _after_fork() -> None:
    for each in list(Environment._all.values()):
        each.resume()
    Environment._guard.release()


def _at_end() -> None:
    for each in list(Environment._all.values()):
        each.suspend()
        if each.env is not None:
            files.leak(each.env)
        each.resume()


at_fork(_before_fork, _after_fork)
at_end(_at_end)
