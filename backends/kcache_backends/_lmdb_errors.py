"""LMDB errors: turns what LMDB raises into what a backend raises."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

import lmdb

from kcache.errors import BackendError, FullError
from kcache_backends._files import failure

__all__ = ["DAMAGE", "MissingError", "is_full", "translated"]

#: The errors that LMDB raises for a file that it did not write. The cache then starts again with an
#: empty file: a damaged list of free pages may name pages in use, so no part of the file can be
#: trusted.
DAMAGE = (
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
#: Errors of a full disk or quota.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: A disk with fewer free bytes than this counts as full.
_NEARLY = 1 << 20
_SAME_PID = (
    "; another process with the same process id has it open: containers that share a cache in LMDB "
    "must share their process ids too, or use the backend file or zstd"
)


class MissingError(BackendError):
    """There is no database, and none may be made."""


def is_full(error: BaseException | None, path: str) -> bool:
    """Tell whether an error says that there is no room: in the map, on the disk, in the quota."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    if code == errno.EIO and sys.platform != "win32":
        # LMDB's message for a write that was cut short, as happens when a disk becomes full.
        with suppress(OSError):
            disk = os.statvfs(path)
            return disk.f_bavail * disk.f_frsize < _NEARLY
    return isinstance(error, lmdb.MapFullError) or code in _FULL


@contextmanager
def translated(operation: str, path: str) -> Generator[None]:
    """Turn what LMDB and the operating system raise into BackendError."""
    try:
        yield
    except lmdb.Error as error:
        if is_full(error, path):
            raise FullError(f"{operation} {path}: {error}") from error
        hint = _SAME_PID if getattr(error, "code", 0) == errno.EAGAIN else ""
        raise BackendError(f"{operation} {path}: {error}{hint}") from error
    except OSError as error:
        if is_full(error, path):
            raise FullError(str(failure(operation, error))) from error
        raise failure(operation, error) from error
