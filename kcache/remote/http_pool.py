"""Pool: keeps connections to HTTP servers, and limits the time and the bytes of each answer."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from kcache.environment import proxy_for
from kcache.errors import ConfigError
from kcache.remote.credentials import Credentials, basic
from kcache.remote.deadline import DeadlineSocket
from kcache.remote.http_get import Reader, question
from kcache.remote.store import RemoteError, RemoteTooLong

if TYPE_CHECKING:
    from kcache.remote.address import Address

__all__ = ["Answer", "Origin", "Pool", "Request"]

#: Idle connections that are kept; the agent has a few threads.
_MOST_IDLE = 8
#: Most bytes of an error's page that are read, so that the connection can be used again.
_MOST_PAGE = 1 << 16
#: Bytes for headers, which an answer may have beyond twice the limit of its body. (It is twice the
#: limit because small chunks have long heads.)
_ROOM = 1 << 20


class Origin(NamedTuple):
    """The server that connections lead to."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        """Return the beginning of its URLs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == (443 if self.scheme == "https" else 80)
        return f"{self.scheme}://{host}{'' if usual else f':{self.port}'}"


class Request(NamedTuple):
    """One request.

    Attributes:
        own: whether the origin is that of the address; others never see our certificate.
        limit: the most bytes of the answer's body.
        end: deadline of the answer, in `time.monotonic`.
    """

    origin: Origin
    own: bool
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    limit: int
    end: float


class Answer(NamedTuple):
    """An answer with its body, empty unless the status is 200; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Plain(http.client.HTTPConnection):
    """A connection whose socket has a deadline."""

    deadline: DeadlineSocket
    reader: Reader | None = None

    def connect(self) -> None:
        super().connect()
        self.deadline = DeadlineSocket(self.sock, self.timeout or 0.0)
        self.sock = self.deadline


class _Secure(http.client.HTTPSConnection):
    """The same through TLS."""

    deadline: DeadlineSocket
    reader: Reader | None = None

    def connect(self) -> None:
        super().connect()
        self.deadline = DeadlineSocket(self.sock, self.timeout or 0.0)
        self.sock = self.deadline

    def _tunnel(self) -> None:
        """Ask a proxy for a tunnel, with a deadline; http.client has one for each byte only."""
        plain = self.sock
        self.sock = DeadlineSocket(plain, self.timeout or 0.0)
        super()._tunnel()  # type: ignore[misc]
        self.sock = plain
        plain.settimeout(self.timeout)


_Connection = _Plain | _Secure


class Pool:
    """Connections, and their settings.

    Threads: safe to share; a connection belongs to one request at a time.

    Args:
        address: address of the tier.

    Raises:
        ConfigError: a certificate can't be read.
    """

    def __init__(self, address: Address) -> None:
        self._connect_timeout = address.connect_timeout
        self._ca_file, self._cert_file, self._key_file = (
            address.option(name) or None for name in ("ca_file", "cert_file", "key_file")
        )
        #: Whether the host is the address's -> context; the one for other hosts has no certificate.
        self._contexts: dict[bool, ssl.SSLContext] = {}
        self._idle: list[tuple[Origin, bool, _Connection]] = []
        self._lock = threading.Lock()
        if address.scheme == "https":
            self._context(own=True)

    def ask(self, request: Request) -> Answer:
        """Return an answer, over an idle connection if there is one.

        Raises:
            OSError, HTTPException, RemoteError: there is none.
        """
        connection = self._take(request)
        if connection is not None:
            # If the server has closed it meanwhile, a new connection is tried.
            with suppress(ConnectionError, http.client.BadStatusLine, ssl.SSLEOFError):
                return self._exchange(connection, request)
        proxy = proxy_for(request.origin.scheme, request.origin.host)
        if proxy is not None and request.origin.scheme == "http":
            headers = {**request.headers, **_proxy_headers(proxy)}
            path = f"{request.origin}{request.path}"
            connection = self._connected(request, proxy)
            return self._exchange(connection, request._replace(path=path, headers=headers))
        return self._exchange(self._connected(request, proxy), request)

    def close(self) -> None:
        """Close the idle connections. Idempotent."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, _, connection in idle:
            connection.close()

    def _exchange(self, connection: _Connection, request: Request) -> Answer:
        try:
            # If a server sends a chunk of -1 bytes, http.client reads all that follows.
            most = 2 * request.limit + _ROOM
            connection.deadline.start(request.end - time.monotonic(), most)
            ask = _got if request.method == "GET" else _sent
            answer, keeps = ask(connection, request)
        except BaseException:
            connection.close()
            raise
        if not keeps or request.path.startswith("http:"):
            connection.close()  # one to a proxy serves many hosts; not worth keeping
        else:
            self._keep(request, connection)
        return answer

    def _take(self, request: Request) -> _Connection | None:
        with self._lock:
            for index in range(len(self._idle) - 1, -1, -1):  # the one that was used last
                origin, own, connection = self._idle[index]
                if (origin, own) == (request.origin, request.own):
                    del self._idle[index]
                    return connection
        return None

    def _keep(self, request: Request, connection: _Connection) -> None:
        with self._lock:
            self._idle.append((request.origin, request.own, connection))
            spare = self._idle.pop(0)[2] if len(self._idle) > _MOST_IDLE else None
        if spare is not None:
            spare.close()

    def _connected(self, request: Request, proxy: str | None) -> _Connection:
        """Return a new connection, after name lookup, proxy and TLS.

        Raises:
            OSError, HTTPException: there is none.
        """
        origin = request.origin
        host, port = origin.host, origin.port
        if proxy is not None:
            parts = _split(proxy)
            host, port = parts.hostname or "", parts.port or 80
        timeout = max(min(self._connect_timeout, request.end - time.monotonic()), 0.001)
        if origin.scheme == "http":
            connection: _Connection = _Plain(host, port, timeout=timeout)
        else:
            context = self._context(own=request.own)
            connection = _Secure(host, port, timeout=timeout, context=context)
            if proxy is not None:
                connection.set_tunnel(origin.host, origin.port, _proxy_headers(proxy))
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection

    def _context(self, *, own: bool) -> ssl.SSLContext:
        with self._lock:
            if own not in self._contexts:
                self._contexts[own] = self._made_context(own=own)
            return self._contexts[own]

    def _made_context(self, *, own: bool) -> ssl.SSLContext:
        """Return the TLS context that verifies servers, by the address's file or the system's.

        Raises:
            ConfigError: a file can't be read.
        """
        try:
            context = ssl.create_default_context(cafile=self._ca_file)
            if own and self._cert_file is not None:
                context.load_cert_chain(self._cert_file, self._key_file, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"a certificate or its key can't be read: {error}") from error
        return context


