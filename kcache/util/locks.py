"""Locks between processes, on byte ranges of a file; the kernel releases those of a dead process.

A lock is held as long as its file is open, and Python closes the file with its last reference.
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

#: Seconds between two tries for a lock that another process holds: the first pause, and the
#: longest. A holder keeps it for 0.1 ms (a rename) up to some 10 ms (a commit that the disk
#: confirms).
_FIRST_PAUSE = 50e-6
_LONGEST_PAUSE = 5e-3
#: After a timeout, a process does not wait for that lock again for this many seconds.
_GIVEN_UP = 60.0
#: Errors of file systems without locks (NFS without lockd, some FUSE file systems).
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
    # two open files of one process exclude each other, and closing one drops no lock of the other.
    # See fcntl(2). Other systems have none (EINVAL): their locks would end as soon as any thread
    # closes the file.
    if sys.platform == "darwin":  # the numbers are those of its <fcntl.h>; untested
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
        # The error means that the program has closed the file, and so released the lock.
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
    """Lock a byte range until the file is closed; return whether this file system has locks.

    The lock excludes all others that have opened the file on their own: processes, and threads of
    this process. This waits at most `timeout` seconds.

    Raises:
        TimeoutError: another process or thread held it all the time.
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
    """Try to take a lock until that succeeds; raise TimeoutError after `timeout` seconds."""
    pause, deadline = _FIRST_PAUSE, time.monotonic() + timeout
    while not take():
        if time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, "the lock timed out: another process holds it")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def is_locked(file: OwnFile, start: int, length: int = 1) -> bool:
    """Return whether another opened file has a lock on a part of a byte range.

    Raises:
        OSError: this file system has no locks, or the system does not answer.
    """
    return _is_locked(file.fd, start, length)


def unlock(file: OwnFile, start: int, length: int = 1) -> None:
    """Release a lock, even if a forked child has a copy of the file without knowing of it."""
    with suppress(OSError, ValueError):  # it is closed
        _range_unlock(file.fd, start, length)


def release(file: OwnFile) -> None:
    """Release all locks on a file and close it, so that no child process can keep them.

    A child that was forked while the file was being opened has a copy, of which it does not know.
    """
    unlock(file, 0, 0)
    file.close()


@contextmanager
def locked_directory(path: str, timeout: float) -> Generator[None]:
    """Hold the lock of a directory in the block; it excludes other processes of this machine.

    Crash: the kernel releases the lock of a killed process. The directory gets no file for it.

    Raises:
        TimeoutError: another process held it for `timeout` seconds. OSError: it can't be locked.
    """
    directory = os.open(path, os.O_RDONLY | _DIRECTORY)
    try:
        _acquire(lambda: _lock_directory(directory), timeout)
        yield
    finally:
        _unlock_directory(directory)  # a child that was forked in the block has a copy
        os.close(directory)


class Backoff:
    """Lock timeout with back-off: after a timeout, it does not wait for this lock for one minute.

    A stopped process usually stays stopped for longer, and the waits would add up.

    Args:
        seconds: the longest wait.
    """

    __slots__ = ("_given_up", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._given_up: dict[Hashable, float] = {}

    def lock(
        self, file: OwnFile, start: int, length: int = 1, *, seconds: float | None = None
    ) -> bool:
        """Call the function `lock`, with a limit of `seconds`; None stands for the usual limit."""
        most = self.seconds if seconds is None else seconds
        if time.monotonic() < self._given_up.get(start, 0.0):
            most = 0.0
        try:
            return lock(file, start, length, timeout=most)
        except TimeoutError:
            if most >= self.seconds:  # a shorter wait shows nothing
                self._given_up[start] = time.monotonic() + _GIVEN_UP
            raise


# -- reading and writing at an offset, also on systems without such calls --------------------------

if sys.platform != "win32":
    pread = os.pread
    pwrite = os.pwrite
else:  # Windows; untested there
    _seeking = threading.Lock()

    def pread(fd: int, length: int, offset: int, /) -> bytes:
        """Read up to `length` bytes at `offset`."""
        with _seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.read(fd, length)

    def pwrite(fd: int, data: bytes, offset: int, /) -> int:
        """Write `data` at `offset`; return how many bytes were written."""
        with _seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, data)
