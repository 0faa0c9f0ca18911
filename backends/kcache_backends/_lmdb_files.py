"""LMDB files: recognises a database's files as ours, checks them before LMDB maps them."""

from __future__ import annotations

import errno
import os
import struct
import sys
from contextlib import suppress

import lmdb

from kcache.errors import BackendError
from kcache_backends import _lmdb_records as records
from kcache_backends._lmdb_folder import DATA, TABLE, Folder

__all__ = [
    "LOCK",
    "MARK",
    "ForeignError",
    "allocate_readers",
    "can_share",
    "check_size",
    "is_recognised",
    "mark",
    "open_checked",
    "sync",
]

LOCK = "lock"
#: The names of our files in the directory.
_NAMES = {LOCK, "db", "new", "old"}
#: The first bytes of the file `lock`. They say which program owns the directory.
MARK = b"kcache lmdb 1\n"
#: The size of the table of readers in bytes. A reader takes 64, so 2,046 read transactions fit.
#: kcache writes these bytes beforehand: LMDB would leave a hole, and the first access to a hole on
#: a full disk would kill the process.
_READERS_SIZE = 128 << 10
#: We write every page. So a file larger than the map is no database of ours if the file system has
#: allocated less than this fraction (1 in so many) of its bytes.
_SPARSE = 64
#: `struct flock` of Linux, on machines of 64 bits: fcntl(2).
_FLOCK = "hhqqi4x"
_ALLOCATED = 512  # bytes of st_blocks, see stat(2)


class ForeignError(BackendError):
    """The directory holds what this backend has not written, so that nothing in it is touched."""


# -- who owns the directory ------------------------------------------------------------------------


def is_recognised(root: Folder, *, known: bool = False) -> bool:
    """Tell whether a directory is marked as ours; if not, it is empty and may be marked.

    Args:
        root: the directory.
        known: the database in it is known to be ours: it is open.

    Raises:
        ForeignError: it holds something that is not ours.
    """
    if _marked(root):
        return True
    names = set(root.names())
    if names - _NAMES:
        raise _foreign(root, f"it holds {sorted(names - _NAMES)[0]!r}")
    status = root.status(LOCK)
    ours = known or (bool(names - {LOCK}) and _holds_ours(root))
    if status is not None and status.st_size and not ours:
        raise _foreign(root, "its file 'lock' is somebody else's")
    return False


def _foreign(root: Folder, reason: str) -> ForeignError:
    return ForeignError(
        f"{root.path} was not made by kcache ({reason}), so it is left as it is; "
        "name another directory for the cache, or move what is there away"
    )


