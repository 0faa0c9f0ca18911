"""HttpStore: a remote behind HTTP: nginx with WebDAV, bazel-remote, a gateway to an object store.

It uses GET and PUT, like ccache's and Bazel's HTTP caches. The address `https://host/path` and a
key make `https://host/path/ab/cdef...` (`layout=subdirs`, the default),
`https://host/path/abcdef...` (`layout=flat`) or `https://host/path/ac/abcdef...` (`layout=bazel`,
whose server must not check the values: bazel-remote's `--disable_http_ac_validation`).

http.client of the standard library does all of it, except plain answers to GET (`http_get`). This
module adds deadlines for whole answers, limits, a few open connections, and redirects that take no
credentials to another host.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote, urljoin, urlsplit

from kcache._version import __version__
from kcache.errors import ConfigError
from kcache.remote.credentials import authorization
from kcache.remote.http_pool import Answer, Origin, Pool, Request
from kcache.remote.store import (
    RemoteError,
    RemoteReadOnly,
    RemoteRefused,
    RemoteTimeout,
    RemoteTooLong,
)

if TYPE_CHECKING:
    from kcache.remote.address import Address
    from kcache.remote.store import Change

__all__ = ["HttpStore", "pause"]

_ABSENT = (404, 410)
_REFUSED = (401, 403, 407)
#: The server does not know PUT, or not at this path.
_NO_PUT = (405, 501)
_REDIRECTS = {"GET": (301, 302, 303, 307, 308), "PUT": (307, 308)}
_MOST_REDIRECTS = 3
#: How often a merge is tried if other clients write the same value.
_TRIES = 6
#: Bytes a second: an upload may take its size divided by this, beyond the time-out. No program
#: waits for an upload.
_UPLOAD_SPEED = 1e6
#: Most bytes of an error's page that are read, so that the connection can be used again.
_MOST_PAGE = 1 << 16
_LAYOUTS = ("subdirs", "flat", "bazel")


class HttpStore:
    """Values by HTTP.

    Threads: safe to share; each request has a connection of its own, and a few idle ones are kept.
    Fork: only for the agent, which does not fork. With a server that knows `If-Match`, merges of
    several machines lose nothing; with one that doesn't (nginx), the last writer wins.

    Args:
        address: address of the tier.

    Raises:
        ConfigError: a certificate, a token or an option can't be used.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._layout = address.option("layout", "subdirs")
        if self._layout not in _LAYOUTS:
            raise ConfigError(
                f"layout={self._layout!r} is not allowed; allowed: {', '.join(_LAYOUTS)}"
            )
        try:
            self._origin, path = _origin(f"{address.scheme}://{address.location}")
        except ValueError as error:
            raise ConfigError(f"{address.redacted()} names no host: {error}") from error
        self._path = path.rstrip("/")
        self._authorization = authorization(address, self._origin.host)
        self._pool = Pool(address)

    def get(self, key: str, limit: int) -> bytes | None:
        """Return the value, or None if there is none."""
        answer = self._get(key, limit)
        return None if answer is None else answer.body

    def put(self, key: str, value: bytes) -> None:
        """Store a value, replacing the one that is there."""
        self._put(key, value, {})

    def merge(self, key: str, change: Change, limit: int) -> None:
        """Replace a value by the result of `change`, if nobody else has written meanwhile."""
        for attempt in range(_TRIES):
            time.sleep(pause(attempt))
            answer = self._get(key, limit)
            value = change(None if answer is None else answer.body)
            if value is None:
                return
            if self._put(key, value, _condition(answer)):
                return
        raise RemoteError("others write the same value all the time")

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._pool.close()

    def _get(self, key: str, limit: int) -> Answer | None:
        answer = self._request("GET", key, None, {}, limit)
        if answer.status in _ABSENT:
            return None
        if answer.status != 200:
            raise _failure(answer)
        return answer

    def _put(self, key: str, value: bytes, condition: Mapping[str, str]) -> bool:
        """Store a value; tell whether the condition held."""
        headers = {"Content-Type": "application/octet-stream", **condition}
        answer = self._request("PUT", key, value, headers, _MOST_PAGE)
        if answer.status == 412 and condition:
            return False
        if answer.status == 413:
            raise RemoteTooLong(f"the server stores no {len(value)} bytes: {_named(answer.status)}")
        if answer.status in _REFUSED or answer.status in _NO_PUT:
            raise RemoteReadOnly(f"the server refuses to store: {_named(answer.status)}")
        if not 200 <= answer.status < 300:
            raise _failure(answer)
        return True

    def _url(self, key: str) -> str:
        below = {"subdirs": f"{key[:2]}/{key[2:]}", "flat": key, "bazel": f"ac/{key}"}
        return f"{self._path}/{below[self._layout]}"

    def _request(
        self, method: str, key: str, body: bytes | None, headers: dict[str, str], limit: int
    ) -> Answer:
        """Follow redirects, and return the answer to a request.

        Raises:
            RemoteError: there is no answer, or it can't be used.
        """
        origin, path = self._origin, self._url(key)
        end = time.monotonic() + self._address.timeout + len(body or b"") / _UPLOAD_SPEED
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                sent = {"User-Agent": f"kcache/{__version__}", **headers}
                own = origin == self._origin
                if own and self._authorization is not None:
                    sent["Authorization"] = self._authorization
                request = Request(origin, own, method, path, body, sent, limit, end)
                answer = self._pool.ask(request)
                if answer.status not in _REDIRECTS[method]:
                    return answer
                origin, path = _redirected(origin, path, answer)
        except TimeoutError as error:
            raise RemoteTimeout(f"no answer in time from {origin}") from error
        except ssl.SSLCertVerificationError as error:
            raise RemoteRefused(f"the certificate of {origin}: {error.verify_message}") from error
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(f"{origin}: {type(error).__name__}: {error}") from error
        raise RemoteError(f"{self._origin} redirects again and again")


