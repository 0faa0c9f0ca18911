"""RedisStore: a remote in Redis or Valkey, one server or a cluster, by redis-py.

The address `redis://user:password@host:port/db/prefix` keeps a value under `kcache:prefix:KEY`. The
commands are GETRANGE, SET, and EVAL with GET, DEL and PEXPIRE; a user who may not EVAL can neither
merge nor renew or release leases. The server decides which values it deletes: with `expire=30d`,
each expires 30 days after it was written, and with `maxmemory` and `allkeys-lru`, the server evicts
those that were not used for longest.

redis-py limits neither the time of a whole answer nor its length. The connections here limit both.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kcache.errors import ConfigError
from kcache.remote.credentials import read_secret
from kcache.remote.deadline import DeadlineSocket
from kcache.remote.redis_get import Getter, Unusual
from kcache.remote.store import (
    RemoteError,
    RemoteReadOnly,
    RemoteRefused,
    RemoteTimeout,
    RemoteTooLong,
)
from kcache.util.units import parse_age

try:
    import redis
    import redis.exceptions
    from redis.backoff import NoBackoff
    from redis.cluster import ClusterNode, RedisCluster
    from redis.connection import Connection, SSLConnection
    from redis.retry import Retry
except ImportError as error:
    raise ImportError(
        "Redis needs the package redis: pip install redis, or install kcache with the extra redis"
    ) from error

if TYPE_CHECKING:
    from kcache.remote.address import Address
    from kcache.remote.store import Change

__all__ = ["RedisStore"]

_PORT = 6379
#: How often a merge is tried if other clients write the same value.
_TRIES = 6
#: Bytes that an answer may have beside the value: room to describe a cluster of a thousand nodes.
_ROOM = 1 << 20
#: Replaces a value if it is still the one that was read. ARGV: whether there was one, the old
#: value, the new value, and the seconds after which it expires (0: never).
_SWAP = """
local now = redis.call('GET', KEYS[1])
if ARGV[1] == '0' then
    if now and now ~= '' then return 0 end
elseif now ~= ARGV[2] then
    return 0
end
if ARGV[4] == '0' then
    redis.call('SET', KEYS[1], ARGV[3])
else
    redis.call('SET', KEYS[1], ARGV[3], 'EX', ARGV[4])
end
return 1
"""
_RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
    return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
    return redis.call('DEL', KEYS[1])
end
return 0
"""


