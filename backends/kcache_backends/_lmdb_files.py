"""The files of an LMDB database: opened privately, checked before LMDB maps them, removed."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from stat import S_ISDIR, S_ISREG

import lmdb

from kcache.errors import BackendError
from kcache.util.locks import RangeLocks
from kcache_backends._files import is_ours, somebody

__all__ = [
    "DATA",
    "TABLE",
    "LockFile",
    "allocate_readers",
    "check_kinds",
    "open_checked",
    "remove",
    "sync",
]

DATA, TABLE = "data.mdb", "lock.mdb"
#: Bytes of the table of readers, 64 each: 2,046 read transactions at once. Written out beforehand:
#: LMDB would leave a hole, and the first access to it on a full disk would kill the process.
_READERS_SIZE = 128 << 10


class LockFile:
    """The file `lock`, open; closed with the object."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = open_private(path)
        self.locks = RangeLocks(self._fd)

    def lost(self) -> bool:
        """Tell whether the path leads elsewhere."""
        try:
            return not os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except OSError:
            return True

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", -1)) >= 0:
            os.close(fd)


def open_checked(
    place: str, map_size: int, *, read_only: bool, lock: bool = True
) -> lmdb.Environment:
    """Open a database, and refuse one whose file is shorter than it says.

    Raises:
        lmdb.Error: it can't be opened, or is damaged.
    """
    check_kinds(place)
    env = lmdb.open(
        os.fsencode(place),  # paths may hold anything
        map_size=map_size,
        mode=0o600,
        readonly=read_only,
        lock=lock,
        metasync=False,  # a power cut may undo the last transactions, and damages none
        readahead=False,
        max_spare_txns=4,
        lib_version=0,  # the format that every release of py-lmdb reads
    )
    pages = env.info()["last_pgno"] + 1
    size = os.stat(os.path.join(place, DATA)).st_size
    if pages > 2 and size < pages * env.stat()["psize"]:
        env.close()
        raise lmdb.CorruptedError(f"{size} bytes of {pages} pages")  # reading on would kill us
    return env


def check_kinds(place: str) -> None:
    """Refuse what is no directory of plain files, or not ours alone.

    Raises:
        lmdb.InvalidError: a link is there (it may lead to somebody else's), or something else.
        BackendError: somebody else owns one of them, or can write to it.
    """
    for path, right in (
        (os.path.dirname(place), S_ISDIR),
        (place, S_ISDIR),
        (os.path.join(place, DATA), S_ISREG),
        (os.path.join(place, TABLE), S_ISREG),
    ):
        with suppress(FileNotFoundError):
            status = os.lstat(path)
            if not right(status.st_mode):
                raise lmdb.InvalidError(f"{path} is a link, or of another kind")
            if not is_ours(status):
                raise BackendError(f"{path} can't be trusted: {somebody(status)}")


def allocate_readers(path: str) -> None:
    """Make the table of readers, all its blocks allocated.

    Raises:
        OSError: there is no room for it.
    """
    fd = open_private(path)
    try:
        if os.fstat(fd).st_size < _READERS_SIZE and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, _READERS_SIZE)
    finally:
        os.close(fd)


def open_private(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags, 0o600)


def sync(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: str) -> None:
    """Remove a directory and what is in it, or whatever else is there; as far as possible."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)
