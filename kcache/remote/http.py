"""HttpStorage: a remote on an HTTP server, such as nginx with WebDAV or bazel-remote.

It uses GET and PUT, like the HTTP caches of ccache and Bazel. If the address is
`https://host/path`, the entry with the key `abcdef...` has the URL `https://host/path/ab/cdef...`
(`layout=subdirs`, the default), `https://host/path/abcdef...` (`layout=flat`) or
`https://host/path/ac/abcdef...` (`layout=bazel`). For `layout=bazel`, bazel-remote needs its option
`--disable_http_ac_validation`, because it otherwise rejects values that are not Bazel's.

urllib3 manages the connections. This module follows redirects itself, so that no other host gets
credentials or client certificates. It stops reading a response that is too long.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

import urllib3
from urllib3.util import parse_url

from kcache._version import __version__
from kcache.environment import proxy_for
from kcache.errors import ConfigError
from kcache.remote.address import Address
from kcache.remote.credentials import authorization
from kcache.remote.storage import RemoteError, RemoteTimeout, RemoteTooLong, Stored, translated

_ABSENT = (404, 410)
_REDIRECTS = {"GET": (301, 302, 303, 307, 308), "PUT": (307, 308)}
_PORTS = {"http": 80, "https": 443}
#: The largest number of idle connections to a server that are kept. A few are enough, because the
#: daemon has only a few threads.
_MOST_IDLE = 8
#: The largest number of bytes that are read of an error page. They are read so that the connection
#: can be used again.
_MOST_PAGE = 1 << 16
#: The number of bytes that are read at a time.
_PIECE = 1 << 18
_LAYOUTS = {"subdirs": "{0}/{1}", "flat": "{0}{1}", "bazel": "ac/{0}{1}"}


class Origin(NamedTuple):
    """The server that a URL names."""

    scheme: str
    host: str
    port: int


class HttpValues:
    """Reads and writes values by HTTP; a subclass defines the URLs of the values.

    Threads: Several threads may use one object. Fork: A forked child must not use it; the daemon
    and the commands that use remotes do not fork.

    Args:
        address: the address of the remote.
        origin: the only server that gets the header `Authorization` and the client certificate.
        authorization: the value of the header `Authorization`, or None for no header.

    Raises:
        ConfigError: a certificate or its key can't be read.
    """

    #: The largest number of redirects that are followed.
    _most_redirects = 3
    #: The status codes of a conditional PUT that is rejected because its condition does not hold.
    _lost: tuple[int, ...] = (412,)
    #: The headers of every PUT.
    _put_headers: Mapping[str, str] = {"Content-Type": "application/octet-stream"}

    def __init__(
        self, address: Address, origin: Origin | None = None, authorization: str | None = None
    ) -> None:
        self._address = address
        self._origin = origin
        self._authorization = authorization
        self._pools: dict[tuple[Origin, bool], Any] = {}
        self._context(own=True)  # raises if a file can't be read

    def _url_of(self, method: str, key: str) -> str:
        """Return the URL of the value under `key`, for a request with `method` (GET or PUT)."""
        raise NotImplementedError

    def _failure(self, response: Any, _body: bytes) -> RemoteError:  # noqa: ANN401
        """Return the error for a response with a status code that reports a failure."""
        name = http.client.responses.get(response.status, "")
        return RemoteError(f"the server answers {response.status} {name}".rstrip())

    def get(self, key: str, limit: int) -> Stored | None:
        """Return the value under `key`, or None if there is none; see `Storage.get`."""
        response, body = self._request("GET", key, None, {}, limit)
        if response.status in _ABSENT:
            self._require_absent(response, body)
            return None
        if response.status != 200:
            raise self._failure(response, body)
        return Stored(body, response.headers.get("etag", ""))

    def _require_absent(self, response: Any, body: bytes) -> None:  # noqa: ANN401
        """Raise RemoteError if something other than the value is missing, such as the bucket."""

    def put(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, in place of any older value."""
        self._put(key, value, {})

    def replace(self, key: str, value: bytes, old: Stored | None) -> bool:
        """Store `value` in place of `old`; return whether it is stored. See `Storage.replace`."""
        if old is None:
            return self._put(key, value, {"If-None-Match": "*"})
        tag = str(old.version)
        # A weak tag never matches in If-Match (RFC 9110, 13.1.1).
        return self._put(key, value, {"If-Match": tag} if tag.startswith('"') else {})

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for pool in list(self._pools.values()):
            pool.clear()

    def _put(self, key: str, value: bytes, condition: Mapping[str, str]) -> bool:
        """Store `value` under `key`; return whether it is stored.

        It is not stored if the server supports the headers in `condition`, and they do not hold.
        """
        headers = {**self._put_headers, **condition}
        response, body = self._request("PUT", key, value, headers, _MOST_PAGE)
        if response.status in self._lost and condition:
            self._require_absent(response, body)
            return False
        if response.status == 501 and condition:  # the server does not support conditions
            return self._put(key, value, {})
        if response.status == 413:
            raise RemoteTooLong(str(self._failure(response, body)))
        if not 200 <= response.status < 300:
            raise self._failure(response, body)
        return True

    def _request(
        self, method: str, key: str, body: bytes | None, headers: Mapping[str, str], limit: int
    ) -> tuple[Any, bytes]:
        """Send a request, follow redirects, and return urllib3's response and its body.

        The body of a response with another status than 200 is empty if it can't be read.

        Args:
            method: GET or PUT.
            key: the key of the value.
            body: the value to store, or None.
            headers: the headers of the request, in addition to those of every request.
            limit: the largest number of bytes in the body of a response with status 200.

        Raises:
            RemoteError: there is no response, or the response is malformed, too long, or redirects
                to a URL that is not allowed.
        """
        url = self._url_of(method, key)
        for _ in range(self._most_redirects + 1):
            with translated(_explained):
                response, found = self._exchange(method, url, body, headers, limit)
            if response.status not in _REDIRECTS[method]:
                return response, found
            if self._most_redirects:
                url = _redirected(url, response)
        raise RemoteError(f"the server redirects more than {self._most_redirects} times")

    def _exchange(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], limit: int
    ) -> tuple[Any, bytes]:
        """Send a request to `url`, and return the response and its body, as `_request` does.

        The server gets credentials only if the address names it.
        """
        origin = origin_of(url)
        own = origin == self._origin
        sent = {"User-Agent": f"kcache/{__version__}", "Accept-Encoding": "identity", **headers}
        if own and self._authorization is not None:
            sent["Authorization"] = self._authorization
        end = time.monotonic() + self._address.seconds(len(body or b""))
        # In urllib3, the time-out to connect also limits the time to send the body. An upload gets
        # more time, because no program waits for it.
        connect = self._address.connect_timeout if body is None else end - time.monotonic()
        response = self._pool(origin, own).urlopen(
            method,
            url,
            body=body,
            headers=sent,
            timeout=urllib3.Timeout(connect=connect, read=self._address.timeout),
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )
        found = b""
        try:
            found = _body(response, limit if response.status == 200 else _MOST_PAGE, end)
        except Exception:
            response.close()
            if response.status == 200:
                raise
        return response, found

    def _pool(self, origin: Origin, own: bool) -> Any:  # noqa: ANN401  of two kinds
        """Return the pool of connections to `origin`, through the proxy of the environment, if any.

        Args:
            origin: the server.
            own: whether the address names the server, which then gets the client certificate.
        """
        known = self._pools.get((origin, own))
        if known is None:
            options: dict[str, Any] = {"maxsize": _MOST_IDLE}
            if origin.scheme == "https":
                options["ssl_context"] = self._context(own=own)
            proxy = proxy_for(origin.scheme, origin.host)
            known = urllib3.PoolManager(**options) if proxy is None else _proxied(proxy, options)
            self._pools[origin, own] = known
        return known

    def _context(self, *, own: bool) -> ssl.SSLContext:
        """Return a TLS context, which verifies servers by `ca_file` or the system's certificates.

        Args:
            own: whether the context also sends the client certificate (`cert_file`).

        Raises:
            ConfigError: a certificate or its key can't be read.
        """
        names = ("ca_file", "cert_file", "key_file")
        ca_file, cert_file, key_file = (self._address.option(name) or None for name in names)
        try:
            context = ssl.create_default_context(cafile=ca_file)
            if own and cert_file is not None:
                context.load_cert_chain(cert_file, key_file, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"a certificate or its key can't be read: {error}") from error
        return context


