"""Proxy: a server on loopback that forwards to another server, and damages or delays the answers.

It has no code for any protocol, so it works for Redis, HTTP and S3. Its attribute `faults` can be
replaced at any time, and applies to the next bytes on every connection:

    with Proxy(("127.0.0.1", port)) as proxy:
        proxy.faults = Faults(damage=1.0)   # flip one bit of every piece of an answer
        ...  # use a client of proxy.port
        proxy.faults = Faults()             # no more faults
"""

import random
import re
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

_KEY = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults that a proxy adds to the bytes that it forwards; by default none.

    Attributes:
        delay: seconds by which each piece of an answer is delayed (a piece is what one `recv`
            returns).
        damage: the probability that one bit of a piece of an answer is flipped.
        keep: number of bytes at the beginning of a piece that are never damaged, so that status
            lines and headers are not.
        truncate: number of bytes of answers after which a connection is closed.
        swap: whether the key in a request (64 hex digits) is replaced by the key requested before.
        hole: whether connections are accepted, but never answered.
        refuse: whether connections are reset as soon as they are accepted.
        drip: seconds between two bytes of an answer; if it is 0, bytes are not sent one by one.
    """

    delay: float = 0.0
    damage: float = 0.0
    keep: int = 0
    truncate: int | None = None
    swap: bool = False
    hole: bool = False
    refuse: bool = False
    drip: float = 0.0


class Proxy:
    """A TCP proxy on a free port of 127.0.0.1. As a context manager, it closes itself at the end.

    Threads: any thread may replace `faults`. Each connection has two threads of its own.

    Args:
        upstream: host and port of the server to forward to. It need not be running.
    """

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.faults = Faults()
        #: How many connections were accepted.
        self.connections = 0
        self._random = random.Random(0)
        self._before: bytes | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [self._start(self._accept)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every connection and stop listening."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        for thread in self._threads:
            thread.join(timeout=30)

    def drop(self) -> None:
        """End every open connection, as if the server were killed."""
        with self._lock:
            sockets = list(self._open)
        for each in sockets:
            _end(each)

    def _start(self, target: object, *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        thread.start()
        return thread

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.faults.refuse:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            self._threads.append(self._start(self._serve, client))

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.upstream, timeout=30)
        except OSError:
            client.close()
            return
        for each in (client, server):
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {client, server}
        if self._closed.is_set():
            _end(client)
        answers = self._start(self._answers, server, client)
        self._requests(client, server)
        answers.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while piece := client.recv(_PIECE):
                if self.faults.swap:
                    piece = self._swapped(piece)
                server.sendall(piece)
        _end(server)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        sent = 0
        with suppress(OSError):
            while piece := server.recv(_PIECE):
                faults = self.faults
                if faults.hole:
                    self._closed.wait()
                    break
                if faults.delay:
                    self._closed.wait(faults.delay)
                piece = self._damaged(piece, faults)
                if faults.truncate is not None and sent + len(piece) > faults.truncate:
                    client.sendall(piece[: max(faults.truncate - sent, 0)])
                    break
                self._send(client, piece, faults.drip)
                sent += len(piece)
        _end(client)

    def _send(self, client: socket.socket, piece: bytes, drip: float) -> None:
        if not drip:
            client.sendall(piece)
            return
        for byte in piece:
            client.sendall(bytes((byte,)))
            if self._closed.wait(drip):
                return

    def _damaged(self, piece: bytes, faults: Faults) -> bytes:
        with self._lock:
            if len(piece) <= faults.keep or self._random.random() >= faults.damage:
                return piece
            at = self._random.randrange(faults.keep, len(piece))
            bit = 1 << self._random.randrange(8)
        return piece[:at] + bytes((piece[at] ^ bit,)) + piece[at + 1 :]

    def _swapped(self, piece: bytes) -> bytes:
        with self._lock:
            return _KEY.sub(self._other, piece)

    def _other(self, found: re.Match[bytes]) -> bytes:
        before, self._before = self._before, found[0]
        if before is None or before == found[0]:
            return found[0]
        return before


def _end(connection: socket.socket) -> None:
    """End a connection in both directions, so that a thread that reads from it wakes up."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
