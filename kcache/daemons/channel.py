"""Channel: one end of the socket between a program and a daemon: one message, then its answer.

The messages are those of `kcache.util.wire`.
"""

from __future__ import annotations

import _socket  # `socket` takes 3 ms more
import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from kcache.util.forks import after_fork
from kcache.util.open_file import identity
from kcache.util.wire import WireError, heading, receive

#: Bytes that the operating system takes at once; net.core.wmem_max may be less.
SEND_BUFFER = 1 << 20
#: SO_RCVTIMEO and SO_SNDTIMEO count microseconds, and 0 means no limit.
_SHORTEST = 1e-3
#: A daemon that has exited must not end a program that does not ignore SIGPIPE.
_NO_SIGNAL = getattr(_socket, "MSG_NOSIGNAL", 0)


class Channel:
    """One end of a connection. Each side sends one message and waits for the other's.

    Threads: for one at a time. Fork: it is closed in the child, so that the connection, and a lease
    with it, ends with this process.

    Args:
        connection: belongs to this object from here on.
        seconds: the time that one piece of a message may take.
    """

    def __init__(self, connection: _socket.socket, seconds: float) -> None:
        connection.setblocking(True)
        # The operating system enforces the limit, so that each piece takes one system call.
        connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, SEND_BUFFER)
        self._socket = connection
        self._identity = identity(os.fstat(connection.fileno()))
        self._limit = self._end = -1.0
        after_fork(self)
        self._set_limit(seconds)

    def ask(self, fields: Sequence[bytes], seconds: float) -> list[bytes]:
        """Return the answer to a question.

        Raises:
            OSError: there is no answer (TimeoutError: none within `seconds`).
            WireError: the other side has closed the connection, or sent something else; or the
                program has closed the descriptor, whose number may now belong to another file.
        """
        if not self._is_open():
            raise WireError("the program has closed the connection")
        if seconds != self._limit:
            self._set_limit(seconds)
        self._end = time.monotonic() + seconds
        try:
            self.send(fields)
            return receive(-1, self._read)
        except BlockingIOError as error:
            raise TimeoutError("the daemon did not answer in time") from error

    def next(self) -> list[bytes]:
        """Wait for the next message, without a limit, and return it.

        Raises:
            OSError, WireError: as `ask`; a message that has begun may take as long as any other.
        """
        while True:
            with suppress(BlockingIOError):  # nothing yet
                self._socket.recv(1, _socket.MSG_PEEK)
                self._end = time.monotonic() + self._limit
                return receive(-1, self._read)

    def send(self, fields: Sequence[bytes]) -> None:
        """Send one message; raises OSError."""
        self._socket.sendall(b"".join((heading(fields), *fields)), _NO_SIGNAL)

    def _read(self, _fd: int, size: int) -> bytes:
        """Return at most `size` bytes, none if the other side has closed; raises OSError."""
        found = self._socket.recv(size)
        if time.monotonic() > self._end:
            raise TimeoutError("the message took too long")
        return found

    def _set_limit(self, seconds: float) -> None:
        whole, part = divmod(max(seconds, _SHORTEST), 1)
        limit = struct.pack("ll", int(whole), int(part * 1e6))
        self._socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, limit)
        self._limit = seconds

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
