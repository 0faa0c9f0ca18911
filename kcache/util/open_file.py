"""OwnFile: a file of kcache while it is open. Its kind and owner are checked when it is opened.

A bare descriptor is a number. If one thread closes it while another is about to write, the number
may then belong to another file, which gets the write. So kcache keeps the object, not its number.
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

#: Flags for every open: child processes do not inherit the file, links are not followed, pipes do
#: not block, and a terminal does not become the controlling one.
SAFE = (
    getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)
#: Errors of `open` for a link with O_NOFOLLOW, a socket, and a directory.
_NO_FILE = {
    errno.ELOOP: "a link",
    errno.EMLINK: "a link",
    errno.ENXIO: "a socket",
    errno.EISDIR: "a directory",
}


class NotOursError(OSError):
    """A file is not one that kcache made: it is of another kind, user or format."""

    def __init__(self, reason: str, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EPERM, reason, os.fspath(path))


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return what identifies a file: device and inode."""
    return status.st_dev, status.st_ino


class OwnFile(FileIO):
    """An open file: closed by `close`, by its `with` block, or with the last reference to it.

    Closing the file ends the locks on it. An exception of a signal handler at the instant of
    opening may leave the file open, not locked, until the process exits.

    Threads: each opens a file of its own. Fork: a child closes its copy, so that the locks belong
    to the parent alone. A program must not close descriptors that are not its own while a thread
    uses kcache.
    """

    __slots__ = ("status",)
    #: The file's status when `open_own` opened it.
    status: os.stat_result
    # Without this, Python warns about each file that is closed with its last reference.
    __del__ = FileIO.close

    @property
    def fd(self) -> int:
        """The descriptor; valid as long as this object is referenced."""
        return self.fileno()

    def is_at(self, path: str) -> bool:
        """Return whether `path` leads to this file: it was not removed, moved or replaced."""
        try:
            return identity(os.stat(path, follow_symlinks=False)) == identity(os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def after_fork(self) -> None:
        """Close the file in a child process, which releases no lock of its parent."""
        with suppress(OSError):
            self.close()


def opened(path: str, flags: int, mode: int = 0o600) -> OwnFile:
    """Open any file without following a link or waiting; a new one gets `mode`.

    Raises:
        IsADirectoryError: it is a directory. OSError: it can't be opened.
    """
    return OwnFile(path, opener=lambda path, _: os.open(path, flags | SAFE, mode))


def is_plain(status: os.stat_result) -> bool:
    """Return whether something is a plain file with one name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def owner_problem(status: os.stat_result) -> str:
    """Return why a file may not be written to, in words that continue "it is"; empty if it may.

    It must be a plain file of the present user with one name. A second name (a hard link) may
    belong to a file of another program.
    """
    if not stat.S_ISREG(status.st_mode):
        return "not a plain file, so not a file of kcache"
    if status.st_uid != present_user():
        return f"a file of user {status.st_uid}, and you are user {present_user()}"
    if status.st_nlink > 1:
        return f"a file with {status.st_nlink} names; kcache makes no hard links"
    return ""


def open_own(path: str, flags: int) -> OwnFile:
    """Open a file of kcache, for writing or reading, without following a link or waiting.

    Args:
        path: the file.
        flags: as for `os.open`; with `O_CREAT` it is made, for the present user alone.

    Raises:
        NotOursError: it is not a plain file of the present user with one name. Nothing was changed.
        OSError: it can't be opened.
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
    """Return whether a file begins with `header`, which is written if the file is new.

    A file is new if it is empty, or if it has only zeros after a full disk or a power cut.
    """
    found = pread(file.fd, len(header), 0)
    if not any(found):
        return pwrite(file.fd, header, 0) == len(header)
    return found == header


@contextmanager
def replacing(path: str, mode: int = 0o666) -> Generator[str]:
    """Yield the path of an empty file, which takes the place of `path` at the end of the block.

    It gets `mode`, less the umask.

    If the block raises, the file is removed. Only a killed process leaves it behind.

    Raises:
        OSError: the file can't be made.
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
