"""KeyLocks: one lock for each key, between processes, held while one of them makes its entry."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Protocol

from kcache.util.locks import lock, unlock
from kcache.util.open_file import OwnFile, has_header, open_or_replace

__all__ = ["ByteLocks", "FileLocks", "KeyLocks"]

#: The whole contents of the file. The locks are on bytes behind it, where no data is stored.
_MARK = b"kcache-flight/2\0"
#: Without byte locks, keys share this many lock files. So no file per key is left behind.
_STRIPES = 64


class _Locks(Protocol):
    """The locks themselves, on one opened file or beside it."""

    def acquire(self, key: str) -> bool:
        """Take the lock of a key if nobody holds it; tell whether it was taken."""
        ...

    def release(self, key: str) -> None:
        """Give the lock of a key back; nothing happens if it is not held."""
        ...


class ByteLocks:
    """Open-file-description locks (Linux 3.15, fcntl(2)) on one byte of the file for each key.

    The byte's offset is 62 bits of the key, so no file is made per key, and two keys share a byte
    once in 2**62. The kernel releases the lock with the last descriptor of the open file: when
    its process dies, SIGKILL included, or at `KeyLocks.close`.
    """

    def __init__(self, file: OwnFile) -> None:
        self._file = file

    def acquire(self, key: str) -> bool:
        try:
            if lock(self._file, _offset(key)):
                return True
        except TimeoutError:
            return False
        raise OSError(errno.ENOLCK, "this file system has no locks")

    def release(self, key: str) -> None:
        unlock(self._file, _offset(key))


class FileLocks:
    """Locks of whole files by the library filelock, for systems without `ByteLocks`.

    Each key belongs to one of 64 files beside the main one; keys of one file also wait for each
    other. The system releases a lock when its process dies.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._held: dict[str, object] = {}

    def acquire(self, key: str) -> bool:
        import filelock

        lock = filelock.FileLock(f"{self._path}-{int(key[:8], 16) % _STRIPES:02}", mode=0o600)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return False
        except NotImplementedError as error:  # its message for a file system without locks
            raise OSError(errno.ENOLCK, "this file system has no locks") from error
        self._held[key] = lock
        return True

    def release(self, key: str) -> None:
        lock = self._held.pop(key, None)
        if lock is not None:
            lock.release()  # type: ignore[attr-defined]  # pyright: ignore


class _Opened:
    """The opened file with its locks; closed with the object, so never while a lock is held.

    Fork: the child closes its copy, because the parent's locks must end with the parent.
    """

    def __init__(self, path: str, *, byte_locks: bool) -> None:
        self.file = open_or_replace(path, os.O_RDWR, _is_ours)
        self.locks: _Locks = ByteLocks(self.file) if byte_locks else FileLocks(path)


def _is_ours(file: OwnFile) -> bool:
    return has_header(file, _MARK)


class KeyLocks:
    """One lock for each key, between processes.

    Threads: the caller has one thread at a time ask for a key. Crash: the kernel releases the locks
    of a killed process. Fork: a child must call `after_fork`. The file is opened when it is first
    needed, and again when somebody removed or replaced it; two processes that meanwhile hold locks
    in two files both make the entry, which costs time and nothing else.

    Args:
        path: of the lock file, in a directory that belongs to the user.
        byte_locks: whether to use `ByteLocks`; False takes `FileLocks`.
    """

    def __init__(self, path: str, *, byte_locks: bool = sys.platform == "linux") -> None:
        self._path = path
        self._byte_locks = byte_locks
        self._opened: _Opened | None = None
        #: Where each held lock was taken.
        self._held: dict[str, _Opened] = {}

    def acquire(self, key: str) -> bool:
        """Take the lock of a key if no other process holds it; tell whether it was taken.

        Raises:
            OSError: the file can't be opened, or its file system has no locks.
        """
        opened = self._held[key] = self._open()
        taken = opened.locks.acquire(key)
        if not taken:
            self._held.pop(key, None)
        return taken

    def release(self, key: str) -> None:
        """Give the lock of a key back; nothing happens if it is not held."""
        opened = self._held.get(key)
        if opened is not None:
            with suppress(OSError):
                opened.locks.release(key)
            self._held.pop(key, None)  # last: until here, it counts as held

    def close(self) -> None:
        """Close the file once no lock in it is held. Idempotent; the next call opens it again."""
        self._opened = None

    def after_fork(self) -> None:
        """Close, in a child process, the copy of the file, without releasing the parent's locks."""
        # A lock object of filelock releases the lock with its last reference, also the parent's
        # lock.
        if not self._byte_locks:
            _inherited.extend(self._held.values())
        self._held.clear()
        self.close()

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is None or opened.file.closed or not opened.file.is_at(self._path):
            opened = self._opened = _Opened(self._path, byte_locks=self._byte_locks)
        return opened


#: Open files of parent processes. Their children must not close them.
_inherited: list[_Opened] = []


def _offset(key: str) -> int:
    return len(_MARK) + (int(key[:16], 16) >> 2)