class HttpStorage(HttpValues):
    """The values of a remote on an HTTP server.

    A server that does not support `If-Match` (such as nginx) replaces values unconditionally.

    Args:
        address: the address of the remote.

    Raises:
        ConfigError: a certificate, a token or an option in the address can't be used.
    """

    def __init__(self, address: Address) -> None:
        layout = address.option("layout", "subdirs")
        if layout not in _LAYOUTS:
            raise ConfigError(f"layout: expected one of {', '.join(_LAYOUTS)}, got {layout!r}")
        self._layout = _LAYOUTS[layout]
        self._url = f"{address.scheme}://{address.location.rstrip('/')}"
        try:
            origin = origin_of(self._url)
        except (ValueError, urllib3.exceptions.HTTPError) as error:
            raise ConfigError(f"{address.redacted()}: the host is malformed: {error}") from error
        super().__init__(address, origin, authorization(address, origin.host))

    def _url_of(self, method: str, key: str) -> str:
        """Return the URL of the value under `key`, in the layout that the address names."""
        return f"{self._url}/{self._layout.format(key[:2], key[2:])}"

    def _failure(self, response: Any, body: bytes) -> RemoteError:  # noqa: ANN401
        """Return the error for a response, with a hint about nginx if the status is 409."""
        hint = " (nginx: create_full_put_path on; or use layout=flat)"
        return RemoteError(f"{super()._failure(response, body)}{hint * (response.status == 409)}")