def _split(proxy: str) -> SplitResult:
    """Return the parts of a proxy's URL.

    Raises:
        RemoteError: it is none. The message does not show it, because it may contain a password.
    """
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        parts.port  # noqa: B018  raises
    except ValueError:
        reason = "the proxy that the environment names is no URL (quote its password: %2F for /)"
        raise RemoteError(reason) from None
    return parts


def _proxy_headers(proxy: str) -> dict[str, str]:
    parts = _split(proxy)
    if parts.username is None:
        return {}
    known = Credentials(unquote(parts.username), unquote(parts.password or ""))
    return {"Proxy-Authorization": basic(known)}


def _got(connection: _Connection, request: Request) -> tuple[Answer, bool]:
    """Return the answer to a GET, and whether the connection can be used again."""
    host = str(request.origin).partition("//")[2]
    connection.deadline.sendall(question(request.path, host, request.headers))
    if connection.reader is None:
        connection.reader = Reader(connection.deadline)
    reader = connection.reader
    head = reader.head()
    if isinstance(head, http.client.HTTPResponse):
        return _read(head, request)
    body, keeps = b"", head.keeps
    if head.status == 200:
        body = reader.body(_allowed(head.length, request.limit))
    elif head.length <= _MOST_PAGE:  # an error's page: read so that the connection can be kept
        reader.body(head.length)
    else:
        keeps = False
    return Answer(head.status, head.headers, body), keeps and not reader.ahead


def _sent(connection: _Connection, request: Request) -> tuple[Answer, bool]:
    """Return the answer to any request, and whether the connection can be used again."""
    connection.request(request.method, request.path, request.body, request.headers)
    return _read(connection.getresponse(), request)


def _read(response: http.client.HTTPResponse, request: Request) -> tuple[Answer, bool]:
    body = _body(response, request.limit)
    keeps = not response.will_close and response.isclosed()
    response.close()
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(response.status, headers, body), keeps


def _allowed(length: int, limit: int) -> int:
    """Return the length of an answer; raises RemoteTooLong if it is more than `limit`."""
    if length > limit:
        raise RemoteTooLong(f"the answer has {length} bytes; allowed: {limit}")
    return length


def _body(response: http.client.HTTPResponse, limit: int) -> bytes:
    """Return the whole body.

    Raises:
        RemoteTooLong: it is longer than `limit`.
        RemoteError: it ends too early, or has no length.
        OSError, HTTPException: it can't be read.
    """
    if response.status != 200:
        return _page(response)
    if response.length is None and not response.chunked:
        # To http.client, headers that were cut off look the same.
        raise RemoteError("the server does not say how long its answer is")
    length = response.length
    if length is not None:
        _allowed(length, limit)
    body = response.read(limit + 1 if length is None else length)
    if len(body) > limit:
        raise RemoteTooLong(f"the answer has more than {limit} bytes")
    if length is not None and len(body) != length:
        raise RemoteError(f"the answer ended after {len(body)} of {length} bytes")
    if length is None and not response.isclosed():
        response.read(1)  # the end of the last chunk
    return body


def _page(response: http.client.HTTPResponse) -> bytes:
    """Read a page about an error so that the connection can be used again; return no bytes."""
    if response.length is not None and response.length <= _MOST_PAGE:
        response.read(response.length)
    return b""
