"""DeadlineSocket: a socket with one deadline for everything that happens on it.

A socket's own time-out begins again with each byte. So a wait for a server that sends one byte a
second has no end. Here, each wait takes at most the time that is left. The number of bytes has a
limit, too, because some clients believe any length that a server claims.
"""

from __future__ import annotations

import errno
import io
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["DeadlineSocket"]

#: As much as a socket's buffer holds on Linux; 8 KiB would take eight times as many calls.
_BUFFER = 1 << 16
#: Seconds by which a socket's time-out may differ from the time that is left. To set it is a system
#: call, and most answers take less time than this.
_OFF = 0.05


class DeadlineSocket:
    """A connected socket, plain or with TLS, that has a deadline and the methods that clients use.

    Threads: for one at a time. Files from `makefile` keep it open, like those of a socket.

    Args:
        sock: belongs to this object from now on.
        seconds: the time for everything until `start` is called.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._files = 0
        self._closed = False
        self._polls = False
        self._set: float | None = None
        self.start(seconds)

    def start(self, seconds: float, most: int | None = None) -> None:
        """Set a deadline for everything from now on, and a limit of bytes to read."""
        self._end = time.monotonic() + seconds
        self._room = most

    def _prepare(self) -> socket.socket:
        if self._polls:
            self._limit(0)
            return self._sock
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        if not self._set or abs(self._set - left) > _OFF:
            self._limit(left)
        return self._sock

    def _limit(self, seconds: float) -> None:
        if seconds != self._set:
            self._sock.settimeout(seconds)
            self._set = seconds

    def recv(self, size: int) -> bytes:
        """Return up to `size` bytes.

        Raises:
            OSError: no bytes come in time, or more than `start` allowed.
        """
        found = self._prepare().recv(size)
        self._count(len(found))
        return found

    def recv_into(self, buffer: WriteableBuffer) -> int:
        """Read into a buffer and return the number of bytes. Raises OSError as `recv`."""
        got = self._prepare().recv_into(buffer)
        self._count(got)
        return got

    def _count(self, got: int) -> None:
        if self._room is not None:
            self._room -= got
            if self._room < 0:
                raise OSError(errno.EMSGSIZE, "the answer is too long")

    def sendall(self, data: ReadableBuffer) -> None:
        """Send all of it; as for a socket, the time limit is for all of it."""
        self._prepare().sendall(data)

    def settimeout(self, seconds: float | None) -> None:
        """With 0, reads return at once; otherwise they wait until the deadline."""
        self._polls = seconds == 0

    def makefile(self, mode: str = "rb") -> io.BufferedReader:
        """Return a file to read from."""
        self._files += 1
        return io.BufferedReader(_Reader(self, self._let_go), _BUFFER)

    def _let_go(self) -> None:
        self._files -= 1
        if self._closed and self._files == 0:
            self._sock.close()

    def shutdown(self, how: int) -> None:
        """End the connection; a thread that waits for it wakes up."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Close the socket as soon as none of its files is open. Idempotent."""
        self._closed = True
        if self._files == 0:
            self._sock.close()

    def fileno(self) -> int:
        """Return the descriptor's number."""
        return self._sock.fileno()

    def getpeername(self) -> object:
        """Return the other side's address."""
        return self._sock.getpeername()


class _Reader(io.RawIOBase):
    """The raw file below `DeadlineSocket.makefile`."""

    def __init__(self, sock: DeadlineSocket, let_go: Callable[[], None]) -> None:
        self._sock = sock
        self._let_go = let_go

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._let_go()
