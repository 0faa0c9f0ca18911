"""OpenFile: a descriptor with an owner. The file is checked to be ours when it is opened.

A bare descriptor is a number. If one thread closes it while another is about to write, the number
may then belong to another file, which gets the write. So no code in kcache keeps a bare number that
other code may close. The number belongs to an `OpenFile`.
"""

from __future__ import annotations

import errno
import os
from stat import S_ISBLK, S_ISCHR, S_ISDIR, S_ISFIFO, S_ISREG, S_ISSOCK

from kcache.util.forks import after_fork
from kcache.util.locks import pread, pwrite

__all__ = [
    "SAFE",
    "NotOursError",
    "OpenFile",
    "has_header",
    "identity",
    "is_own",
    "open_own",
    "owner_problem",
]

#: Flags for every open: programs that we start do not inherit it, it follows no link, it never
#: waits (for the other end of a pipe), and it never becomes our terminal.
SAFE = (
    getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)
_user = getattr(os, "geteuid", lambda: 0)  # Windows returns 0 for every file
_KINDS = (
    (S_ISDIR, "a directory"),
    (S_ISFIFO, "a pipe"),
    (S_ISSOCK, "a socket"),
    (S_ISCHR, "a device"),
    (S_ISBLK, "a device"),
)


class NotOursError(OSError):
    """A file is not one that kcache made: it is of another kind, user or format."""

    def __init__(self, reason: str, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EPERM, reason, os.fspath(path))


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return what identifies a file: device and inode."""
    return status.st_dev, status.st_ino


class OpenFile:
    """An open file, closed with the last reference to this object and never before.

    Python counts the users: code that reads, writes or locks has a reference to this object
    meanwhile. To close the file, drop the reference. It stays open for a thread that works with it
    until that thread is done.

    Threads: safe to share. Fork: the child closes its copy of the file at once, because the
    parent's locks belong to it and must end with the parent. The number then leads to `os.devnull`
    until the last reference is gone, so that no other file gets it while code still uses it. Exit:
    a daemon thread's reference keeps the file open.

    Args:
        fd: the descriptor; it belongs to this object from here on.
        status: of the file, if the caller already has it.
    """

    __slots__ = ("__weakref__", "fd", "identity")

    def __init__(self, fd: int, status: os.stat_result | None = None) -> None:
        self.fd = fd
        #: Device and inode, which identify the file.
        self.identity = identity(os.fstat(fd) if status is None else status)
        after_fork(self)

    def is_open(self) -> bool:
        """Tell whether the number still leads to the file.

        It does not if the program has closed descriptors that are not its own, as programs do that
        become daemons.
        """
        try:
            return identity(os.fstat(self.fd)) == self.identity
        except OSError:
            return False

    def is_at(self, path: str) -> bool:
        """Tell whether `path` leads to this file: it was not removed, moved or replaced."""
        try:
            return identity(os.stat(path, follow_symlinks=False)) == self.identity
        except (FileNotFoundError, NotADirectoryError):
            return False

    def after_fork(self) -> None:
        """Close the file in a child process, and keep the number reserved."""
        if not self.is_open():
            return
        number, self.fd = self.fd, -1
        os.close(number)
        try:  # this takes the lowest free number, which may be a different one
            nothing = os.open(os.devnull, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
            if nothing != number:
                os.dup2(nothing, number, inheritable=False)
                os.close(nothing)
            self.identity = identity(os.fstat(number))
            self.fd = number
        except OSError:
            # Without /dev: no other thread or program runs yet, and later uses fail with EBADF.
            return

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]  # os may be gone at exit
        if getattr(self, "fd", -1) >= 0 and self.is_open():
            close(self.fd)


def is_own(status: os.stat_result) -> bool:
    """Tell whether a file may be written to: a plain file of the present user, with one name.

    A second name (a hard link) may belong to a file that is not ours.
    """
    return S_ISREG(status.st_mode) and status.st_uid == _user() and status.st_nlink <= 1


def owner_problem(status: os.stat_result) -> str:
    """Return why `is_own` is false, in words that continue "it is"."""
    for right, name in _KINDS:
        if right(status.st_mode):
            return f"{name}, no file of kcache"
    if not S_ISREG(status.st_mode):
        return "no plain file"
    if status.st_uid != _user():
        return f"a file of user {status.st_uid}, and you are user {_user()}"
    return f"a file with {status.st_nlink} names; kcache makes no hard links"


def open_own(path: str, flags: int) -> OpenFile:
    """Open a file that is ours, for writing or reading, without following a link or waiting.

    Args:
        path: the file.
        flags: as for `os.open`; with `O_CREAT` it is made, for the present user alone.

    Raises:
        NotOursError: it is not a plain file of the present user with one name. Nothing was changed.
        OSError: it can't be opened.
    """
    fd = os.open(path, flags | SAFE, 0o600)
    try:
        status = os.fstat(fd)
        if not is_own(status):
            raise NotOursError(f"it is {owner_problem(status)}", path)
    except BaseException:
        os.close(fd)
        raise
    return OpenFile(fd, status)


def has_header(file: OpenFile, header: bytes) -> bool:
    """Tell whether a file begins with `header`, which is written if the file is new.

    A file is new if it is empty, or if it has only zeros after a full disk or a power cut.
    """
    found = pread(file.fd, len(header), 0)
    if not any(found):
        return pwrite(file.fd, header, 0) == len(header)
    return found == header
