"""The directory that a cache lives in: made private, and checked before it is used."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress

from kcache.errors import BackendError, ConfigError

__all__ = ["LOCK_FILE", "SLOTS_FILE", "make_private", "prepare"]

#: By which processes exclude each other while one compiles, in the cache's directory.
LOCK_FILE = "flight"
#: By which processes bound how many of them compile at a time.
SLOTS_FILE = "slots"

#: See https://bford.info/cachedir/: tells backup programs that the directory can be left out.
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This file is a cache directory tag created by kcache.
# For information about cache directory tags, see https://bford.info/cachedir/
"""


def prepare(directory: str, *, read_only: bool = False) -> None:
    """Make `directory`, with its parents, for the present user alone, and check that it is safe.

    Compiled kernels are code: whoever can write to the directory can have code run by whoever
    uses it. So a directory that belongs to somebody else, or that others can write to, is refused.

    Raises:
        ConfigError: it is not a directory, is somebody else's, or others can write to it.
        BackendError: it is not there and can't be made (read-only or full file system, ...).
    """
    try:
        if not read_only:
            _make(directory)
        status = os.stat(directory)
    except FileExistsError as error:
        raise ConfigError(f"directory={directory!r} is a file; allowed: a directory") from error
    except NotADirectoryError as error:
        raise ConfigError(
            f"directory={directory!r} is not allowed: a part of its path is a file"
        ) from error
    except OSError as error:
        raise BackendError(f"directory {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"directory={directory!r} is a file; allowed: a directory")
    if sys.platform != "win32":
        _check_owner(directory, status)
    if not read_only:
        _tag(directory)


def _make(directory: str) -> None:
    """Make a directory and its parents, all 0700; `os.makedirs` leaves parents to the umask."""
    parent = os.path.dirname(os.path.abspath(directory))
    if parent != directory and not os.path.isdir(parent):
        _make(parent)
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)


def make_private(directory: str) -> None:
    """Make a directory and its parents, all 0700; `os.makedirs` leaves parents to the umask."""
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(directory)
    if parent != directory:
        make_private(parent)
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)


def _check_owner(directory: str, status: os.stat_result) -> None:
    user = os.geteuid()
    if status.st_uid != user:
        raise ConfigError(
            f"directory={directory!r} belongs to user {status.st_uid}, and you are user {user}: "
            "its kernels can't be trusted; allowed: a directory of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"directory={directory!r} can be written to by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o}), so its kernels can't be trusted; "
            f"allowed: mode 0700 or 0755 (chmod go-w {directory})"
        )


def _tag(directory: str) -> None:
    path = os.path.join(directory, "CACHEDIR.TAG")
    if os.path.exists(path):
        return
    with suppress(OSError):  # a courtesy to backup programs, no more
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        fd = os.open(path, flags, 0o600)
        try:
            os.write(fd, _TAG)
        finally:
            os.close(fd)
