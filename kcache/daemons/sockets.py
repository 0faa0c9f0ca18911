"""Sockets: where the daemons of this user listen, and how a program and a daemon communicate.

All sockets of a user are in one folder that only this user can enter. A program tests whether a
daemon is alive by connecting to its socket. This works across PID namespaces, and also if the
daemon is stopped. On a connection, the program sends a question and the daemon an answer, in turn.
Both are messages of `kcache.util.wire`.

The launcher of `kcache run` imports this module before the program starts, so this module imports
little.
"""

from __future__ import annotations

import _socket  # `socket` takes 3 ms more
import errno
import json
import os
import stat
import sys
import time
from contextlib import suppress

from kcache.util.forks import after_fork
from kcache.util.open_file import identity
from kcache.util.path_safety import make_directory, present_user, unsafe_part, why_no_user
from kcache.util.wire import WireError, heading, receive

TYPE_CHECKING = False  # `typing` takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

#: Questions that every daemon answers.
STATUS, STOP = b"status", b"stop"
#: The first field of an answer. Before an answer that takes long, the daemon sends heartbeats, each
#: a message with the one field `WAIT`.
DONE, NO, WAIT = b"done", b"no", b"wait"
#: How many programs may wait for a connection. The kernel has a limit of its own
#: (net.core.somaxconn).
BACKLOG = 4096
#: The longest path in bytes of a folder for sockets. `sun_path` of unix(7) has 108 bytes, including
#: the final NUL. The longest name of a socket, with the slash before it, takes 32.
_MAX_FOLDER = 107 - 32
_CREDENTIALS = 12  # the size of `struct ucred` of unix(7): process, user and group
#: How many seconds `ask` waits for the answer of a daemon.
ASK_TIMEOUT = 5.0
#: The size in bytes of a connection's send buffer; net.core.wmem_max may limit it to less.
SEND_BUFFER = 1 << 20
#: Suppresses SIGPIPE, which would kill a program that sends to a daemon that has exited.
_NO_SIGNAL = getattr(_socket, "MSG_NOSIGNAL", 0)


def folder_in(folders: Iterable[str]) -> str:
    """Return the folder of this user's sockets, in the first of `folders` that can be used.

    The folder is made if it does not exist.

    Raises:
        OSError: none of `folders` can be used, or the operating system is not Linux.
    """
    if sys.platform != "linux":
        raise OSError("kcache's daemons need Linux; layers work without daemons")
    if no_user := why_no_user():
        raise OSError(no_user)
    problem = OSError("there is no folder for the daemon's socket")
    for folder in folders:
        # `environment` gives another name to the cache of a user without a home directory, which
        # may be in the same `folder`.
        private = os.path.join(folder, f"kcache-daemons-{os.geteuid()}")
        try:
            if len(os.fsencode(private)) > _MAX_FOLDER:
                raise OSError(f"the path {private} is too long for a socket")
            unsafe = unsafe_part(private)  # if the path is safe, no other user can replace it
            if unsafe:
                raise OSError(unsafe)
            require_private(private)
        except OSError as error:
            problem = error
        else:
            return private
    raise problem


def require_private(folder: str) -> None:
    """Make a folder unless it exists, and check that only this user has access to it.

    Raises:
        OSError: the folder can't be made, belongs to another user, or others have access to it.
    """
    with suppress(FileExistsError):
        make_directory(folder)
    status = os.lstat(folder)
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == present_user()
    if not is_own or status.st_mode & 0o077:
        raise OSError(f"{folder}: expected a directory that belongs to you and has mode 0700")


def bound(path: str) -> int:
    """Make a socket that listens at `path`, in place of an existing one; return its descriptor.

    The socket is renamed to `path` when it listens already, so that no program finds a socket at
    `path` before it listens.

    Raises:
        OSError: the socket can't be made at `path`.
    """
    made = os.path.join(os.path.dirname(path), f".{os.urandom(6).hex()}")
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        listener.bind(made)
        os.chmod(made, 0o600)  # `bind` leaves the mode to the umask
        listener.listen(BACKLOG)
        os.rename(made, path)
    except OSError:
        listener.close()
        with suppress(OSError):
            os.unlink(made)
        raise
    return above_standard(listener.detach())


