"""Sockets: where the daemons of this user listen, and how a program and a daemon talk.

All sockets of a user are in one folder that only this user can enter. Whether a daemon is alive is
tested by connecting, which works in every PID namespace and for a stopped process.

One side sends a message of `kcache.util.wire`, and the other one answers it.

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
#: The first fields of answers. Any number of `WAIT` may come before a late answer.
DONE, NO, WAIT = b"done", b"no", b"wait"
#: How many programs may wait for a connection. The kernel has a limit of its own
#: (net.core.somaxconn).
BACKLOG = 4096
#: `sun_path` of unix(7) has 108 bytes, including the final NUL. The longest name takes 32.
_MAX_FOLDER = 107 - 32
_CREDENTIALS = 12  # the size of `struct ucred` of unix(7): process, user and group
#: Seconds for a daemon's answer about itself.
ASK_TIMEOUT = 5.0
#: Bytes that the operating system takes at once; net.core.wmem_max may be less.
SEND_BUFFER = 1 << 20
#: A daemon that has exited must not end a program that does not ignore SIGPIPE.
_NO_SIGNAL = getattr(_socket, "MSG_NOSIGNAL", 0)


def folder_in(folders: Iterable[str]) -> str:
    """Return the folder of this user's sockets, in the first of `folders` where it can be.

    Raises:
        OSError: it can be in none of them.
    """
    if sys.platform != "linux":
        raise OSError("expected Linux: kcache's daemons need it; layers work without")
    if no_user := why_no_user():
        raise OSError(no_user)
    problem = OSError("no folder for a socket")
    for folder in folders:
        # The cache of a user without a home has another name, see `environment`.
        private = os.path.join(folder, f"kcache-daemons-{os.geteuid()}")
        try:
            if len(os.fsencode(private)) > _MAX_FOLDER:
                raise OSError(f"{private} is too long for a socket")
            unsafe = unsafe_part(private)  # if it is safe, nobody else can replace it
            if unsafe:
                raise OSError(unsafe)
            require_private(private)
        except OSError as error:
            problem = error
        else:
            return private
    raise problem


def require_private(folder: str) -> None:
    """Make a folder unless it exists.

    Raises:
        OSError: it is not the user's own, or others have access to it.
    """
    with suppress(FileExistsError):
        make_directory(folder)
    status = os.lstat(folder)
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == present_user()
    if not is_own or status.st_mode & 0o077:
        raise OSError(f"{folder}: expected a directory of yours with mode 0700")


def bound(path: str) -> int:
    """Return the descriptor of a new socket that listens at a path, in place of what is there.

    It is renamed into place, so that a socket at the path always listens, unless its process has
    exited.

    Raises:
        OSError: it can't be made there.
    """
    made = os.path.join(os.path.dirname(path), f".{os.urandom(6).hex()}")
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        listener.bind(made)
        os.chmod(made, 0o600)  # the umask decided until now
        listener.listen(BACKLOG)
        os.rename(made, path)
    except OSError:
        listener.close()
        with suppress(OSError):
            os.unlink(made)
        raise
    return above_standard(listener.detach())


def socket_identity(path: str) -> tuple[int, int] | None:
    """Return what identifies the socket at a path, or None if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def connected(path: str) -> _socket.socket | None:
    """Return a connection to this user's daemon at a path, or None if there is none."""
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
    """Remove the socket of a daemon that did not answer in time, so that other clients do not wait.

    If the daemon continues, it makes a new socket, or exits if another daemon has the path.
    """
    if identity is not None and socket_identity(path) == identity:
        with suppress(OSError):
            os.unlink(path)


def sweep(folder: str) -> None:
    """Remove the sockets that killed daemons of this user have left, and their folder if empty."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if not name.startswith(".") and _is_dead(os.path.join(folder, name)):
                os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _is_dead(path: str) -> bool:
    # The daemon rejects a socket of another type, and does not count it as a program.
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    found = connection.connect_ex(path)
    connection.close()
    return found == errno.ECONNREFUSED and stat.S_ISSOCK(os.lstat(path).st_mode)


def above_standard(descriptor: int) -> int:
    """Return a descriptor above those of the standard streams, which a launcher may have closed."""
    if descriptor > 2:
        return descriptor
    moved = above_standard(os.dup(descriptor))
    os.close(descriptor)
    return moved


# -- messages --------------------------------------------------------------------------------------


class Channel:
    """One end of a connection. Each side sends one message and waits for the other's.

    Threads: only one may use it at a time. Fork: it is closed in the child, so that the connection,
    and a lease with it, ends with this process.

    Args:
        connection: belongs to this object from here on.
        seconds: the time that a message may take once it has begun.
    """

    def __init__(self, connection: _socket.socket, seconds: float) -> None:
        connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, SEND_BUFFER)
        self._socket = connection
        self._identity = identity(os.fstat(connection.fileno()))
        self._seconds = seconds
        self._end = 0.0
        after_fork(self)

    def ask(self, fields: Sequence[bytes], seconds: float) -> list[bytes]:
        """Return the answer to a question.

        Raises:
            OSError: there is no answer (TimeoutError: none within `seconds`).
            WireError: the other side has closed the connection, or sent something else; or the
                program has closed the descriptor, whose number may now belong to another file.
        """
        if not self._is_open():
            raise WireError("the program has closed the connection")
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        try:
            self.send(fields)
            return receive(self._read)
        except TimeoutError as error:
            raise TimeoutError("the daemon did not answer in time") from error

    def next(self) -> list[bytes]:
        """Wait for the next message, without a limit, and return it.

        Raises:
            OSError, WireError: as for `ask`. A message that has begun has the usual time limit.
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
        """Return at most `size` bytes, none if the other side has closed; raises OSError."""
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
        """In a child process, leave the connection to the parent."""
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
    """Return the answer of the daemon at `path`.

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
    """Return the status of the daemon at `path`, or None as `ask`."""
    try:
        (answer,) = ask(path, STATUS) or (b"",)
        found: dict[str, Any] = {**json.loads(answer)}
    except (ValueError, TypeError, RecursionError):
        return None
    return found if found.keys() >= {"version", "process", "started"} else None
