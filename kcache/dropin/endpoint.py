"""Endpoint: the socket of a server, in a private directory, and short questions to it.

The launcher imports this module before the program starts, so it imports little itself.
"""

from __future__ import annotations

import _socket  # `socket` takes 3 ms more
import os
import stat
import time
from contextlib import suppress

from kcache.util.private_socket import (
    MOST_PATH,
    SILENT_END,
    above_standard,
    bound,
    claimed,
    is_same_user,
    note_silence,
    private_folder,
    was_silent,
)

TYPE_CHECKING = False  # `typing` takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = [
    "Endpoint",
    "above_standard",
    "ask",
    "identity",
    "is_silent",
    "listen",
    "listen_for_user",
    "status",
    "sweep",
    "user_socket",
]

#: Seconds that a question about a server may take.
ASK_TIMEOUT = 5.0
_NAME = "socket"
#: For so many seconds, nobody asks a server that was silent; the same in `native/server.c`.
SILENT_FOR = 60.0
_STATUS = 4
#: What the status of each server has.
_TOLD = {"version", "process", "settings", "counts"}
_PREFIX = "kcache-run-"
#: Bytes that are received at a time.
_PART = 1 << 16


class Endpoint:
    """A socket that listens, in a folder that its process holds the lock of. Immutable.

    Attributes:
        path: the socket's path.
        descriptors: of the socket, and of the lock.
    """

    __slots__ = ("descriptors", "path")

    def __init__(self, path: str, descriptors: tuple[int, int]) -> None:
        self.path = path
        self.descriptors = descriptors

    def close(self) -> None:
        """Close this process's copies."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the socket and its directory."""
        _remove(os.path.dirname(self.path), self.descriptors[1])


def listen(folders: Iterable[str]) -> Endpoint:
    """Return a new endpoint in a new private directory, in the first folder where that is possible.

    Raises:
        OSError: it is possible in none.
    """
    problem: OSError | None = None
    for folder in folders:
        made = os.path.join(folder, f"{_PREFIX}{os.urandom(6).hex()}")
        path = os.path.join(made, _NAME)
        if len(os.fsencode(path)) > MOST_PATH:
            problem = problem or OSError(f"{path} is too long for a socket")
            continue
        try:
            os.mkdir(made, 0o700)
            return _endpoint(path)
        except OSError as error:
            problem = error
    raise problem or OSError("no folder for a socket")


def _endpoint(path: str) -> Endpoint:
    """Return an endpoint at a path.

    Raises:
        OSError: another process has one there, or it can't be made.
    """
    lock = claimed(os.path.dirname(path))
    if lock is None:
        raise OSError("a server is running")
    try:
        for old in (path, path + SILENT_END):
            with suppress(FileNotFoundError):
                os.unlink(old)
        return Endpoint(path, (bound(path), lock))
    except BaseException:
        os.close(lock)
        raise


def sweep(folders: Iterable[str]) -> None:
    """Remove the endpoints that killed servers have left."""
    for folder in folders:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            if name.startswith(_PREFIX):
                _remove_unclaimed(os.path.join(folder, name))


def _remove_unclaimed(folder: str) -> None:
    """Remove an endpoint's directory if no process has its lock.

    It lies among the directories of all users, so a symbolic link of that name may lead anywhere.
    """
    lock = claimed(folder)
    if lock is not None:
        _remove(folder, lock)
        os.close(lock)


def _remove(folder: str, lock: int) -> None:
    for name in (_NAME, f"{_NAME}{SILENT_END}"):
        with suppress(OSError):
            if _is_left_behind(os.lstat(name, dir_fd=lock)):
                os.unlink(name, dir_fd=lock)
    with suppress(OSError):
        os.rmdir(folder)


def _is_left_behind(status: os.stat_result) -> bool:
    """Tell whether this is a socket, or the empty file that marks a silent server."""
    return stat.S_ISSOCK(status.st_mode) or (
        stat.S_ISREG(status.st_mode) and status.st_size == 0 and status.st_nlink == 1
    )


def user_socket(folders: Iterable[str]) -> str:
    """Return the socket's path of the one server that a user may keep running."""
    paths = [os.path.join(each, f"kcache-server-{os.geteuid()}", _NAME) for each in folders]
    return next((path for path in paths if len(os.fsencode(path)) <= MOST_PATH), paths[-1])


def listen_for_user(path: str) -> Endpoint:
    """Return an endpoint at the user's path, whose directory must be the user's own.

    Raises:
        OSError: it is in use, or the directory is not safe.
    """
    private_folder(os.path.dirname(path))
    return _endpoint(path)


def identity(path: str) -> tuple[int, int] | None:
    """Return what tells the socket at a path from another one there later; None without one."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_silent(path: str) -> bool:
    """Tell whether the server at `path` was silent lately, so that it is not worth another wait."""
    return was_silent(path, SILENT_FOR)


def ask(path: str, kind: int) -> bytes | None:
    """Return the answer of the server at `path` to a frame of that kind without payload, or None.

    It is also None if the server is another user's, or has not answered within `ASK_TIMEOUT`. A
    server that only sends signs of life does not extend this time.
    """
    import socket

    from kcache.dropin import protocol

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ASK_TIMEOUT)
        until = time.monotonic() + ASK_TIMEOUT
        try:
            connection.connect(path)
            if not is_same_user(connection):
                return None
            # A server that has ended must not end a program that does not ignore SIGPIPE.
            connection.sendall(protocol.frame(kind), getattr(socket, "MSG_NOSIGNAL", 0))
            while True:
                got, size = protocol.unpack_head(_exactly(connection, protocol.HEAD_SIZE, until))
                payload = _exactly(connection, size, until)
                if got != protocol.WAIT:
                    return payload
        except TimeoutError:
            note_silence(path)
            return None
        except (OSError, protocol.ProtocolError):
            return None


def status(path: str) -> dict[str, Any] | None:
    """Return the status of the server at `path`, or None if it is gone or answers nonsense."""
    import json

    try:
        told: dict[str, Any] = {**json.loads(ask(path, _STATUS) or b"")}
    except (ValueError, TypeError, RecursionError):
        return None
    return told if told.keys() >= _TOLD else None


def _exactly(connection: _socket.socket, size: int, until: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the server takes too long")
        connection.settimeout(left)
        part = connection.recv(min(size - len(received), _PART))
        if not part:
            raise ConnectionError("the server is gone")
        received += part
    return bytes(received)
