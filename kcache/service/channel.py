"""Channel: one end of the socket between a program and a service: one message, then its answer.

The messages are those of `kcache.util.wire`. Most kernels take one system call to send and a few to
receive, and are copied once. A hit from a nearby remote spends more time here than in the network.
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
from kcache.util.wire import WireError, heading, sizes_in

__all__ = ["Channel"]

#: Bytes that the operating system takes at once; net.core.wmem_max may be less.
SEND_BUFFER = 1 << 20
#: Bytes of the buffer for received messages: more than most kernels have. A longer message has a
#: buffer that is doubled as often as it is full, so memory grows only with what has arrived.
_ROOM = 256 << 10
#: Far more than any kernel and its manifest have.
_MAX_MESSAGE = 1 << 30
#: SO_RCVTIMEO and SO_SNDTIMEO count microseconds, and 0 means no limit.
_SHORTEST = 1e-3
#: A service that has ended must not end a program that does not ignore SIGPIPE.
_NO_SIGNAL = getattr(_socket, "MSG_NOSIGNAL", 0)


class Channel:
    """One end of a connection. Each side sends one message and waits for the other's.

    Threads: for one at a time. Fork: it is closed in the child, so that it ends with this process,
    and a lease with it.

    Args:
        connection: belongs to this object from here on.
        seconds: the time that one piece of a message may take.
        room: bytes of memory for messages; longer ones are copied once more.
    """

    def __init__(self, connection: _socket.socket, seconds: float, room: int = _ROOM) -> None:
        connection.setblocking(True)
        # The operating system enforces the limit, so that each piece takes one system call.
        connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, SEND_BUFFER)
        self._socket = connection
        self._identity = identity(os.fstat(connection.fileno()))
        self._room = memoryview(bytearray(room))
        self._limit = -1.0
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
        end = time.monotonic() + seconds
        try:
            self.send(fields)
            return self._receive(self._socket.recv_into(self._room), end)
        except BlockingIOError as error:
            raise TimeoutError("the service did not answer in time") from error

    def next(self) -> list[bytes]:
        """Wait for the next message, without a limit, and return it.

        Raises:
            OSError, WireError: as `ask`; a message that has begun may take as long as any other.
        """
        while True:
            with suppress(BlockingIOError):  # nothing yet
                got = self._socket.recv_into(self._room)
                break
        return self._receive(got, time.monotonic() + self._limit)

    def send(self, fields: Sequence[bytes]) -> None:
        """Send one message; raises OSError."""
        parts = [heading(fields), *fields]
        left = sum(map(len, parts)) - self._socket.sendmsg(parts, (), _NO_SIGNAL)
        if left:
            self._socket.sendall(memoryview(b"".join(parts))[-left:], _NO_SIGNAL)

    def _receive(self, got: int, end: float) -> list[bytes]:
        """Return the message whose first `got` bytes are in the buffer."""
        if not got:
            raise WireError("the other side has closed")
        room = self._room
        while (sizes := sizes_in(room[:got])) is None:
            room = _with_room(room, got)
            got += self._more(room[got:], end)
        start = 8 + 8 * len(sizes)
        size = start + sum(sizes)
        if size - start > _MAX_MESSAGE or got > size:
            raise WireError("the message is too long")
        while got < size:
            room = _with_room(room, got)
            got += self._more(room[got:size], end)
        fields: list[bytes] = []
        for length in sizes:
            fields.append(bytes(room[start : start + length]))
            start += length
        return fields

    def _more(self, room: memoryview, end: float) -> int:
        got = self._socket.recv_into(room)
        if not got:
            raise WireError("the other side has closed")
        if time.monotonic() > end:
            raise TimeoutError("the message took too long")
        return got

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


def _with_room(room: memoryview, got: int) -> memoryview:
    """Return a buffer with the same bytes that is not full."""
    return room if got < len(room) else memoryview(bytearray(room) + bytearray(len(room)))
