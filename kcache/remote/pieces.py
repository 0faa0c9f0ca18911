"""Pieces: reads lines and counted bytes from a connection, and copies them once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcache.remote.deadline import DeadlineSocket

__all__ = ["Ended", "Pieces"]

#: Bytes that the buffer holds: more than most kernels have.
_ROOM = 256 << 10


class Ended(ConnectionError):  # noqa: N818  it is no error where nothing was asked
    """The other side closed the connection.

    Attributes:
        got: how many of the requested bytes had arrived.
    """

    def __init__(self, got: int) -> None:
        super().__init__(f"the server closed the connection after {got} bytes")
        self.got = got


class Pieces:
    """Reads from one connection, whose deadline bounds each wait.

    Threads: for one at a time. Bytes that it has read ahead are lost for other readers; see `rest`.
    """

    def __init__(self, sock: DeadlineSocket) -> None:
        self._sock = sock
        self._room = bytearray(_ROOM)
        self._view = memoryview(self._room)
        self._start = self._end = 0

    def until(self, mark: re.Pattern[bytes], most: int) -> bytes | None:
        """Return the bytes up to a mark, with the mark; None if there is none in `most` bytes.

        Raises:
            Ended: the connection ended before the mark.
            OSError: the connection failed, or was too slow.
        """
        self._begin()
        while (found := mark.search(self._room, 0, self._end)) is None:
            if self._end >= most:
                return None
            self._more(self._view[self._end :])
        taken = bytes(self._view[: found.end()])
        self._start = found.end()
        return taken

    def exactly(self, size: int) -> bytes:
        """Return exactly `size` bytes. The caller has checked that they are not too many.

        Raises:
            Ended, OSError: as `until`.
        """
        self._begin()
        if size <= _ROOM:
            while self._end < size:
                self._more(self._view[self._end :])
            taken = bytes(self._view[:size])
            self._start = size
            return taken
        return self._long(size)

    @property
    def ahead(self) -> bool:
        """Whether bytes were read ahead."""
        return self._end > self._start

    def rest(self) -> bytes:
        """Return the bytes that were read ahead."""
        taken = bytes(self._view[self._start : self._end])
        self._start = self._end = 0
        return taken

    def _long(self, size: int) -> bytes:
        """Return more bytes than the buffer holds; memory is allocated as they arrive."""
        found = bytearray(self.rest())
        room = memoryview(bytearray(_ROOM * 4))
        while len(found) < size:
            got = self._sock.recv_into(room[: min(len(room), size - len(found))])
            if not got:
                raise Ended(len(found))
            found += room[:got]
        return bytes(found)

    def _begin(self) -> None:
        """Move the bytes that were read ahead to the beginning, to have room behind them."""
        if self._start:
            left = self._end - self._start
            self._room[:left] = self._room[self._start : self._end]
            self._start, self._end = 0, left

    def _more(self, room: memoryview) -> None:
        got = self._sock.recv_into(room)
        if not got:
            raise Ended(self._end)
        self._end += got