def _marked(root: Folder) -> bool:
    try:
        fd = root.open_file(LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except lmdb.InvalidError as error:
        raise _foreign(root, str(error)) from error
    try:
        return os.read(fd, len(MARK)) == MARK
    finally:
        os.close(fd)


def _holds_ours(root: Folder) -> bool:
    """Recognise a database that lacks a mark by its record of the sums.

    Returns whether there is one; False if there is nothing to lose.

    Raises:
        ForeignError: it is somebody else's.
    """
    try:
        with Folder("db", root) as db:
            if strange := set(db.names()) - {DATA, TABLE}:
                raise _foreign(root, f"it holds 'db/{sorted(strange)[0]}'")
            ours = bool(db.names()) and _has_sums(db)
        for name in ("new", "old"):
            with suppress(FileNotFoundError), Folder(name, root) as rest:
                if strange := set(rest.names()) - {DATA, TABLE}:
                    raise _foreign(root, f"it holds '{name}/{sorted(strange)[0]}'")
    except (lmdb.Error, OSError) as error:
        raise _foreign(root, f"{error}") from error
    return ours


def _has_sums(db: Folder) -> bool:
    """Tell whether a database has a record of the sums; False if it is empty.

    Raises:
        lmdb.Error, OSError: it has not, or can't be read.
    """
    if db.check_file(DATA) is None:
        raise lmdb.InvalidError("it holds a table of readers without a database")
    env = open_checked(db, 1 << 20, read_only=True, lock=False)
    try:
        with env.begin() as txn:
            if records.sums(txn) is not None:
                return True
            if env.stat()["entries"]:
                raise lmdb.InvalidError("its database is somebody else's")
            return False
    finally:
        env.close()


def mark(root: Folder) -> None:
    """Mark a directory as ours; only after `is_recognised`.

    Raises:
        OSError: there is no room for it.
    """
    root.make_file(LOCK, MARK)


# -- databases -------------------------------------------------------------------------------------


def open_checked(
    place: Folder, map_size: int, *, read_only: bool, lock: bool = True
) -> lmdb.Environment:
    """Open a database, and refuse one whose file is shorter than it says.

    Raises:
        lmdb.Error: it can't be opened, or is damaged.
        BackendError: somebody else can write to its files.
    """
    check_size(place, map_size)
    place.check_file(TABLE)
    env = _open(place, map_size, read_only=read_only, lock=lock)
    try:
        pages = env.info()["last_pgno"] + 1
        status = place.check_file(DATA)
        size = 0 if status is None else status.st_size
        if pages > 2 and size < pages * env.stat()["psize"]:
            # a further read would kill this process
            raise lmdb.CorruptedError(f"{size} bytes of {pages} pages")
    except BaseException:
        env.close()
        raise
    return env


def _open(place: Folder, map_size: int, *, read_only: bool, lock: bool) -> lmdb.Environment:
    try:
        return lmdb.open(
            os.fsencode(place.lasting_path),  # a path may hold any bytes
            map_size=map_size,
            mode=0o600,
            readonly=read_only,
            lock=lock,
            metasync=False,  # a power cut may undo the last transactions, but it damages none
            readahead=False,
            max_spare_txns=4,
            lib_version=0,  # the format that every release of py-lmdb reads
        )
    except lmdb.Error as error:
        if getattr(error, "code", 0) == errno.ENOENT:  # another process is removing it
            raise FileNotFoundError(errno.ENOENT, str(error), place.path) from error
        raise


def can_share(place: Folder) -> bool:
    """Tell whether LMDB would open a database without waiting for another process.

    The first process that opens it locks its table of readers for a moment. If it is stopped in
    that moment, nobody else can write to the database. Do not call this while this process has the
    database open: closing the descriptor would release LMDB's locks.
    """
    if not (sys.platform == "linux" and place.check_file(TABLE)):
        return False
    import fcntl

    fd = place.open_file(TABLE, os.O_RDONLY)
    try:
        wanted = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
        found = fcntl.fcntl(fd, fcntl.F_GETLK, wanted)
    finally:
        os.close(fd)
    kind: int = struct.unpack(_FLOCK, found)[0]
    return kind == fcntl.F_UNLCK


def check_size(place: Folder, map_size: int) -> int:
    """Return the length of the data file, 0 if there is none.

    Raises:
        lmdb.Error: it is no file that we have written.
    """
    status = place.check_file(DATA)
    if status is None:
        return 0
    allocated: int = getattr(status, "st_blocks", status.st_size) * _ALLOCATED
    if status.st_size > map_size and allocated * _SPARSE < status.st_size:
        raise lmdb.CorruptedError(f"{status.st_size} bytes, of which {allocated} were written")
    return status.st_size


def allocate_readers(place: Folder) -> None:
    """Make the table of readers with all its blocks allocated.

    Raises:
        OSError: there is no room for it.
    """
    fd = place.open_file(TABLE)
    try:
        if os.fstat(fd).st_size < _READERS_SIZE and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, _READERS_SIZE)
    finally:
        os.close(fd)


def sync(place: Folder) -> None:
    """Have the disk confirm what was written to the data file."""
    fd = place.open_file(DATA, os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