def socket_identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode of the socket at `path`, or None if there is no file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def connected(path: str) -> _socket.socket | None:
    """Return a connection to the daemon at `path`, or None if no daemon of this user listens."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.setblocking(False)  # a full backlog must not block, either
    with suppress(OSError):
        connection.connect(path)
        found = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS)
        if int.from_bytes(found[4:8], sys.byteorder) == present_user():
            return connection
    connection.close()
    return None


def remove_socket(path: str, identity: tuple[int, int] | None) -> None:
    """Remove the socket at `path`, unless it was replaced since it had this `identity`.

    A program does this if the daemon did not answer in time, so that other programs do not wait for
    the same daemon. If that daemon continues to run, it makes a new socket, or it exits if another
    daemon has the path by then.
    """
    if identity is not None and socket_identity(path) == identity:
        with suppress(OSError):
            os.unlink(path)


def sweep(folder: str) -> None:
    """Remove the sockets in `folder` whose daemons have died, and then `folder` if it is empty."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if not name.startswith(".") and _is_dead(os.path.join(folder, name)):
                os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _is_dead(path: str) -> bool:
    # A living daemon rejects a datagram socket with another error, and does not count the attempt
    # as a program that connects.
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    found = connection.connect_ex(path)
    connection.close()
    return found == errno.ECONNREFUSED and stat.S_ISSOCK(os.lstat(path).st_mode)


def above_standard(descriptor: int) -> int:
    """Return a descriptor above 2 of the same open file: `descriptor` itself or a duplicate.

    A new descriptor is 0, 1 or 2 if the program has closed its standard streams. It is then
    duplicated and closed.
    """
    if descriptor > 2:
        return descriptor
    moved = above_standard(os.dup(descriptor))
    os.close(descriptor)
    return moved


# -- messages --------------------------------------------------------------------------------------


class Channel:
    """One end of a connection between a program and a daemon, which send messages in turn.

    Threads: Only one thread may use an object at a time. Fork: A forked child closes its copy of
    the connection, so that the connection, with a lease that belongs to it, ends with this process.

    Args:
        connection: a connected socket, which this object closes.
        seconds: the time limit for a message once it has begun.
    """

    def __init__(self, connection: _socket.socket, seconds: float) -> None:
        connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, SEND_BUFFER)
        self._socket = connection
        self._identity = identity(os.fstat(connection.fileno()))
        self._seconds = seconds
        self._end = 0.0
        after_fork(self)

    def ask(self, fields: Sequence[bytes], seconds: float) -> list[bytes]:
        """Send the question `fields`, and return the answer.

        Raises:
            TimeoutError: there is no answer within `seconds`.
            OSError: the connection failed.
            WireError: the other side closed the connection or sent a malformed message; or this
                program closed the descriptor, whose number may now belong to another file.
        """
        if not self._is_open():
            raise WireError("this program has closed the descriptor of the connection")
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        try:
            self.send(fields)
            return receive(self._read)
        except TimeoutError as error:
            raise TimeoutError("the daemon did not answer in time") from error

    def next(self) -> list[bytes]:
        """Wait for the next message without a time limit, and return the message.

        Raises:
            TimeoutError: the message began, but was not complete within the time limit.
            OSError: the connection failed.
            WireError: the other side closed the connection or sent a malformed message.
        """
        self._socket.settimeout(None)
        self._socket.recv(1, _socket.MSG_PEEK)
        self._end = time.monotonic() + self._seconds
        return receive(self._read)

    def send(self, fields: Sequence[bytes]) -> None:
        """Send one message; raises OSError."""
        self._socket.settimeout(self._seconds)
        self._socket.sendall(b"".join((heading(fields), *fields)), _NO_SIGNAL)

    def _read(self, size: int) -> bytes:
        """Return at most `size` bytes, or none if the other side has closed. Raises OSError."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the message took too long")
        self._socket.settimeout(seconds)
        return self._socket.recv(size)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with suppress(OSError):
            if self._is_open():
                self._socket.close()
            else:
                self._socket.detach()

    def after_fork(self) -> None:
        """In a child process after a fork, close the child's copy of the connection."""
        self.close()

    def _is_open(self) -> bool:
        try:
            return identity(os.fstat(self._socket.fileno())) == self._identity
        except OSError:
            return False

    def __del__(self) -> None:
        if hasattr(self, "_identity"):
            self.close()


def ask(path: str, question: bytes) -> list[bytes] | None:
    """Return the answer of the daemon at `path` to `question`.

    The result is None if the daemon is unreachable, times out or sends a malformed reply.
    """
    connection, identity = connected(path), socket_identity(path)
    if connection is None:
        return None
    channel = Channel(connection, ASK_TIMEOUT)
    try:
        kind, *answer = channel.ask([question], ASK_TIMEOUT)
    except TimeoutError:
        remove_socket(path, identity)
        return None
    except (OSError, WireError, ValueError):
        return None
    finally:
        channel.close()
    return answer if kind == DONE else None


def status(path: str) -> dict[str, Any] | None:
    """Return the status of the daemon at `path`, or None in the same cases as `ask`."""
    try:
        (answer,) = ask(path, STATUS) or (b"",)
        found: dict[str, Any] = {**json.loads(answer)}
    except (ValueError, TypeError, RecursionError):
        return None
    return found if found.keys() >= {"version", "process", "started"} else None
