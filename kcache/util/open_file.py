"""OwnFile: an open file of kcache. Its type and owner are checked when it is opened.

kcache keeps an object for an open file instead of its descriptor. A descriptor is only a number: if
one thread closed the file while another thread is about to write, the number could already belong
to another file, which would then be written to.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from io import FileIO
from typing import TYPE_CHECKING

from kcache.util.forks import after_fork
from kcache.util.locks import pread, pwrite
from kcache.util.path_safety import present_user

if TYPE_CHECKING:
    from collections.abc import Generator

#: Flags for opening every file: child processes do not inherit the file, symbolic links are not
#: followed, pipes do not block, and a terminal does not become the controlling terminal.
SAFE = (
    getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)
#: The errors of `open` for a symbolic link (because of O_NOFOLLOW), a socket, and a directory.
_NO_FILE = {
    errno.ELOOP: "a link",
    errno.EMLINK: "a link",
    errno.ENXIO: "a socket",
    errno.EISDIR: "a directory",
}


class NotOursError(OSError):
    """A file was not made by kcache for the present user: its type, owner or format is wrong."""

    def __init__(self, reason: str, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EPERM, reason, os.fspath(path))


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return the device and the inode of a file, which together identify the file."""
    return status.st_dev, status.st_ino


class OwnFile(FileIO):
    """An open file. It is closed by `close`, by its `with` block, or with its last reference.

    Closing the file releases the locks on it. If a signal handler raises an exception at the
    instant of opening, the file may stay open, without locks, until the process exits.

    Threads: each thread opens the file itself and does not share the object. Fork: a forked child
    closes its copy, so that only the parent holds the locks. A program must not close descriptors
    that it has not opened while a thread uses kcache.
    """

    __slots__ = ("status",)
    #: The file's status when `open_own` opened it.
    status: os.stat_result
    # Without this, Python would warn about each file that is closed with its last reference.
    __del__ = FileIO.close

    @property
    def fd(self) -> int:
        """The descriptor of the file. It is valid as long as this object is referenced."""
        return self.fileno()

    def is_at(self, path: str) -> bool:
        """Return whether this file is still at `path`, that is, not removed, moved or replaced."""
        try:
            return identity(os.stat(path, follow_symlinks=False)) == identity(os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def after_fork(self) -> None:
        """Close the file in the child after a fork. This does not release the parent's locks."""
        with suppress(OSError):
            self.close()


def opened(path: str, flags: int, mode: int = 0o600) -> OwnFile:
    """Open a file without following a symbolic link, and without waiting for a pipe's other end.

    If `flags` has `O_CREAT`, a new file gets `mode`.

    Raises:
        IsADirectoryError: `path` is a directory.
        OSError: the file can't be opened.
    """
    return OwnFile(path, opener=lambda path, _: os.open(path, flags | SAFE, mode))


def is_plain(status: os.stat_result) -> bool:
    """Return whether `status` is that of a regular file with at most one name (hard link)."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def owner_problem(status: os.stat_result) -> str:
    """Return why kcache may not write to a file, in words that follow "it is".

    The text is empty if kcache may write to the file. For this, it must be a regular file that
    belongs to the present user and has only one name, because a second name (a hard link) may
    belong to another program.
    """
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file, so not a file of kcache"
    if status.st_uid != present_user():
        return f"a file of user {status.st_uid}, and you are user {present_user()}"
    if status.st_nlink > 1:
        return f"a file with {status.st_nlink} names, and kcache makes no hard links"
    return ""


def open_own(path: str, flags: int) -> OwnFile:
    """Open a file of kcache for writing or reading, and check its type and its owner.

    Symbolic links are not followed, and opening a pipe does not wait for its other end.

    Args:
        path: the path of the file.
        flags: the same flags as for `os.open`. With `O_CREAT`, a missing file is created, which
            only the present user can access.

    Raises:
        NotOursError: `path` is not a regular file with one name that the present user owns. Nothing
            was changed.
        OSError: the file can't be opened.
    """
    try:
        file = opened(path, flags)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotOursError(
                f"it is {_NO_FILE[error.errno]}, not a file of kcache", path
            ) from error
        raise
    file.status = os.fstat(file.fd)
    if problem := owner_problem(file.status):
        file.close()
        raise NotOursError(f"it is {problem}", path)
    after_fork(file)
    return file


def has_header(file: OwnFile, header: bytes) -> bool:
    """Return whether `file` begins with `header`. If the file is new, write the header first.

    A file is new if it is empty, or if it begins with zeros, because a full disk or a power failure
    has prevented the header from being written.
    """
    found = pread(file.fd, len(header), 0)
    if not any(found):
        return pwrite(file.fd, header, 0) == len(header)
    return found == header


@contextmanager
def replacing(path: str, mode: int = 0o666) -> Generator[str]:
    """Return a context manager that replaces the file at `path` atomically.

    It yields the path of a new, empty file, for the block to write to. At the end of the block, the
    new file is renamed to `path`. If the block raises an exception, the new file is removed. Only a
    killed process leaves it behind. The new file has `mode`, reduced by the umask.

    Raises:
        OSError: the new file can't be created or renamed.
    """
    folder, name = os.path.split(path)
    draft = os.path.join(folder, f".{name}.{os.urandom(8).hex()}.tmp")
    opened(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode).close()
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
