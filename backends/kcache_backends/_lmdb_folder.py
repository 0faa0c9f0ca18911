"""Folder: an open directory. Its files are found by name, even if its path changes."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from stat import S_ISDIR, S_ISREG
from types import TracebackType
from typing import TYPE_CHECKING

import lmdb

from kcache.errors import BackendError
from kcache.util.open_file import OpenFile
from kcache_backends._files import is_ours, somebody

if TYPE_CHECKING:
    from typing import Self

__all__ = ["DATA", "TABLE", "Folder", "check_parents"]

DATA, TABLE = "data.mdb", "lock.mdb"

_DIR_FD = os.open in os.supports_dir_fd  # not on Windows
_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
#: Opens without waiting. A pipe in a file's place opens at once, and kcache then refuses it.
_FLAGS: int = _NO_LINK | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_DESCRIPTORS = "/proc/self/fd"
_NAMELESS: int = getattr(os, "O_TMPFILE", 0)
#: Errors which say that a file system or kernel can't make files without a name: open(2).
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)
_OTHERS_WRITE, _STICKY = 0o002, 0o1000


class Folder:
    """A directory of ours, open; nobody else can write to it, and no link led to it.

    The owner and the mode are those of the directory that was opened. So an exchange at its path
    changes nothing. Where the system can't open directories (Windows), names are joined to the
    path. Threads: each opens its own. Close it with a `with` block.

    Raises:
        FileNotFoundError, NotADirectoryError: it is not there, or is a link or a file.
        BackendError: somebody else owns it or can write to it.
    """

    def __init__(self, path: str, parent: Folder | None = None) -> None:
        self.path: str = path if parent is None else os.path.join(parent.path, path)
        self._fd: int | None = None
        if _DIR_FD:
            name, at = (path, None) if parent is None else (parent._name(path), parent._fd)
            flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _FLAGS
            self._fd = os.open(name, flags, dir_fd=at)
        try:
            status = os.stat(self.path) if self._fd is None else os.fstat(self._fd)
            if not S_ISDIR(status.st_mode):
                raise NotADirectoryError(20, "Not a directory", self.path)
            if not is_ours(status):
                raise BackendError(f"{self.path} can't be trusted: {somebody(status)}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the directory. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _name(self, name: str) -> str:
        return os.path.join(self.path, name) if self._fd is None else name

    @property
    def lasting_path(self) -> str:
        """A path that leads to this directory while it is open, even if its own path does not."""
        if self._fd is not None and os.path.isdir(path := f"{_DESCRIPTORS}/{self._fd}"):
            return path
        return self.path

    @property
    def number(self) -> int | None:
        """The descriptor; None where the system can't open directories, or if it is closed."""
        return self._fd

    def witness(self) -> OpenFile | None:
        """Return another descriptor of the directory; None where the system can't."""
        return None if self._fd is None else OpenFile(os.dup(self._fd))

    # -- looking -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names in it."""
        return os.listdir(self.path if self._fd is None else self._fd)

    def status(self, name: str) -> os.stat_result | None:
        """Return what is under a name, not what a link leads to; None if there is nothing."""
        try:
            return os.stat(self._name(name), dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def check_file(self, name: str) -> os.stat_result | None:
        """Return the status of a plain file that is ours alone; None if there is nothing.

        Raises:
            lmdb.InvalidError: something else is there: a link, a pipe, a file with two names.
            BackendError: somebody else owns it or can write to it.
        """
        status = self.status(name)
        if status is not None:
            _check(status, os.path.join(self.path, name))
        return status

    # -- changing ------------------------------------------------------------------------------

    def open_file(self, name: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        """Open a plain file that is ours alone, without waiting; the caller closes it.

        Raises:
            lmdb.InvalidError, BackendError: as `check_file`.
            OSError: it can't be opened.
        """
        return self.open_with_status(name, flags)[0]

    def open_with_status(self, name: str, flags: int) -> tuple[int, os.stat_result]:
        """Open a file as `open_file` does, and return its status, too."""
        self.check_file(name)
        fd = os.open(self._name(name), flags | _FLAGS, 0o600, dir_fd=self._fd)
        try:
            status = os.fstat(fd)
            _check(status, os.path.join(self.path, name))
        except BaseException:
            os.close(fd)
            raise
        return fd, status

    def make_file(self, name: str, content: bytes) -> None:
        """Make a file that has its content from its first moment on, unless something is there.

        Where the system can't (it is not Linux, or the file system has no `O_TMPFILE`), the file
        is empty for a moment.

        Raises:
            lmdb.InvalidError, BackendError: as `check_file`.
            OSError: it can't be made.
        """
        if self.check_file(name) is None and self._linked(name, content):
            return
        fd = self.open_file(name)
        try:
            os.write(fd, content)
        finally:
            os.close(fd)

    def _linked(self, name: str, content: bytes) -> bool:
        """Write a file without a name, then give it one; tell whether the system can do that."""
        if self._fd is None or not _NAMELESS:
            return False
        try:
            fd = os.open(".", os.O_RDWR | _NAMELESS | _FLAGS, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno in _NO_NAMELESS:
                return False
            raise
        try:
            os.write(fd, content)
            # If two processes do this at once, one of them is the first.
            with suppress(FileExistsError):
                os.link(f"{_DESCRIPTORS}/{fd}", name, dst_dir_fd=self._fd, follow_symlinks=True)
        except FileNotFoundError:
            if os.path.isdir(_DESCRIPTORS):
                raise  # the directory is gone
            return False
        finally:
            os.close(fd)
        return True

    def make(self, name: str) -> None:
        """Make a directory in it, 0700, unless something is there."""
        with suppress(FileExistsError):
            os.mkdir(self._name(name), 0o700, dir_fd=self._fd)

    def rename(self, old: str, new: str) -> None:
        """Give what is under one name another one."""
        os.rename(self._name(old), self._name(new), src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Remove what we have written under a name: a file, or a directory with a database.

        In a directory only the two files of a database are removed, never through a link; it stays
        if it holds anything else.
        """
        status = self.status(name)
        if status is None:
            return
        with suppress(OSError):
            if not S_ISDIR(status.st_mode):
                os.unlink(self._name(name), dir_fd=self._fd)
                return
            with suppress(BackendError), Folder(name, self) as inner:
                inner._remove_database()
            os.rmdir(self._name(name), dir_fd=self._fd)

    def _remove_database(self) -> None:
        for name in (DATA, TABLE):
            with suppress(FileNotFoundError):
                try:
                    os.unlink(self._name(name), dir_fd=self._fd)
                except (IsADirectoryError, PermissionError):
                    with suppress(OSError):
                        os.rmdir(self._name(name), dir_fd=self._fd)


def _check(status: os.stat_result, path: str) -> None:
    if not S_ISREG(status.st_mode):
        raise lmdb.InvalidError(f"{path} is a link, or of another kind")
    if not is_ours(status):
        raise BackendError(f"{path} can't be trusted: {somebody(status)}")
    if status.st_nlink > 1:
        raise lmdb.InvalidError(f"{path} has a second name, so it may be somebody else's file")


def check_parents(path: str) -> None:
    """Refuse a path on which anybody may exchange a directory.

    Raises:
        BackendError: a directory above is writable for everybody, and not sticky as `/tmp` is.
    """
    parent = os.path.dirname(path)
    while os.name != "nt":
        with suppress(FileNotFoundError):
            mode = os.stat(parent).st_mode
            if mode & _OTHERS_WRITE and not mode & _STICKY:
                raise BackendError(
                    f"{path} can't be trusted: everybody can write to {parent} (mode "
                    f"{mode & 0o7777:04o}), and exchange what is in it (chmod o-w {parent})"
                )
        if parent == os.path.dirname(parent):
            return
        parent = os.path.dirname(parent)
