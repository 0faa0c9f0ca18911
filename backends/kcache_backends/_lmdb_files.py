"""The files of an LMDB database: recognised as ours, checked before LMDB maps them, opened."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import ClassVar

import lmdb

from kcache.errors import BackendError
from kcache.util.locks import RangeLocks
from kcache_backends import _lmdb_records as records
from kcache_backends._lmdb_folder import DATA, TABLE, Folder

__all__ = [
    "LOCK",
    "ForeignError",
    "LockFile",
    "allocate_readers",
    "check_size",
    "is_recognised",
    "mark",
    "open_checked",
    "sync",
]

LOCK = "lock"
#: The names that we give to what is in the directory.
_NAMES = {LOCK, "db", "new", "old"}
#: The beginning of the file `lock`, which says whose the directory is.
_MARK = b"kcache lmdb 1\n"
#: Bytes of the table of readers, 64 each: 2,046 read transactions at once. Written out beforehand:
#: LMDB would leave a hole, and the first access to it on a full disk would kill the process.
_READERS_SIZE = 128 << 10
#: Bytes of the file `lock`, allocated for a full disk: LMDB copies what it changes, so that without
#: them not even an eviction could be written. An eviction of 10 % copies some 3 % of small entries.
_RESERVE = 256 << 10
#: Seconds between two tries for a lock, the first time and at most. Who has it keeps it for 0.1 ms
#: (to open) to some 10 ms (a commit that the disk confirms).
_FIRST_PAUSE = 50e-6
_LONGEST_PAUSE = 5e-3
#: A file larger than the map in which fewer bytes than 1 of so many are allocated is no database
#: that we wrote: we write every page.
_SPARSE = 64
_ALLOCATED = 512  # bytes of st_blocks, see stat(2)


class ForeignError(BackendError):
    """The directory holds what this backend has not written, so that nothing in it is touched."""


# -- whose it is -----------------------------------------------------------------------------------


def is_recognised(root: Folder, *, known: bool = False) -> bool:
    """Tell whether a directory is marked as ours; if not, it may be marked: it holds nothing else.

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
        return os.read(fd, len(_MARK)) == _MARK
    finally:
        os.close(fd)


def _holds_ours(root: Folder) -> bool:
    """Recognise a database that lacks a mark by its record of the sums.

    Returns whether there is one; False where there is nothing to lose.

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
    """Tell whether a database has a record of the sums; False where it is empty.

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
    fd = root.open_file(LOCK)
    try:
        os.write(fd, _MARK)
    finally:
        os.close(fd)


# -- locks -----------------------------------------------------------------------------------------


class LockFile:
    """The file `lock`, open: locks between processes, the mark, and a reserve for a full disk.

    The descriptor is closed with the object, which whoever holds a lock refers to. Fork: a child
    must `disown` it, or the two would share their locks.
    """

    _all: ClassVar[weakref.WeakSet[LockFile]] = weakref.WeakSet()

    def __init__(self, root: Folder) -> None:
        self._path = os.path.join(root.path, LOCK)
        self._fd = root.open_file(LOCK)
        self._locks = RangeLocks(self._fd)
        LockFile._all.add(self)
        with suppress(OSError):
            if os.fstat(self._fd).st_size < _RESERVE and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, _RESERVE)

    def is_in(self, root: Folder) -> bool:
        """Tell whether it is the file that is there now."""
        status = root.status(LOCK)
        return status is not None and os.path.samestat(os.fstat(self._fd), status)

    def lost(self) -> bool:
        """Tell whether the path leads elsewhere."""
        try:
            return not os.path.samestat(
                os.fstat(self._fd), os.stat(self._path, follow_symlinks=False)
            )
        except OSError:
            return True

    @contextmanager
    def held(self, start: int, timeout: float) -> Generator[None]:
        """Hold a lock while the block runs; wait for it for so many seconds at most.

        Raises:
            TimeoutError: another process or thread held it all the time.
        """
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        with ExitStack() as stack:
            while True:
                try:
                    # This frame refers to the object, which keeps the file open.
                    stack.enter_context(self._locks.held(start, 1, timeout=0.0))
                    break
                except TimeoutError:
                    if time.monotonic() + pause > deadline:
                        raise
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            yield

    def give_reserve(self) -> None:
        """Give the reserve to whoever needs a page on a full disk: what evicts, it is hoped."""
        with suppress(OSError):
            os.truncate(self._fd, len(_MARK))

    def disown(self) -> None:
        """Let go of what a child shares with its parent; a lock stays with the parent."""
        nothing = os.open(os.devnull, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        os.dup2(nothing, self._fd, inheritable=False)
        os.close(nothing)

    @classmethod
    def disown_all(cls) -> None:
        """Do so in a child process."""
        for file in list(cls._all):
            with suppress(OSError):
                file.disown()

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", -1)) >= 0:
            os.close(fd)


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
    env = lmdb.open(
        os.fsencode(place.lasting_path),  # paths may hold anything
        map_size=map_size,
        mode=0o600,
        readonly=read_only,
        lock=lock,
        metasync=False,  # a power cut may undo the last transactions, and damages none
        readahead=False,
        max_spare_txns=4,
        lib_version=0,  # the format that every release of py-lmdb reads
    )
    try:
        pages = env.info()["last_pgno"] + 1
        status = place.check_file(DATA)
        size = 0 if status is None else status.st_size
        if pages > 2 and size < pages * env.stat()["psize"]:
            # reading on would kill us
            raise lmdb.CorruptedError(f"{size} bytes of {pages} pages")
    except BaseException:
        env.close()
        raise
    return env


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
    """Make the table of readers, all its blocks allocated.

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
