"""Files: the file backend's calls of `os`, with the cases that are no error."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from stat import S_ISDIR, S_ISREG

from kcache.errors import BackendError, CorruptEntryError
from kcache.util.open_file import NotOursError, OwnFile, present_user, trusted

_OTHERS_WRITE = 0o022
#: Errors which say that the disk is full: evicting entries of this cache helps.
NO_ROOM = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
#: Matches the names of the temporary files that the file backend makes. It may remove these.
is_temporary = re.compile(r"\.[0-9a-f]{16}(-[0-9a-f]+)+\.tmp").fullmatch


def failure(operation: str, error: OSError) -> BackendError:
    """Return what a backend raises for an error of the operating system."""
    where = f" {error.filename}" if error.filename else ""
    return BackendError(f"{operation}{where}: {error.strerror or error}")


def is_ours(status: os.stat_result) -> bool:
    """Tell whether a user who is trusted owns a file, and nobody else can write to it.

    Cached values are code: a user who can write them can make this program run anything. The
    present user is trusted, and so are the owners of layers that this user has named.
    """
    return (
        status.st_uid == present_user() or status.st_uid in trusted
    ) and not status.st_mode & _OTHERS_WRITE


def is_ours_alone(status: os.stat_result) -> bool:
    """Tell whether a file has one name. With a second one, a hard link, it is also another's."""
    return S_ISREG(status.st_mode) and status.st_nlink == 1


def require_ours(status: os.stat_result, name: str) -> None:
    """Refuse a file that is not ours.

    Raises:
        CorruptEntryError: it is not.
    """
    if not is_ours(status):
        raise CorruptEntryError(f"{name} can't be trusted: {somebody(status)}")


def somebody(status: os.stat_result) -> str:
    """Return why a file is not ours."""
    if status.st_uid != present_user() and status.st_uid not in trusted:
        return f"it belongs to user {status.st_uid}, and you are user {present_user()}"
    return f"others can write to it (mode {status.st_mode & 0o7777:04o})"


def size_of(path: str) -> int | None:
    """Return the length of a regular file; None for anything else, which is no entry."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if S_ISREG(status.st_mode) else None


def listing(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, status) of the regular files in a directory; some may vanish meanwhile.

    A symbolic link is not followed: its target is not in the cache.
    """
    for name in names_in(directory):
        with suppress(FileNotFoundError):
            status = os.stat(f"{directory}/{name}", follow_symlinks=False)
            if S_ISREG(status.st_mode):
                yield name, status


def names_in(directory: str) -> list[str]:
    """Return the names in a directory; none if its path is a symbolic link."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(directory) if is_directory(directory) else []
    return []


def is_directory(path: str) -> bool:
    """Tell whether a path leads to a directory, and is no link."""
    try:
        return S_ISDIR(os.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_on(key: str, file: OwnFile, value: bytes, size: int) -> bytes:
    """Return `size` bytes of a file, of which the system returned fewer at first.

    Raises:
        BackendError: the file has fewer by now.
    """
    while len(value) < size:
        more = os.read(file.fd, size - len(value))
        if not more:
            raise BackendError(f"read {key}: file shrank from {size} to {len(value)} bytes")
        value += more
    return value


def rename(temporary: str, path: str) -> None:
    """Rename a file into place, also over an empty directory that somebody put there."""
    try:
        os.replace(temporary, path)
    except IsADirectoryError:  # a directory that is not empty stays
        os.rmdir(path)
        os.replace(temporary, path)


def require_own_shard(directory: str, *, make: bool = False) -> None:
    """Refuse a shard that is a link, because a put would write elsewhere; make one if asked.

    Raises:
        NotOursError: it is; FileNotFoundError: it is not there, or its parent is not.
    """
    try:
        os.readlink(directory)
    except FileNotFoundError:
        if not make:
            raise
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
    except OSError:  # it is no link
        return
    else:
        raise NotOursError("it is a link, and kcache made none", directory)


def require_private(directory: str) -> None:
    """Refuse a directory that is not ours alone, or no directory.

    Raises:
        NotOursError: it is not.
    """
    status = os.stat(directory)
    if not S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    if not is_ours(status):
        raise NotOursError(f"it can't be trusted: {somebody(status)}", directory)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable, where the system can."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some systems can't sync a directory
            raise
    finally:
        os.close(fd)
