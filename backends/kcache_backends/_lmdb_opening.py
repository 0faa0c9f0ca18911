"""LMDB opening: opens a database in a directory, and replaces it."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from stat import S_ISDIR
from typing import NamedTuple

import lmdb

from kcache.errors import BackendError
from kcache.util.open_file import OpenFile, identity
from kcache_backends._lmdb_errors import DAMAGE, MissingError
from kcache_backends._lmdb_files import (
    allocate_readers,
    can_share,
    check_size,
    is_recognised,
    open_checked,
    sync,
)
from kcache_backends._lmdb_folder import DATA, TABLE, Folder, check_parents

__all__ = [
    "Opened",
    "check_names",
    "database",
    "discard",
    "exchange",
    "identity_at",
    "open_alone",
    "open_read_only",
    "settle",
]

#: LMDB opens the table of readers once and the data twice, the second time for what it syncs.
_DESCRIPTORS = 3
#: The system gives the lowest free numbers, so they are among so many behind that of the directory,
#: which was opened just before. If another thread closed files meanwhile, they may be elsewhere.
_NEAR = 64
_ALL = "/proc/self/fd"
#: How much larger the map is than a file that exceeds its limit, in bytes.
_SPARE = 1 << 20


class Numbers:
    """The descriptors of one open database, by which to tell that the program has closed them.

    A program that closes one twice closes somebody else's the second time. Its next file gets that
    number, and LMDB would write there. They are looked for before the first write, not when the
    database is opened, because most processes only read. Threads: the one that writes calls `find`.

    Args:
        near: the descriptor of the directory when LMDB opened the database.
        data: what identifies its file.
        table: what identifies the table of readers.
    """

    def __init__(self, near: int, data: tuple[int, ...], table: tuple[int, ...]) -> None:
        self._near = near
        self._files = {data, table}
        self._found: dict[int, tuple[int, ...]] | None = None

    def find(self) -> bool:
        """Look for them, the first time; tell whether they lead where LMDB has opened them."""
        if self._found is None:
            self._found = self._among(range(self._near + 1, self._near + _NEAR))
            if len(self._found) < _DESCRIPTORS:
                with suppress(OSError):  # without /proc, they are known as far as they were found
                    self._found = self._among(map(int, os.listdir(_ALL)))
                    return set(self._found.values()) == self._files
            return True
        return self.are_whole()

    def are_whole(self) -> bool:
        """Tell whether those that were found lead where LMDB has opened them."""
        try:
            for number, at in (self._found or {}).items():
                if identity(os.fstat(number)) != at:
                    return False
        except OSError:
            return False
        return True

    def _among(self, numbers: Iterable[int]) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for number in numbers:
            with suppress(OSError):
                at = identity(os.fstat(number))
                if at in self._files:
                    found[number] = at
                    if len(found) == _DESCRIPTORS:
                        break
        return found


class Opened(NamedTuple):
    """An open database.

    Attributes:
        env: the database.
        file: its file, as `identity_of` says.
        at_place: whether it is where it belongs, and not where an exchange moved it.
        witness: a descriptor that is closed, too, if the program has closed the database's; None if
            another object has such a descriptor.
        numbers: LMDB's own descriptors, if it is open for writing.
    """

    env: lmdb.Environment
    file: tuple[int, ...]
    at_place: bool
    witness: OpenFile | None = None
    numbers: Numbers | None = None

    def is_whole(self) -> bool:
        """Tell whether the program has left the descriptors alone, as far as known."""
        return (self.witness is None or self.witness.is_open()) and (
            self.numbers is None or self.numbers.are_whole()
        )


def open_alone(root: Folder, map_size: int) -> Opened:
    """Open the database for writing, a new one if it is damaged; the caller excludes others."""
    settle(root)
    try:
        return _open_files(root, map_size)
    except DAMAGE:
        discard(root)
        return _open_files(root, map_size)


def _open_files(root: Folder, map_size: int) -> Opened:
    root.make("db")
    with database(root, "db") as place:
        allocate_readers(place)
        env = open_checked(place, _map_to_open(place, map_size), read_only=False)
        file = identity_of(place)
        near, table = place.number, place.status(TABLE)
    env.reader_check()
    numbers = None if near is None or table is None else Numbers(near, file, identity(table))
    return Opened(env, file, at_place=True, numbers=numbers)


def _map_to_open(place: Folder, map_size: int) -> int:
    """Return the size of the map, with room to evict in a file that a larger cap has left.

    An eviction copies the pages of the index that it changes: about 3 % with small entries.
    """
    size = check_size(place, map_size)
    if size < map_size:
        return map_size
    return -(-(size + size // 16 + _SPARE) // _SPARE) * _SPARE


def open_read_only(path: str, map_size: int, *, wait: bool = True) -> Opened:
    """Open the database, or the one that an exchange under way replaces; change nothing.

    Args:
        path: the directory.
        map_size: the most that the file may grow to, bytes.
        wait: whether to wait for another process that opens it for the first time.

    Raises:
        MissingError: there is none.
    """
    check_parents(path)
    try:
        with Folder(path) as root:
            is_recognised(root)
            with database(root, "db", "old") as place:
                file = identity_of(place)
                if not file:
                    raise FileNotFoundError
                at_place = root.status("db") is not None
                env = _map_to_read(place, map_size, wait=wait)
                return Opened(env, file, at_place, place.witness())
    except FileNotFoundError as error:
        reason = "there is no database, and none is made for reading"
        raise MissingError(f"{path}: {reason}") from error


def _map_to_read(place: Folder, map_size: int, *, wait: bool) -> lmdb.Environment:
    if place.status(TABLE) is not None and (wait or can_share(place)):
        try:
            return open_checked(place, map_size, read_only=True)
        except DAMAGE:
            raise
        except lmdb.Error:
            pass  # this process may not write to the table of readers
    # A writer may reuse a page that is being read. The value then fails its checksum.
    return open_checked(place, map_size, read_only=True, lock=False)


def exchange(root: Folder, env: lmdb.Environment) -> None:
    """Replace the database by a copy without free pages; the caller is alone."""
    settle(root)
    check_names(root)
    try:
        root.make("new")
        with database(root, "new") as new:
            env.copy(new.lasting_path, compact=True)
            sync(new)
            allocate_readers(new)
        root.rename("db", "old")
        root.rename("new", "db")
    finally:
        settle(root)


def identity_of(place: Folder) -> tuple[int, ...]:
    """Return what identifies the file of a database; nothing if there is no database."""
    status = place.status(DATA)
    return () if status is None else (status.st_dev, status.st_ino)


def identity_at(path: str) -> tuple[int, ...]:
    """Return the same of a file at a path; nothing if it can't be examined."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return ()
    return status.st_dev, status.st_ino


