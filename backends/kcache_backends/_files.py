"""The file system below the file backend: what `os` offers, with the cases that are no error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from stat import S_ISREG

from kcache.errors import BackendError

__all__ = ["failure", "listing", "make_private", "size_of", "sync_directory"]


def failure(operation: str, error: OSError) -> BackendError:
    """Return what a backend raises for an error of the operating system."""
    where = f" {error.filename}" if error.filename else ""
    return BackendError(f"{operation}{where}: {error.strerror or error}")


def size_of(path: str) -> int | None:
    """Return the length of a regular file; None for anything else, which is no entry."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if S_ISREG(status.st_mode) else None


def listing(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, status) of the regular files in a directory; some may vanish meanwhile."""
    try:
        with os.scandir(directory) as items:
            for item in items:
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if S_ISREG(status.st_mode):
                    yield item.name, status
    except (FileNotFoundError, NotADirectoryError):
        return


def make_private(directory: str) -> None:
    """Make a directory and its parents, all 0700; `os.makedirs` leaves parents to the umask."""
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(directory)
    if parent != directory:
        make_private(parent)
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable, where the system can."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # directories can't be synced everywhere
            raise
    finally:
        os.close(fd)
