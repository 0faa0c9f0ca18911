"""LMDB files: checks who owns the folder of a database, opens and removes the database.

Files of the folder::

    lock                      empty; processes lock its first two bytes
    db/data.mdb, db/lock.mdb  the database, and LMDB's table of readers
    old/                      a database that is about to be removed
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from stat import S_ISDIR

import lmdb

from kcache.backend import NO_ROOM, failure
from kcache.directory import claim
from kcache.errors import BackendError, DiskFullError, FullError
from kcache.util.forks import importing
from kcache.util.open_file import OwnFile, identity, is_plain, open_own
from kcache.util.path_safety import foreign, make_directory, unsafe_part

_FOLDER, _OLD, _DATA, _TABLE, _LOCK = "db", "old", "data.mdb", "lock.mdb", "lock"
#: How many readers the table has room for, and its size in bytes. kcache allocates the table
#: beforehand: LMDB would leave a hole in the file, and on a full disk, the first access to a hole
#: would kill the process.
_READERS, _TABLE_SIZE = 2000, 128 << 10
#: The data file may already be larger than its limit, because the cap was larger before. Then the
#: map is larger than the file by a sixteenth and this many bytes, because an eviction copies the
#: pages of the index that it changes.
_SPARE = 1 << 20
#: A disk with fewer free bytes than this is nearly full. An eviction of 16 entries copies up to 48
#: pages of the index.
_MARGIN = 1 << 18
#: On a nearly full disk, this share of the file's pages is reserved for evictions.
_FREE = 0.1
#: How many descriptors are examined to find LMDB's three.
_NEAR = 16
_SAME_PID = (
    "; containers that share this database must also share their process ids; if they can't, use "
    "the `file` or `zstd` backend instead"
)

#: The errors that LMDB raises for a file that it did not write. The cache then starts again with an
#: empty file. No part of the old file can be trusted, because a damaged list of free pages may name
#: pages in use.
DAMAGE = (
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


def data_of(root: str) -> str:
    """Return the path of the data file in a folder."""
    return os.path.join(root, _FOLDER, _DATA)


# -- errors ----------------------------------------------------------------------------------------


def failed(operation: str, path: str, error: lmdb.Error | OSError) -> BackendError:
    """Return the BackendError for an error of LMDB or of the operating system in an operation."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    # LMDB reports EIO for a short write, as on a full disk.
    if code in NO_ROOM or (code == errno.EIO and is_nearly_full(path, 0)):
        kind: type[BackendError] = DiskFullError
    else:
        kind = FullError if isinstance(error, lmdb.MapFullError) else BackendError
    if isinstance(error, OSError):
        return kind(str(failure(operation, error)))
    hint = _SAME_PID if code == errno.EAGAIN else ""
    return kind(f"{operation} {path}: {error}{hint}")


def is_nearly_full(root: str, size: int) -> bool:
    """Return whether the disk has fewer free bytes than `size` and `_MARGIN` together."""
    with suppress(OSError):  # the folder was removed
        if sys.platform != "win32":
            disk = os.statvfs(root)
            return disk.f_bavail * disk.f_frsize < size + _MARGIN
    return False


# -- ownership ------------------------------------------------------------------------------------


def open_lock(root: str) -> OwnFile:
    """Open the file `lock` of a folder. Create the file, and the folder, if necessary.

    Raises:
        NotOursError: the folder holds files of another program. Nothing was changed.
        OSError: the file can't be opened or made.
    """
    path = os.path.join(root, _LOCK)
    try:
        return open_own(path, os.O_RDWR)
    except FileNotFoundError:
        claim(root)
        return open_own(path, os.O_RDWR | os.O_CREAT)


def _require_sound(root: str) -> int:
    """Check the files of a database; return the length of the data file, or 0 if there is none.

    Raises:
        BackendError: another user can write to the database, or replace it.
        lmdb.InvalidError: instead of a file or of the folder, there is a link, a pipe or the like.
    """
    status = os.stat(root)
    if problem := foreign(status) or unsafe_part(root, status.st_uid):
        raise BackendError(f"{root} can't be trusted: {problem}")
    folder, size = os.path.join(root, _FOLDER), 0
    for path in (os.path.join(root, _LOCK), folder, os.path.join(folder, _TABLE), data_of(root)):
        with suppress(FileNotFoundError):
            status = os.stat(path, follow_symlinks=False)
            if not (S_ISDIR(status.st_mode) if path == folder else is_plain(status)):
                kind = "directory" if path == folder else "regular file with one name"
                raise lmdb.InvalidError(f"{path}: expected a {kind}, got something else")
            if problem := foreign(status):
                raise BackendError(f"{path} can't be trusted: {problem}")
            size = status.st_size if path == data_of(root) else 0
    return size


# -- databases -------------------------------------------------------------------------------------


