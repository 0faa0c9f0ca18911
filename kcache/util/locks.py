"""Locks between processes, on byte ranges of a file.

A lock is held as long as its file is open. Python closes the file when the last reference to it is
gone, and the kernel releases the locks of a process that ends.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcache.util.open_file import OwnFile

#: The first and the longest pause in seconds between two attempts to acquire a lock that another
#: process holds. Processes hold a lock for 0.1 ms (for a rename) up to some 10 ms (for a commit
#: that the disk confirms).
_FIRST_PAUSE = 50e-6
_LONGEST_PAUSE = 5e-3
#: After a timeout, a process does not wait for that lock again for this many seconds.
_GIVEN_UP = 60.0
#: The errors of file systems that have no locks (NFS without lockd, some FUSE file systems).
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

if sys.platform == "win32":  # untested: no Windows machine in CI
    import msvcrt

    def _range_lock(fd: int, start: int, length: int) -> bool:
        os.lseek(fd, start, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, length)
        except OSError:
            return False
        return True

    def _is_locked(fd: int, start: int, length: int) -> bool:
        if _range_lock(fd, start, length):
            _range_unlock(fd, start, length)
            return False
        return True

    def _range_unlock(fd: int, start: int, length: int) -> None:
        with suppress(OSError):
            os.lseek(fd, start, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_UNLCK, length)

    _DIRECTORY = 0

    def _lock_directory(_fd: int) -> bool:
        raise OSError("directories have no locks on Windows")

    def _unlock_directory(fd: int) -> None:
        pass

else:
    import fcntl

    # Open-file-description locks (Linux 3.15, macOS) belong to the open file, not to the process:
    # two open files of one process exclude each other, and closing one of them does not release
    # the locks of the other. See fcntl(2). Other systems do not have these locks (EINVAL). The
    # locks that they have would end as soon as any thread closes the file.
    if sys.platform == "darwin":  # the numbers are from macOS's <fcntl.h>; untested
        _SETLK, _GETLK = 90, 92
        _FLOCK = struct.Struct("qqihh")
        _KIND = slice(20, 22)

        def _flock(kind: int, start: int, length: int) -> bytes:
            return _FLOCK.pack(start, length, 0, kind, os.SEEK_SET)

    else:
        _SETLK: int = getattr(fcntl, "F_OFD_SETLK", -1)
        _GETLK: int = getattr(fcntl, "F_OFD_GETLK", -1)
        _FLOCK = struct.Struct("hhqqi4x")
        _KIND = slice(0, 2)

        def _flock(kind: int, start: int, length: int) -> bytes:
            return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)

    def _range_lock(fd: int, start: int, length: int) -> bool:
        try:
            fcntl.fcntl(fd, _SETLK, _flock(fcntl.F_WRLCK, start, length))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _is_locked(fd: int, start: int, length: int) -> bool:
        found = fcntl.fcntl(fd, _GETLK, _flock(fcntl.F_WRLCK, start, length))
        return found[_KIND] != _flock(fcntl.F_UNLCK, 0, 0)[_KIND]

    def _range_unlock(fd: int, start: int, length: int) -> None:
        # An error means that the program has closed the file, which has released the lock.
        with suppress(OSError):
            fcntl.fcntl(fd, _SETLK, _flock(fcntl.F_UNLCK, start, length))

    _DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC

    def _lock_directory(fd: int) -> bool:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _unlock_directory(fd: int) -> None:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


# -- between processes -----------------------------------------------------------------------------


def lock(file: OwnFile, start: int, length: int = 1, *, timeout: float = 0.0) -> bool:
    """Lock `length` bytes of a file from `start` on, until the file is closed.

    Return True if the bytes are locked now, or False if this file system has no locks. The lock
    excludes other processes, and threads of this process that have opened the file themselves. This
    function waits for the lock at most `timeout` seconds.

    Raises:
        TimeoutError: another process or thread held the lock during the whole wait.
        OSError: the file can't be locked.
    """
    try:
        _acquire(lambda: _range_lock(file.fd, start, length), timeout)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def _acquire(take: Callable[[], bool], timeout: float) -> None:
    """Call `take` until it returns True; raise TimeoutError after `timeout` seconds."""
    pause, deadline = _FIRST_PAUSE, time.monotonic() + timeout
    while not take():
        if time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, "the lock timed out: another process holds it")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def is_locked(file: OwnFile, start: int, length: int = 1) -> bool:
    """Return whether another opened file has a lock on any of `length` bytes from `start` on.

    The other opened file belongs to another process, or to a thread that has opened it itself.

    Raises:
        OSError: this file system has no locks, or the query failed.
    """
    return _is_locked(file.fd, start, length)


def unlock(file: OwnFile, start: int, length: int = 1) -> None:
    """Release the lock on a byte range, even if a forked child has a copy of the open file."""
    with suppress(OSError, ValueError):  # the file is closed
        _range_unlock(file.fd, start, length)


def release(file: OwnFile) -> None:
    """Release all locks on a file and close the file.

    Closing alone is not enough: a child that was forked while the file was being opened has a copy
    of the open file, which the child does not close, and which would keep the locks.
    """
    unlock(file, 0, 0)
    file.close()


@contextmanager
def locked_directory(path: str, timeout: float) -> Generator[None]:
    """Return a context manager that locks a directory without creating a file in it.

    The lock excludes other processes on this machine, and other threads. Crash: the kernel releases
    the lock of a killed process.

    Raises:
        TimeoutError: another process or thread held the lock for `timeout` seconds.
        OSError: the directory can't be opened or locked.
    """
    directory = os.open(path, os.O_RDONLY | _DIRECTORY)
    try:
        _acquire(lambda: _lock_directory(directory), timeout)
        yield
    finally:
        _unlock_directory(directory)  # a child that was forked in the block may have a copy open
        os.close(directory)


class Backoff:
    """Acquires locks with a timeout; in the minute after a timeout, it tries once without waiting.

    A lock that was not released in time is often held by a stopped process, which usually stays
    stopped for longer than a minute. Without this back-off, the waits for its lock would add up.

    Args:
        seconds: how many seconds to wait for a lock by default.
    """

    __slots__ = ("_given_up", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._given_up: dict[Hashable, float] = {}

    def lock(
        self, file: OwnFile, start: int, length: int = 1, *, seconds: float | None = None
    ) -> bool:
        """Call the function `lock` with a timeout of `seconds`, by default the usual timeout.

        Within one minute after a timeout on the byte `start`, this tries only once and does not
        wait. A timeout after a wait shorter than the usual one does not start this minute, because
        it does not show that the holder is stopped.

        Raises:
            TimeoutError, OSError: the same errors as for the function `lock`.
        """
        most = self.seconds if seconds is None else seconds
        if time.monotonic() < self._given_up.get(start, 0.0):
            most = 0.0
        try:
            return lock(file, start, length, timeout=most)
        except TimeoutError:
            if most >= self.seconds:
                self._given_up[start] = time.monotonic() + _GIVEN_UP
            raise


# -- reading and writing at an offset, also on systems that have no calls for this -----------------

if sys.platform != "win32":
    pread = os.pread
    pwrite = os.pwrite
else:  # Windows; untested there
    _seeking = threading.Lock()

    def pread(fd: int, length: int, offset: int, /) -> bytes:
        """Return up to `length` bytes of the file `fd` from `offset` on."""
        with _seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.read(fd, length)

    def pwrite(fd: int, data: bytes, offset: int, /) -> int:
        """Write `data` to the file `fd` at `offset`; return how many bytes were written."""
        with _seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, data)
