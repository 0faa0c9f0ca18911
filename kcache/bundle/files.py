"""Bundle files: replaces a file as a whole, and also reads a bundle from a pipe."""

from __future__ import annotations

import io
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from kcache.bundle.format import HEAD_SIZE, is_head
from kcache.bundle.reader import Bundle, is_bundle
from kcache.errors import BundleError
from kcache.util.open_file import open_own

__all__ = ["Source", "opened", "replacing"]

#: A file's path, or an open binary file.
Source = str | os.PathLike[str] | BinaryIO
_BUFFER = 1 << 20


@contextmanager
def replacing(path: str) -> Generator[BinaryIO]:
    """Yield a file that replaces `path` at the end of the block, or is removed if the block raises.

    Raises:
        BundleError: the file at `path` is no bundle.
        OSError: the file can't be made.
    """
    _refuse_others(path)
    folder, name = os.path.split(path)
    _sweep(folder, name)
    # A random name, so that two threads don't write the same file, nor two processes of different
    # containers that have the same number.
    temporary = os.path.join(folder, f".{name}.{secrets.randbits(64)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    fd = os.open(temporary, flags, 0o666)
    try:
        with open(fd, "wb", buffering=_BUFFER) as file:
            _lock(file.fileno())
            yield file
        _refuse_others(path)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _refuse_others(path: str) -> None:
    """Refuse to replace a file that is no bundle, unless it is empty.

    Raises:
        BundleError: there is such a file.
    """
    try:
        replaceable = not os.path.lexists(path) or is_bundle(path)
    except OSError as error:
        raise BundleError(f"{path}: what is there can't be read: {error.strerror}") from error
    if not replaceable and not _is_empty_file(path):
        raise BundleError(f"{path}: there is something else than a bundle; it is left alone")


def _is_empty_file(path: str) -> bool:
    status = os.stat(path)
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _sweep(folder: str, name: str) -> None:
    """Remove temporary files, which nobody locks, of exports to the same name that were killed."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        for entry in list(os.scandir(folder or os.curdir)):
            middle = entry.name.removeprefix(f".{name}.").removesuffix(".tmp")
            if entry.name != f".{name}.{middle}.tmp" or not middle.isdecimal():
                continue
            with suppress(OSError):
                file = open_own(entry.path, os.O_RDONLY)  # does not wait for a pipe
                if _lock(file.fd):
                    os.unlink(entry.path)


def _lock(fd: int) -> bool:
    """Lock an open file of this process until it is closed; tell whether it was free."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def opened(source: Source) -> Generator[Bundle]:
    """Open a bundle for the block; a bundle from a pipe goes to a temporary file first.

    Raises:
        BundleError: it is no bundle.
        OSError: it can't be read, or there is no room for the temporary file.
    """
    if isinstance(source, (str, os.PathLike)):
        bundle = Bundle(source)
    elif _is_file(source):
        bundle = Bundle(source.fileno())
    else:
        bundle = _spooled(source)
    try:
        yield bundle
    finally:
        bundle.close()


def _is_file(source: BinaryIO) -> bool:
    """Tell whether an open file is a regular file whose position is its beginning."""
    try:
        return stat.S_ISREG(os.fstat(source.fileno()).st_mode) and source.tell() == 0
    except (OSError, io.UnsupportedOperation):
        return False


def _spooled(source: BinaryIO) -> Bundle:
    name = "what was piped in"
    head = source.read(HEAD_SIZE)
    if not is_head(head):  # before gigabytes of something else are copied
        raise BundleError(f"{name}: it is no bundle")
    with tempfile.TemporaryFile(prefix="kcache-") as file:
        file.write(head)
        while data := source.read(_BUFFER):
            file.write(data)
        file.flush()
        try:
            bundle = Bundle(file.fileno())
        except BundleError as error:
            raise BundleError(f"{name}: {str(error).partition(': ')[2]}") from None
    bundle.name = name
    return bundle