def open_database(root: str, map_size: int, *, read_only: bool) -> lmdb.Environment | None:
    """Open the database of a folder. The caller excludes others that open or remove the database.

    A process that only reads may be unable to register in the table of readers. A writer may then
    reuse a page that this process is reading, and the value fails its checksum.

    Args:
        root: the folder.
        map_size: the size up to which the data file may grow, in bytes.
        read_only: change nothing, and return None if there is no database. Otherwise, a
            missing database is created, and a damaged one is replaced.

    Raises:
        NotOursError: the folder holds files of another program.
        BackendError: another user can write to the database, or replace it.
        lmdb.Error, OSError: the database can't be opened.
    """
    if read_only:
        if not os.path.lexists(data_of(root)):
            return None
        return _open(root, map_size, read_only=True)
    claim(root)
    _remove(os.path.join(root, _OLD))
    try:
        return _open(root, map_size, read_only=False)
    except DAMAGE:
        discard(root)
        return _open(root, map_size, read_only=False)


def _open(root: str, map_size: int, *, read_only: bool) -> lmdb.Environment:
    folder, table = os.path.join(root, _FOLDER), os.path.join(root, _FOLDER, _TABLE)
    if not read_only:
        with suppress(FileExistsError):
            make_directory(folder)
    size = _require_sound(root)
    if not read_only and hasattr(os, "posix_fallocate"):
        file = open_own(table, os.O_RDWR | os.O_CREAT)
        if not os.fstat(file.fd).st_size:
            os.posix_fallocate(file.fd, 0, _TABLE_SIZE)
        del file  # closing it after `lmdb.open` would release LMDB's locks
    env = lmdb.open(
        os.fsencode(folder),  # a path may hold any bytes
        map_size=map_size if size <= map_size else size + size // 16 + _SPARE,
        mode=0o600,
        readonly=read_only,
        lock=not read_only or os.access(table, os.W_OK),
        max_readers=_READERS,
        metasync=False,  # a power cut may undo the last transactions, but damages nothing
        readahead=False,
        max_spare_txns=4,
        lib_version=0,  # the format that every release of py-lmdb reads
    )
    try:
        pages, size = env.info()["last_pgno"] + 1, os.path.getsize(data_of(root))
        if pages > 2 and size < pages * env.stat()["psize"]:
            # reading the missing pages would kill this process
            raise lmdb.CorruptedError(f"the file has {size} bytes, too few for its {pages} pages")
        env.reader_check()
    except BaseException:
        env.close()
        raise
    return env


def discard(root: str) -> None:
    """Remove a database. A process that has it open uses the old file until its next check.

    Raises:
        BackendError: the folder of the database holds a file of another program.
        OSError: the database can't be removed.
    """
    folder, old = os.path.join(root, _FOLDER), os.path.join(root, _OLD)
    with suppress(NotADirectoryError):
        if strange := sorted(set(os.listdir(folder)) - {_DATA, _TABLE}):
            raise BackendError(
                f"{folder} holds {strange[0]!r}, which kcache has not written; move it away, so "
                "that the database can be replaced"
            )
    _remove(old)
    os.rename(folder, old)
    _remove(old)


def _remove(folder: str) -> None:
    """Remove a database and its directory.

    A symbolic link is not followed, and the directory stays if it holds other files.
    """
    for path in (folder, os.path.join(folder, _DATA), os.path.join(folder, _TABLE), folder):
        for remove in (os.unlink, os.rmdir):
            with suppress(OSError):
                remove(path)


def has_room(env: lmdb.Environment | None, root: str, size: int) -> bool:
    """Return whether a value of `size` bytes may be written.

    On a nearly full disk, some pages are reserved for evictions, because LMDB copies each page that
    it changes. Without free pages, not even an eviction would be possible.
    """
    if env is None or not is_nearly_full(root, size):
        return True
    pages, about = env.info()["last_pgno"] + 1, env.stat()
    used = about["branch_pages"] + about["leaf_pages"] + about["overflow_pages"]
    return used <= (1 - _FREE) * pages


# -- descriptors -----------------------------------------------------------------------------------


def descriptors(root: str, near: int) -> dict[int, tuple[int, int]]:
    """Return the descriptors of a database that was just opened, and the identities of their files.

    LMDB does not report its descriptors. Their numbers follow `near`, a descriptor that was opened
    just before. If other threads open files at the same time, some descriptors may be missing here.
    """
    with os.scandir(os.path.join(root, _FOLDER)) as items:
        ours = {identity(item.stat(follow_symlinks=False)) for item in items}
    numbers = range(near, near + _NEAR)
    return {number: at for at in ours for number in numbers if leads_to(number, at)}


def leads_to(number: int, file: tuple[int, int]) -> bool:
    """Return whether a descriptor is open and refers to the file with this identity."""
    try:
        return identity(os.fstat(number)) == file
    except OSError:
        return False


def leak(each: object) -> None:
    """Keep an object of LMDB from being freed, even at the end of the process.

    Freeing it would close files of the program, or wait for threads that no longer exist.
    """
    with importing:
        import ctypes  # noqa: PLC0415  2 ms

    with suppress(AttributeError):  # PyPy has no reference counts
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
