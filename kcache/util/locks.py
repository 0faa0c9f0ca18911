"""RangeLocks: advisory locks on byte ranges of a file; the kernel ends them with a process."""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kcache.util.open_file import OpenFile

__all__ = ["RangeLocks", "pread", "pwrite"]

#: Seconds between two tries for a lock that another process holds: the first pause, and the
#: longest. A holder keeps it for 0.1 ms (a rename) up to some 10 ms (a commit that the disk
#: confirms).
_FIRST_PAUSE = 50e-6
_LONGEST_PAUSE = 5e-3
#: After a wait in vain, a process does not wait for that lock again for this many seconds.
_GIVEN_UP = 60.0
#: Errors which say that this file system has no locks (NFS without lockd, some FUSE file systems).
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

if sys.platform == "win32":  # untested: no Windows machine in CI
    import msvcrt

    def _range_lock(fd: int, start: int, length: int, *, wait: bool) -> bool:
        while True:
            os.lseek(fd, start, os.SEEK_SET)
            try:
                msvcrt.locking(fd, msvcrt.LK_NBLCK, length)
            except OSError:
                if not wait:
                    return False
                time.sleep(0.001)
            else:
                return True

    def _range_unlock(fd: int, start: int, length: int) -> None:
        with suppress(OSError):
            os.lseek(fd, start, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_UNLCK, length)

else:
    import fcntl

    # Open-file-description locks (Linux 3.15) belong to the open file, not to the process: two
    # handles in one process exclude each other, and closing an unrelated handle drops no lock. See
    # fcntl(2). On other systems, the POSIX record lock is the closest. (macOS has them too, with
    # another `struct flock`.)
    _OFD = sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")
    _SETLK: int = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)
    _SETLKW: int = getattr(fcntl, "F_OFD_SETLKW", fcntl.F_SETLKW)

    def _flock(kind: int, start: int, length: int) -> bytes:
        return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)

    def _range_lock(fd: int, start: int, length: int, *, wait: bool) -> bool:
        try:
            if _OFD:
                command = _SETLKW if wait else _SETLK
                fcntl.fcntl(fd, command, _flock(fcntl.F_WRLCK, start, length))
            else:
                flags = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
                fcntl.lockf(fd, flags, length, start, os.SEEK_SET)
        except OSError as error:
            if not wait and error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _range_unlock(fd: int, start: int, length: int) -> None:
        # The error means that the program has closed the file, and so released the lock. It must
        # not keep the caller from giving other threads their turn.
        with suppress(OSError):
            if _OFD:
                fcntl.fcntl(fd, _SETLK, _flock(fcntl.F_UNLCK, start, length))
            else:
                fcntl.lockf(fd, fcntl.LOCK_UN, length, start, os.SEEK_SET)


class _Number(NamedTuple):
    """A descriptor that the caller keeps open."""

    fd: int


class RangeLocks:
    """Exclusive locks on byte ranges of an open file, between threads and between processes.

    Threads: a lock on one range excludes other threads too, through a mutex per range. Processes:
    the kernel releases every lock when the holder dies, SIGKILL included. Fork: a child must make a
    new object over a newly opened file. On a file system without locks, `held` still excludes
    threads, and `supported` is False.

    Args:
        file: an `OpenFile`, which stays open as long as this object is used; or a descriptor, which
            the caller must keep open as long.
    """

    def __init__(self, file: OpenFile | int) -> None:
        self._file = _Number(file) if isinstance(file, int) else file
        self.supported = True
        self._mutexes: dict[int, threading.RLock] = {}
        #: Ranges for which a wait was in vain, and until when a new wait is not worth while.
        self._given_up: dict[int, float] = {}
        self._guard = threading.Lock()

    def _mutex(self, start: int) -> threading.RLock:
        mutex = self._mutexes.get(start)
        if mutex is None:
            with self._guard:
                mutex = self._mutexes.setdefault(start, threading.RLock())
        return mutex

    @contextmanager
    def held(self, start: int, length: int, *, timeout: float | None = None) -> Generator[None]:
        """Hold the range while the block runs; wait for it, at most `timeout` seconds if given.

        After a wait that timed out, further waits end at once for a minute. A thread must not ask
        for a range that it holds.

        Raises:
            TimeoutError: somebody else held it all the time (a process that was stopped, say).
        """
        if timeout is not None and time.monotonic() < self._given_up.get(start, 0.0):
            timeout = 0.0
        mutex = self._mutex(start)
        try:
            if not mutex.acquire(timeout=-1 if timeout is None else timeout):
                raise self._timed_out(start, timeout)
            if timeout is None:
                self._acquire(start, length, wait=True)
            else:
                self._acquire_within(start, length, timeout)
            yield
        finally:
            # Asked for, not remembered: an interrupt (Ctrl-C) can come before it could be
            # remembered.
            while mutex._is_owned():  # type: ignore[attr-defined]  # pyright: ignore
                self._unlock(start, length)
                mutex.release()

    @property
    def fd(self) -> int:
        """The descriptor; valid as long as this object is referenced."""
        return self._file.fd

    def _timed_out(self, start: int, timeout: float | None) -> TimeoutError:
        """Return the error, and let further waits end at once for a while, as they would add up."""
        if timeout:
            self._given_up[start] = time.monotonic() + _GIVEN_UP
        return TimeoutError(errno.ETIMEDOUT, "the lock timed out: another process holds it")

    def _acquire_within(self, start: int, length: int, timeout: float) -> None:
        """Take the range by asking repeatedly, because the kernel's own wait has no limit."""
        pause = _FIRST_PAUSE
        deadline: float | None = None
        while not self._acquire(start, length, wait=False) and self.supported:
            now = time.monotonic()
            deadline = now + timeout if deadline is None else deadline
            if now >= deadline:
                raise self._timed_out(start, timeout)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _unlock(self, start: int, length: int) -> None:
        if self.supported:
            _range_unlock(self._file.fd, start, length)

    def claim(self, start: int, length: int) -> bool:
        """Take the range until it is released or the file closed; tell whether it was free.

        It does not wait, and does not exclude threads that use the same object. It is always False
        on a file system without locks.
        """
        return self._acquire(start, length, wait=False)

    def release(self, start: int, length: int) -> None:
        """Release a claimed range; nothing happens if it is not held."""
        self._unlock(start, length)

    def _acquire(self, start: int, length: int, *, wait: bool) -> bool:
        if not self.supported:
            return False
        try:
            return _range_lock(self._file.fd, start, length, wait=wait)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.supported = False
            return False


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
