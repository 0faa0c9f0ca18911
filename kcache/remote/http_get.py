"""HTTP GET: reads most answers over http.client's connection itself, in a third of its time.

http.client parses headers like those of electronic mail. That takes longer than a kernel needs from
a nearby server. This module reads plain answers (a length, no transfer coding). http.client gets
all others from their first byte on.
"""

from __future__ import annotations

import http.client
import io
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

from kcache.remote.pieces import Ended, Pieces
from kcache.remote.store import RemoteError

if TYPE_CHECKING:
    import socket

    from _typeshed import WriteableBuffer

    from kcache.remote.deadline import DeadlineSocket

__all__ = ["Head", "Reader", "question"]

#: Most bytes that the head of an answer may have; http.client allows as many for one line of it.
_MOST_HEAD = 1 << 16
_LINE = re.compile(rb"\r?\n")
_END = re.compile(rb"\r?\n\r?\n")
#: Status lines of final answers that say their length; 1xx, 204 and 304 have rules of their own.
_PLAIN = re.compile(rb"HTTP/1\.([01]) (200|201|202|203|30[1-3]|307|308|[45][0-9]{2})(?: [^\r\n]*)?")
_LENGTH = re.compile(r"[0-9]{1,15}")
#: Characters that no path may hold (http.client refuses the same), and that no header may hold.
_NOT_IN_PATH = re.compile("[^\x21-\x7e]")
_NOT_IN_HEADER = re.compile("[\r\n\0]")


class Head(NamedTuple):
    """The part of an answer before the body.

    Attributes:
        headers: name in lower case -> value.
        length: bytes of the body.
        keeps: whether the connection can be used again.
    """

    status: int
    headers: Mapping[str, str]
    length: int
    keeps: bool


def question(path: str, host: str, headers: Mapping[str, str]) -> bytes:
    """Return a request of GET.

    Raises:
        InvalidURL: the path holds a space, a control character or a character that is not ASCII.
        ValueError: a header holds the end of a line, or a character that is not Latin-1.
    """
    if _NOT_IN_PATH.search(path):
        raise http.client.InvalidURL(f"{path!r} is no path")
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any(map(_NOT_IN_HEADER.search, lines)):
        raise ValueError("a header holds the end of a line")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


class Reader:
    """Reads the answers of one connection. Threads: for one at a time."""

    def __init__(self, sock: DeadlineSocket) -> None:
        self._sock = sock
        self._pieces = Pieces(sock)

    def head(self) -> Head | http.client.HTTPResponse:
        """Return the head of a plain answer, or http.client's response object for other answers.

        Raises:
            OSError, HTTPException: there is none.
        """
        try:
            raw = self._pieces.until(_END, _MOST_HEAD)
        except Ended as error:
            if error.got:
                raise http.client.IncompleteRead(b"") from error
            raise http.client.RemoteDisconnected("no answer") from error
        found = None if raw is None else _parsed(raw)
        return self._replayed(raw or b"") if found is None else found

    def body(self, length: int) -> bytes:
        """Return a body.

        Raises:
            RemoteError: the connection ends before the body does.
            OSError: the connection failed otherwise, or was too slow.
        """
        try:
            return self._pieces.exactly(length)
        except Ended as error:
            raise RemoteError(f"the answer ended after {error.got} of {length} bytes") from error

    @property
    def ahead(self) -> bool:
        """Whether the server has sent more than its answer."""
        return self._pieces.ahead

    def _replayed(self, raw: bytes) -> http.client.HTTPResponse:
        again = _Again(raw + self._pieces.rest(), self._sock)
        response = http.client.HTTPResponse(cast("socket.socket", again), method="GET")
        response.begin()
        return response


def _parsed(raw: bytes) -> Head | None:
    """Return the head of a plain answer, which says where it ends; None for other answers."""
    first, *lines = _LINE.split(raw)[:-2]
    status = _PLAIN.fullmatch(first)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            return None
        headers[name.lower()] = value.strip()
    length = headers.get("content-length", "")
    if status is None or "transfer-encoding" in headers or not _LENGTH.fullmatch(length):
        return None
    keeps = status[1] == b"1" and "close" not in headers.get("connection", "").lower()
    return Head(int(status[2]), headers, int(length), keeps)


class _Again:
    """A socket for http.client, whose first bytes were already read."""

    def __init__(self, first: bytes, sock: DeadlineSocket) -> None:
        self._first = first
        self._sock = sock

    def makefile(self, mode: str = "rb") -> io.BufferedReader:
        return io.BufferedReader(_Then(self._first, self._sock.recv_into))


class _Then(io.RawIOBase):
    """Bytes, followed by the data of a socket."""

    def __init__(self, first: bytes, more: Callable[[WriteableBuffer], int]) -> None:
        self._first = first
        self._more = more

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if not self._first:
            return self._more(buffer)
        room = memoryview(buffer)
        taken, self._first = self._first[: len(room)], self._first[len(room) :]
        room[: len(taken)] = taken
        return len(taken)