@contextmanager
def database(root: Folder, *names: str) -> Generator[Folder]:
    """Yield the directory of the database: the first of `names` that is there.

    Raises:
        FileNotFoundError: there is none.
        lmdb.InvalidError: it is a link, or a file.
    """
    name = next((name for name in names if root.status(name) is not None), names[0])
    try:
        place = Folder(name, root)
    except NotADirectoryError as error:
        raise lmdb.InvalidError(f"{name} is no directory") from error
    with place:
        yield place


def settle(root: Folder) -> None:
    """Finish, or undo, what a killed process left of an exchange; the caller is alone."""
    if root.status("db") is None:
        # The old one was moved away, so either the new one was complete or there is none.
        for name in ("new", "old"):
            status = root.status(name)
            if status is not None and S_ISDIR(status.st_mode):
                root.rename(name, "db")
                break
    for name in ("new", "old"):
        root.remove(name)


def discard(root: Folder) -> None:
    """Remove the database; the caller is alone. A process that has it open keeps the old file."""
    check_names(root)
    root.remove("old")
    with suppress(FileNotFoundError):
        root.rename("db", "old")
    root.remove("old")


def check_names(root: Folder) -> None:
    """Refuse to move a directory in which others have put something.

    Raises:
        BackendError: somebody has.
    """
    for name in ("db", "old"):
        with suppress(FileNotFoundError, NotADirectoryError), Folder(name, root) as place:
            if strange := set(place.names()) - {DATA, TABLE}:
                raise BackendError(
                    f"{place.path} holds {sorted(strange)[0]!r}, which kcache has not written; "
                    "move it away, so that the database can be replaced"
                )