def pause(attempt: int) -> float:
    """Return seconds to wait before an attempt; random, so that writers do not collide again."""
    import random

    return random.uniform(0, 0.02 * 2**attempt) if attempt else 0.0


def _condition(answer: Answer | None) -> dict[str, str]:
    """Return the header with which a PUT only replaces `answer`."""
    if answer is None:
        return {"If-None-Match": "*"}
    tag = answer.headers.get("etag", "")
    # A weak tag never matches in If-Match (RFC 9110, 13.1.1).
    return {"If-Match": tag} if tag.startswith('"') else {}


def _failure(answer: Answer) -> RemoteError:
    kind = RemoteRefused if answer.status in _REFUSED else RemoteError
    return kind(f"the server answers {_named(answer.status)}")


def _named(status: int) -> str:
    name = http.client.responses.get(status, "")
    hint = " (nginx: create_full_put_path on; or use layout=flat)" if status == 409 else ""
    return f"{status} {name}".strip() + hint


def _origin(url: str) -> tuple[Origin, str]:
    """Return the origin of a URL, and its path with the query.

    Raises:
        ValueError: it has no origin.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    host = parts.hostname or ""
    if not host.isascii():
        host = host.encode("idna").decode("ascii")
    return Origin(parts.scheme, host, port), (f"{path}?{parts.query}" if parts.query else path)


def _redirected(origin: Origin, path: str, answer: Answer) -> tuple[Origin, str]:
    """Return the origin and the path that a redirect leads to.

    Raises:
        RemoteError: the redirect leads to no HTTP server, or out of TLS.
    """
    try:
        found = _origin(urljoin(f"{origin}{path}", answer.headers.get("location", "")))
    except ValueError as error:
        raise RemoteError(f"{origin} redirects to nowhere") from error
    if found[0].scheme not in ("http", "https") or not found[0].host:
        raise RemoteError(f"{origin} redirects to {found[0].scheme}:, which is not followed")
    if origin.scheme == "https" and found[0].scheme != "https":
        raise RemoteError(f"{origin} redirects out of TLS, which is not followed")
    return found
