"""Private sockets: Unix sockets in a folder that only their user can enter."""

from __future__ import annotations

import _socket  # `socket` takes 3 ms more
import os
import stat
import sys
import time
from contextlib import suppress

__all__ = [
    "MOST_PATH",
    "SILENT_END",
    "above_standard",
    "bound",
    "claimed",
    "is_same_user",
    "note_silence",
    "private_folder",
    "was_silent",
]

#: How many programs may wait for a connection. The kernel has a limit of its own
#: (net.core.somaxconn).
BACKLOG = 4096
#: `sun_path` of unix(7) has 108 bytes, including the final NUL.
MOST_PATH = 107
#: A file beside the socket of a process that did not answer. Its time says when.
SILENT_END = ".silent"
#: The size of `struct ucred` of unix(7): process, user and group, 32 bits each.
_CREDENTIALS = 12


def private_folder(folder: str) -> None:
    """Make a folder unless it is there, and check that it is the user's own.

    Raises:
        OSError: it can't be made, or others can enter it.
    """
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} is not private")


def claimed(folder: str) -> int | None:
    """Take the lock of a folder that this user made; return its descriptor, or None.

    Whoever serves at a socket in the folder holds the lock until the last copy of the descriptor is
    closed, at the latest when its process ends. The lock says so in every PID namespace, of a
    process that was stopped, too, and for a socket that is not there yet.
    """
    import fcntl

    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = None
    try:
        descriptor = above_standard(os.open(folder, flags))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status, there = os.fstat(descriptor), os.lstat(folder)
        # Before it was locked, somebody may have removed it, because nobody held the lock.
        if status.st_uid == os.geteuid() and os.path.samestat(status, there):
            return descriptor
    except OSError:
        pass
    if descriptor is not None:
        os.close(descriptor)
    return None


def bound(path: str) -> int:
    """Return the descriptor of a new socket that listens at a path.

    Raises:
        OSError: it can't be made there.
    """
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return above_standard(listener.detach())


def is_same_user(connection: _socket.socket) -> bool:
    """Tell whether the user of this process listens at the other end of a connection.

    In a folder for all users' sockets, somebody else may have made one under our name.
    """
    # Not on Linux: there, only the directory protects the socket.
    if not hasattr(_socket, "SO_PEERCRED"):
        return True
    found = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS)
    return int.from_bytes(found[4:8], sys.byteorder) == os.geteuid()


def above_standard(descriptor: int) -> int:
    """Return a descriptor above those of the standard streams, which a launcher may have closed."""
    if descriptor > 2:
        return descriptor
    import fcntl

    moved: int = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def was_silent(path: str, seconds: float) -> bool:
    """Tell whether who listens at `path` has kept a program waiting in vain in the last seconds."""
    try:
        return 0 <= time.time() - os.lstat(path + SILENT_END).st_mtime < seconds
    except OSError:
        return False


def note_silence(path: str) -> None:
    """Note that who listens at `path` does not answer, so that not every program has to wait.

    It is noted only in a folder of the user's.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    with suppress(OSError):
        if os.lstat(os.path.dirname(path)).st_uid != os.geteuid():
            return
        with suppress(FileNotFoundError):
            os.unlink(path + SILENT_END)  # so that it gets a new time
        os.close(os.open(path + SILENT_END, flags, 0o600))
