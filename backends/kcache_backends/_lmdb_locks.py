"""LMDB locks: exclude processes that use one database. Each wait has a limit."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress

from kcache.errors import BackendError
from kcache.util.locks import RangeLocks
from kcache.util.open_file import OpenFile, identity
from kcache_backends._lmdb_files import LOCK, MARK
from kcache_backends._lmdb_folder import Folder

__all__ = [
    "CLOSED",
    "GIVEN_UP",
    "HARDLY",
    "OPENING",
    "WRITING",
    "ClosedError",
    "LockFile",
    "Locks",
    "given_up",
]

#: The bytes of the file that are locked: one to open, exchange or discard the database, and one to
#: write.
OPENING, WRITING = 0, 1
#: A process that waits for a lock holds the byte that is this far behind it. Without this, a thread
#: that writes again and again would always take the lock before the processes that look for it now
#: and then.
_TURN = 2
#: Once in this many times, a lock is taken in turn even if it is free. Not each time, because a
#: turn costs two system calls.
_TURNS = 16
#: How long a process waits for its turn, in seconds. A process that was stopped while it waited
#: must not block others.
_TURN_PATIENCE = 1.0
#: How many bytes of the file `lock` are allocated as a reserve for a full disk. LMDB copies what it
#: changes, so without a reserve it could not even write an eviction. An eviction of 10 % copies
#: some 3 % of small entries.
_RESERVE = 256 << 10
#: Seconds between two tries for a lock: the first pause, and the longest. A holder keeps it for 0.1
#: ms (to open) up to some 10 ms (a commit that the disk confirms).
_FIRST_PAUSE = 50e-6
_LONGEST_PAUSE = 5e-3
#: ... and the share of the time waited so far that a pause takes.
_PAUSE_SHARE = 1 / 16
#: After a wait in vain, no further wait for this lock begins for this many seconds. A process that
#: was stopped (by a debugger, say) usually stays so for longer.
GIVEN_UP = 60.0
#: ... except for this long, in seconds: another writer may hold it for a moment.
HARDLY = 0.1

#: The reason why a process works without a database: LMDB opens no file twice.
CLOSED = "the program has closed descriptors that LMDB had open"

#: Until when a wait for a lock of a directory is not worth while, in seconds. It is kept here so
#: that a backend which opens the directory again does not wait again.
given_up: dict[tuple[str, int], float] = {}


class ClosedError(BackendError):
    """The program has closed descriptors that are not its own; nothing may be written to them."""


class LockFile:
    """The file `lock`, open: locks between processes, the mark, and a reserve for a full disk.

    The file is closed with the object, which whoever holds a lock refers to. Fork: a child closes
    the file, so that the locks stay with its parent.

    Raises:
        FileNotFoundError: it is not there; only `mark` makes it.
    """

    def __init__(self, root: Folder) -> None:
        self._path = os.path.join(root.path, LOCK)
        fd, status = root.open_with_status(LOCK, os.O_RDWR)
        self._file = OpenFile(fd, status)
        self._locks = RangeLocks(self._file)
        self._entered = 0
        with suppress(OSError):
            if status.st_size < _RESERVE and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, _RESERVE)

    def is_open(self) -> bool:
        """Tell whether the program has left its descriptor alone."""
        return self._file.is_open()

    def is_in(self, root: Folder) -> bool:
        """Tell whether it is the file that is there now."""
        status = root.status(LOCK)
        return status is not None and identity(status) == self._file.identity

    def lost(self) -> bool:
        """Tell whether the path leads elsewhere."""
        try:
            return not self._file.is_at(self._path)
        except OSError:
            return True

    @contextmanager
    def held(self, start: int, timeout: float) -> Generator[None]:
        """Hold a lock while the block runs; wait for it for at most `timeout` seconds.

        Waiters get it in no fixed order, but a holder that asks again and again lets one of them go
        first.

        Raises:
            TimeoutError: another process or thread held it all the time.
        """
        self._entered += 1
        with ExitStack() as stack:
            if self._entered % _TURNS == 0 or not self._take(stack, start):
                self._take_in_turn(stack, start, timeout)
            # This frame refers to the object, and so keeps the file open.
            yield

    def _take(self, stack: ExitStack, start: int) -> bool:
        """Take a lock until the stack is closed, if it is free; tell whether it was."""
        try:
            stack.enter_context(self._locks.held(start, 1, timeout=0.0))
        except TimeoutError:
            return False
        return True

    def _take_in_turn(self, stack: ExitStack, start: int, timeout: float) -> None:
        """Take a lock until the stack is closed; wait for it, and let others know meanwhile."""
        begun = now = time.monotonic()
        with ExitStack() as turn:
            with suppress(TimeoutError):
                patience = min(timeout, _TURN_PATIENCE)
                turn.enter_context(self._locks.held(start + _TURN, 1, timeout=patience))
            while not self._take(stack, start):
                # No other process gets the lock in the meantime, so a long sleep would leave it
                # unused.
                pause = min(max(_FIRST_PAUSE, (now - begun) * _PAUSE_SHARE), _LONGEST_PAUSE)
                if now + pause > begun + timeout:
                    raise TimeoutError(errno.ETIMEDOUT, "somebody else holds the lock")
                time.sleep(pause)
                now = time.monotonic()

    def give_reserve(self) -> None:
        """Release the reserve, so that an eviction finds a page on a full disk."""
        with suppress(OSError):
            if self.is_open():
                os.truncate(self._file.fd, len(MARK))


class Locks:
    """The locks of one directory, and how long it is worth while to wait for each.

    Threads: safe to share. Fork: a child begins with no file. If a process is stopped while it
    holds one, this process waits for it once; for a while after that, it hardly waits at all.

    Args:
        path: the directory.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: LockFile | None = None
        self._closed = False
        #: Whether a read has already waited in vain for the process that opens the database. The
        #: next read need not wait.
        self.is_stopped = False

    def close(self) -> None:
        """Release the file; a thread that holds a lock keeps it open meanwhile."""
        self._file = None

    def is_open(self) -> bool:
        """Tell whether the file is open."""
        return self._file is not None

    def is_whole(self) -> bool:
        """Tell whether the program has left the file open, and closed no descriptors of others.

        Otherwise LMDB's descriptors are closed, too, and their numbers may belong to other files.
        """
        if self._file is not None and not self._file.is_open():
            self._closed = True
        return not self._closed

    def give_reserve(self) -> None:
        """Release the reserve of the file, if it is open, on a full disk."""
        if self._file is not None:
            self._file.give_reserve()

    @contextmanager
    def held(self, which: int, patience: float, root: Folder | None = None) -> Generator[None]:
        """Hold a lock while the block runs.

        Args:
            which: the lock.
            patience: seconds to wait for another process, at most.
            root: the directory, if the caller has it open.

        Raises:
            TimeoutError: another process held it all the time.
            FileNotFoundError: somebody has removed the file.
            ClosedError: the program has closed the file.
        """
        lock = (self._path, which)
        if time.monotonic() < given_up.get(lock, 0.0):
            patience = min(patience, HARDLY)
        held = False
        try:
            with self._in(root).held(which, patience):
                held = True
                given_up.pop(lock, None)
                self.is_stopped = self.is_stopped and which != OPENING
                yield
        except TimeoutError:
            if not held and patience > HARDLY:
                given_up[lock] = time.monotonic() + GIVEN_UP
            raise

    def _in(self, root: Folder | None) -> LockFile:
        """Return the file that is in the directory now."""
        if not self.is_whole():
            raise ClosedError(f"{self._path}: {CLOSED}")
        file = self._file
        if root is not None:
            if file is None or not file.is_in(root):
                file = self._file = LockFile(root)
        elif file is None or file.lost():
            with Folder(self._path) as folder:
                file = self._file = LockFile(folder)
        return file
