"""KeyLocks: one lock for each key, between processes, held while one of them makes its entry."""

from __future__ import annotations

import errno
import os

from kcache.directory import open_file_of_cache
from kcache.util.locks import lock
from kcache.util.open_file import OwnFile, has_header

__all__ = ["KeyLocks"]

#: The whole contents of the file. The locks are on bytes behind it, where no data is stored.
_MARK = b"kcache-flight/2\0"


class KeyLocks:
    """One lock for each key: on one byte of a file, whose offset is 62 bits of the key.

    So no file is made per key, and two keys share a byte once in 2**62. A lock lasts until its file
    is closed, by the holder or with the holder's last reference to it.

    Threads: safe to share; the file is opened anew for each lock. Crash: the kernel releases the
    locks of a killed process. Fork: a child closes its copies. If somebody removes or replaces the
    file, two processes that hold locks in two files both make the entry, which costs time and
    nothing else.

    Args:
        path: of the lock file, in a directory that belongs to the user.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def acquire(self, key: str) -> OwnFile | None:
        """Return the lock of a key; None if somebody else holds it.

        Raises:
            OSError: the file can't be opened, or its file system has no locks.
        """
        file = open_file_of_cache(self._path, os.O_RDWR, lambda file: has_header(file, _MARK))
        try:
            if lock(file, len(_MARK) + (int(key[:16], 16) >> 2)):
                return file
        except TimeoutError:
            return None
        raise OSError(errno.ENOLCK, "this file system has no locks")