class _Budget(threading.local):
    """How long, and for how many bytes, the current thread may wait for an answer."""

    end = 0.0
    most = _ROOM

    def begin(self, seconds: float, most: int) -> None:
        self.end = time.monotonic() + seconds
        self.most = most + _ROOM

    def left(self) -> float:
        """Return how many seconds are left; raises TimeoutError if there are none."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


class RedisStore:
    """Values and leases in Redis or Valkey.

    Threads: safe to share; each thread has a connection while it asks. Fork: only for the agent,
    which does not fork. Merges lose nothing. A lease ends by itself if nobody releases it.

    Args:
        address: address of the tier.

    Raises:
        ConfigError: a file or an option can't be used.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._expire = (
            int(parse_age(address.option("expire"), name="expire"))
            if (address.option("expire"))
            else 0
        )
        cluster = address.scheme.endswith("+cluster")
        self._db, prefix = _database(address.path, cluster=cluster)
        self._prefix = f"kcache:{prefix}"
        password = address.option("password_file")
        self._password = read_secret(password) if password else address.password
        self._budget = _Budget()
        self._lock = threading.Lock()
        self._client: Any = None
        #: Reads from one server; a cluster is left to redis-py.
        self._getter: Getter | None = None
        self._make = self._cluster if cluster else self._single

    def get(self, key: str, limit: int) -> bytes | None:
        """Return the value, or None if there is none."""
        return self.get_several((key,), limit)[0]

    def get_several(self, keys: Sequence[str], limit: int) -> list[bytes | None]:
        """Return the value of each key, or None if it has none; asks for all keys at once."""
        with self._answering(limit) as client:
            if self._getter is not None:
                names = [(self._prefix + key).encode() for key in keys]
                with suppress(Unusual):
                    # One byte more than is allowed shows that a value is too long.
                    found = self._getter.get(names, self._budget.left(), limit + 1)
                    return [_checked(value, limit) for value in found]
            return [self._read(client, key, limit) for key in keys]

    def put(self, key: str, value: bytes) -> None:
        """Store a value, replacing the one that is there."""
        with self._answering(writing=True) as client:
            client.set(self._prefix + key, value, ex=self._expire or None)

    def merge(self, key: str, change: Change, limit: int) -> None:
        """Replace a value by the result of `change`, if nobody else has written meanwhile."""
        for _ in range(_TRIES):
            with self._answering(limit, writing=True) as client:
                old = self._read(client, key, limit)
                new = change(old)
                if new is None:
                    return
                known = b"0" if old is None else b"1"
                arguments = (known, old or b"", new, self._expire)
                if client.eval(_SWAP, 1, self._prefix + key, *arguments) == 1:
                    return
        raise RemoteError("others write the same value all the time")

    def lease(self, key: str, token: str, seconds: float) -> bool:
        """Take the lease of `key`; tell whether it was free."""
        with self._answering(writing=True) as client:
            return bool(client.set(self._lease(key), token, nx=True, px=_milliseconds(seconds)))

    def renew(self, key: str, token: str, seconds: float) -> bool:
        """Extend a lease; tell whether the token still had it."""
        with self._answering(writing=True) as client:
            found = client.eval(_RENEW, 1, self._lease(key), token, _milliseconds(seconds))
            return bool(found == 1)

    def release(self, key: str, token: str) -> None:
        """Release a lease, if the token still has it."""
        with self._answering(writing=True) as client:
            client.eval(_RELEASE, 1, self._lease(key), token)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
            getter, self._getter = self._getter, None
        if getter is not None:
            getter.close()
        if client is not None:
            with suppress(Exception):
                client.close()

    def _lease(self, key: str) -> str:
        return f"{self._prefix}lease:{key}"

    def _read(self, client: Any, key: str, limit: int) -> bytes | None:  # noqa: ANN401
        found = client.getrange(self._prefix + key, 0, limit)
        if not isinstance(found, bytes):
            raise RemoteError(f"the server answers with {type(found).__name__}, not with bytes")
        return _checked(found, limit)

    @contextmanager
    def _answering(self, limit: int = 0, *, writing: bool = False) -> Generator[Any]:
        """Yield the client, and turn its exceptions into RemoteError."""
        self._budget.begin(self._address.timeout, limit)
        try:
            yield self._opened()
        except (RemoteError, ConfigError):
            raise
        except Exception as error:  # a malformed answer raises ValueError and others
            raise _translated(error, writing=writing) from error

    def _opened(self) -> Any:  # noqa: ANN401  of two kinds, without a common type
        with self._lock:
            if self._client is None:
                self._client = self._make()
            return self._client

    def _single(self) -> Any:  # noqa: ANN401
        host, port = self._nodes()[0]
        # If the server has closed an idle connection meanwhile, try once more. Never after a
        # time-out, because its time is used up.
        retry = Retry(NoBackoff(), 1, (redis.ConnectionError,))
        pool = redis.ConnectionPool(host=host, port=port, db=self._db, retry=retry, **self._how())
        self._getter = Getter(pool)
        return redis.Redis(connection_pool=pool)

    def _cluster(self) -> Any:  # noqa: ANN401
        node: Any = ClusterNode
        nodes = [node(host, port) for host, port in self._nodes()]
        # With a URL, because the class of connections reaches the nodes' pools only then. The URL
        # does not ask for TLS, because the class does TLS.
        url = f"redis://{self._address.hosts.split(',')[0]}"
        retry = Retry(NoBackoff(), 2)
        return RedisCluster(startup_nodes=nodes, url=url, retry=retry, **self._how())

    def _nodes(self) -> list[tuple[str, int]]:
        parts = [urlsplit(f"//{host}") for host in self._address.hosts.split(",")]
        return [(part.hostname or "", part.port or _PORT) for part in parts]

    def _how(self) -> dict[str, Any]:
        """Return the options of every connection.

        Raises:
            ConfigError: a certificate can't be read.
        """
        secure = self._address.scheme.split("+")[0] in ("rediss", "valkeys")
        base: Any = SSLConnection if secure else Connection
        how: dict[str, Any] = {
            "username": self._address.user,
            "password": self._password,
            "socket_connect_timeout": self._address.connect_timeout,
            "socket_timeout": self._address.timeout,
            "protocol": 2,
            "driver_info": None,
            "connection_class": _bounded(base, self._budget, self._address.connect_timeout),
        }
        if secure:
            how |= self._certificates()
        return {name: value for name, value in how.items() if value is not None}

    def _certificates(self) -> dict[str, str | None]:
        names = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}
        files = {theirs: self._address.option(ours) for ours, theirs in names.items()}
        for path in filter(None, files.values()):
            try:
                open(path, "rb").close()
            except OSError as error:
                raise ConfigError(f"{path} can't be read: {error.strerror}") from error
        return {name: path or None for name, path in files.items()}


def _checked(value: bytes, limit: int) -> bytes | None:
    """Return a value, or None if there is none; raises RemoteTooLong if it is too long."""
    if len(value) > limit:
        raise RemoteTooLong(f"the value has more than {limit} bytes")
    return value or None  # a sealed value is never empty


def _bounded(base: Any, budget: _Budget, connect_timeout: float) -> Any:  # noqa: ANN401
    """Return a connection class of redis-py that keeps to the thread's budget."""

    class Bounded(base):  # type: ignore[misc]  # of a package that may be missing
        def _connect(self) -> DeadlineSocket:
            left = budget.left()
            self.socket_connect_timeout = min(connect_timeout, left)
            self.socket_timeout = left  # for the TLS handshake
            connected = DeadlineSocket(base._connect(self), budget.left())
            connected.start(budget.left(), budget.most)
            return connected

        def send_packed_command(self, command: Any, check_health: bool = True) -> None:  # noqa: ANN401
            if self._sock is not None:
                self._sock.start(budget.left(), budget.most)
            base.send_packed_command(self, command, check_health)

    return Bounded


def _database(path: str, *, cluster: bool) -> tuple[int, str]:
    """Return the number of the database and the prefix that a path names."""
    parts = [part for part in path.split("/") if part]
    number = parts.pop(0) if parts and parts[0].isdecimal() and not cluster else "0"
    return int(number[:9]), "".join(f"{part}:" for part in parts)


def _milliseconds(seconds: float) -> int:
    return max(int(seconds * 1000), 1)


def _translated(error: Exception, *, writing: bool) -> RemoteError:
    """Return the RemoteError for an exception of redis-py or of its sockets."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, (redis.TimeoutError, TimeoutError)):
        return RemoteTimeout(message)
    if isinstance(error, redis.ReadOnlyError):
        return RemoteReadOnly(message)
    if isinstance(error, redis.exceptions.NoPermissionError):
        return RemoteReadOnly(message) if writing else RemoteRefused(message)
    refusals = (redis.AuthenticationError, redis.exceptions.AuthorizationError)
    if isinstance(error, refusals) or any(
        isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error)
    ):
        return RemoteRefused(message)
    if any(isinstance(cause, TimeoutError) for cause in _causes(error)):
        return RemoteTimeout(message)
    return RemoteError(message)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