def _explained(error: BaseException | None) -> tuple[str, bool]:
    causes: list[BaseException] = []
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    if any(isinstance(each, TimeoutError) for each in causes):
        return "no answer in time", True
    # The last cause comes from the operating system or TLS, and is the most precise.
    return str(causes[-1]) or type(causes[-1]).__name__, False


def _proxied(proxy: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return a pool of connections through the proxy with the URL `proxy`.

    Raises:
        RemoteError: `proxy` is not a URL. The message does not show it, because it may contain a
            password.
    """
    try:
        parts = parse_url(proxy if "://" in proxy else f"http://{proxy}")
        user, _, password = (parts.auth or "").partition(":")
        login = f"{unquote(user)}:{unquote(password)}" if parts.auth else None
        headers = urllib3.make_headers(proxy_basic_auth=login)
        return urllib3.ProxyManager(parts._replace(auth=None).url, proxy_headers=headers, **options)
    except (ValueError, urllib3.exceptions.HTTPError):
        reason = "the proxy in the environment is not a URL (in its password, write %2F for a /)"
        raise RemoteError(reason) from None


def _body(response: Any, limit: int, end: float) -> bytes:  # noqa: ANN401
    """Return the whole body of a response.

    Args:
        response: urllib3's response.
        limit: the largest allowed number of bytes.
        end: the monotonic time at which the body has to be complete.

    Raises:
        RemoteTooLong: the body is longer than `limit`.
        RemoteTimeout: the body is not complete at `end`.
        RemoteError: the response does not state its length, so the body may be incomplete.
    """
    length = response.length_remaining
    if length is None and not response.chunked:
        # In http.client, a response whose headers were cut off looks the same.
        raise RemoteError("the response does not state its length")
    if length is not None and length > limit:
        raise RemoteTooLong(f"expected a response of at most {limit} bytes, got {length}")
    body = bytearray()
    # A server may announce a larger chunk than it sends. Only `read1` does not allocate memory for
    # more bytes than have arrived.
    while piece := response.read1(_PIECE):
        body += piece
        if len(body) > limit:
            raise RemoteTooLong(f"expected a response of at most {limit} bytes, got more")
        if time.monotonic() > end:
            raise RemoteTimeout("the response was not complete in time")
    response.release_conn()
    return bytes(body)


def origin_of(url: str) -> Origin:
    """Return the server of `url`: its scheme, host and port.

    Raises:
        ValueError, HTTPError: the URL is malformed.
    """
    parts = parse_url(url)
    scheme, host = parts.scheme or "", (parts.host or "").strip("[]")
    return Origin(scheme, host, parts.port or _PORTS.get(scheme, 0))


def _redirected(url: str, response: Any) -> str:  # noqa: ANN401
    """Return the URL to which `response` redirects a request for `url`.

    Raises:
        RemoteError: the new URL is malformed, is not an HTTP URL, or would replace https by http.
    """
    try:
        found: str = urljoin(url, response.headers.get("location", ""))
        origin = origin_of(found)
    except (ValueError, urllib3.exceptions.HTTPError) as error:
        raise RemoteError("the server redirects to a malformed URL") from error
    if origin.scheme not in _PORTS or not origin.host:
        reason = f"the server redirects to {origin.scheme}://{origin.host}, not to an HTTP server"
        raise RemoteError(reason)
    if url.startswith("https:") and origin.scheme != "https":
        raise RemoteError("the server redirects from https to http; kcache does not follow that")
    return found
