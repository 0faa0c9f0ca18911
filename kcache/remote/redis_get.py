"""Redis GETRANGE: gets keys in one round trip. The parser of redis-py copies four times.

Connections come from redis-py, which has authenticated, selected the database and set up TLS. If an
answer is not plain, redis-py asks again over another connection.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kcache.remote.pieces import Pieces

__all__ = ["Getter", "Unusual"]

_LINE = re.compile(rb"\r\n")
#: The longest line that is expected: `$` and a length.
_MOST_LINE = 32
_BULK = re.compile(rb"\$([0-9]{1,12})\r\n")
#: Connections that are kept; the agent has a few threads.
_MOST_IDLE = 8


class Unusual(Exception):  # noqa: N818  redis-py has to ask again
    """The server has answered with something other than values, or closed the connection."""


class Getter:
    """Asks one server.

    Threads: safe to share; each question has a connection of its own. Fork: only for the agent.

    Args:
        pool: redis-py's pool; the sockets of its connections are `DeadlineSocket`s.
    """

    def __init__(self, pool: Any) -> None:  # noqa: ANN401  redis-py is imported by redis.py alone
        self._pool = pool
        self._idle: list[tuple[Any, Pieces]] = []
        self._lock = threading.Lock()

    def get(self, names: Sequence[bytes], seconds: float, limit: int) -> list[bytes]:
        """Return the values of some names, at most `limit` bytes of each; empty if there is none.

        Raises:
            Unusual: redis-py has to be asked.
            TimeoutError: nothing came in time.
            Exception: redis-py's own, if a connection can't be made.
        """
        connection, pieces = self._take()
        try:
            connection._sock.start(seconds)
            connection._sock.sendall(b"".join(_command(name, limit) for name in names))
            found = [_value(pieces, limit) for _ in names]
            if pieces.ahead:
                raise Unusual("more than was asked for")
        except BaseException as error:
            self._leave(connection)
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise Unusual("the connection ended") from error
            raise
        self._keep(connection, pieces)
        return found

    def close(self) -> None:
        """Close the connections. Idempotent."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            self._leave(connection)

    def _take(self) -> tuple[Any, Pieces]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection = self._pool.get_connection()
        return connection, Pieces(connection._sock)

    def _keep(self, connection: Any, pieces: Pieces) -> None:  # noqa: ANN401
        with self._lock:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append((connection, pieces))
                return
        self._leave(connection)

    def _leave(self, connection: Any) -> None:  # noqa: ANN401
        with suppress(Exception):
            connection.disconnect()
            self._pool.release(connection)


def _command(name: bytes, limit: int) -> bytes:
    last = b"%d" % (limit - 1)
    return b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%s\r\n$1\r\n0\r\n$%d\r\n%s\r\n" % (
        len(name),
        name,
        len(last),
        last,
    )


def _value(pieces: Pieces, limit: int) -> bytes:
    """Return one value; raises Unusual if the answer is no value, or too long."""
    line = _BULK.fullmatch(pieces.until(_LINE, _MOST_LINE) or b"")
    if line is None or int(line[1]) > limit:
        raise Unusual("another answer")
    value = pieces.exactly(int(line[1]))
    if pieces.exactly(2) != b"\r\n":
        raise Unusual("no end of a value")
    return value
