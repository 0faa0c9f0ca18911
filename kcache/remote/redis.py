"""RedisStorage: a remote in Redis or Valkey, one server or a cluster, by redis-py.

The address `redis://user:password@host:port/db/prefix` keeps a value under `kcache:prefix:KEY`. The
commands are GETRANGE, SET, and EVAL with GET, DEL and PEXPIRE; a user without the permission for
EVAL can't merge, and can't renew or release leases. The server decides which values it deletes:
with `expire=30d`, each expires 30 days after it was written, and with `maxmemory` and
`allkeys-lru`, the server evicts the least recently used values.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry

from kcache.remote.address import Address
from kcache.remote.credentials import content_of, is_loopback, not_private, read_secret
from kcache.remote.storage import RemoteError, RemoteTooLong, Stored, translated
from kcache.util.units import parse_age

_PORT = 6379
#: Replaces a value if it is still the one that was read. ARGV: the old value, empty if there was
#: none; the new value; and the options of SET for its expiry.
_SWAP = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], unpack(ARGV, 3))
return 1
"""
#: Runs a command on a lease if the token holds the lease. ARGV: the token, the command, and its
#: arguments.
_IF_HELD = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call(ARGV[2], KEYS[1], unpack(ARGV, 3))
"""


class RedisStorage:
    """Values and leases in Redis or Valkey.

    Threads: may share it; each thread has a connection while it asks. Fork: used only by the
    daemon, which does not fork. A lease that is not released ends by itself.

    Args:
        address: address of the remote.

    Raises:
        ConfigError: a file or an option can't be used.
    """

    def __init__(self, address: Address) -> None:
        expire = address.option("expire")
        self._expire = int(parse_age(expire, name="expire")) if expire else 0
        self._is_cluster = address.scheme.endswith("+cluster")
        self._db, prefix = _database(address.path, cluster=self._is_cluster)
        self._prefix = f"kcache:{prefix}"
        parts = [urlsplit(f"//{host}") for host in address.hosts.split(",")]
        self._nodes = [(part.hostname or "", part.port or _PORT) for part in parts]
        self._options = _connection_options(address)
        self._redis: Any = None

    def get(self, key: str, limit: int) -> Stored | None:
        """Return the value, or None if there is none."""
        with self._server() as server:
            # One byte more than is allowed shows that a value is too long.
            value = server.getrange(self._prefix + key, 0, limit)
        if not isinstance(value, bytes):
            raise RemoteError(f"the server answers with {type(value).__name__}, not with bytes")
        if len(value) > limit:
            raise RemoteTooLong(f"the value has more than {limit} bytes")
        return Stored(value, value) if value else None  # kcache stores no empty value

    def put(self, key: str, value: bytes) -> None:
        """Store a value, replacing the one that is there."""
        with self._server() as server:
            server.set(self._prefix + key, value, ex=self._expire or None)

    def replace(self, key: str, value: bytes, old: Stored | None) -> bool:
        """Store a value in place of `old`; return whether it is stored."""
        known = b"" if old is None else old.value
        expires = ("EX", self._expire) if self._expire else ()
        return self._eval(_SWAP, self._prefix + key, known, value, *expires)

    def lease(self, key: str, token: bytes, seconds: float) -> bool:
        """Acquire the lease of `key`; return whether it was free."""
        with self._server() as server:
            return bool(server.set(self._lease(key), token, nx=True, px=_milliseconds(seconds)))

    def renew(self, key: str, token: bytes, seconds: float) -> bool:
        """Extend a lease; return whether the token still held it."""
        return self._eval(_IF_HELD, self._lease(key), token, "PEXPIRE", _milliseconds(seconds))

    def release(self, key: str, token: bytes) -> bool:
        """Release a lease; return whether the token still held it."""
        return self._eval(_IF_HELD, self._lease(key), token, "DEL")

    def close(self) -> None:
        """Close the connections. Idempotent."""
        server, self._redis = self._redis, None
        if server is not None:
            with suppress(Exception):
                server.close()

    def _lease(self, key: str) -> str:
        return f"{self._prefix}lease:{key}"

    def _eval(self, script: str, key: str, *arguments: object) -> bool:
        with self._server() as server:
            return bool(server.eval(script, 1, key, *arguments) == 1)

    @contextmanager
    def _server(self) -> Generator[Any]:
        """Yield redis-py's client; its exceptions become RemoteError."""
        with translated(_explained):
            if self._redis is None:
                self._redis = self._cluster() if self._is_cluster else self._single()
            yield self._redis

    def _single(self) -> Any:  # noqa: ANN401  of two kinds, without a common type
        host, port = self._nodes[0]
        # If the server has closed an idle connection, try once more. Not after a
        # time-out, because then the operation's time is used up.
        retry = Retry(NoBackoff(), 1, (redis.ConnectionError,))
        return redis.Redis(host=host, port=port, db=self._db, retry=retry, **self._options)

    def _cluster(self) -> Any:  # noqa: ANN401
        node: Any = ClusterNode
        nodes = [node(host, port) for host, port in self._nodes]
        return RedisCluster(startup_nodes=nodes, retry=Retry(NoBackoff(), 2), **self._options)


def _explained(error: Exception) -> tuple[str, bool]:
    return str(error).rstrip("."), isinstance(error, (redis.TimeoutError, TimeoutError))


def _connection_options(address: Address) -> dict[str, Any]:
    """Return the options of every connection.

    Raises:
        ConfigError: a password or a certificate can't be read.
    """
    password = address.option("password_file")
    is_tls = address.scheme.split("+")[0] in ("rediss", "valkeys")
    host = urlsplit(f"//{address.hosts}").hostname or ""
    # A cluster names its own nodes, which may be on other machines.
    is_cluster = address.scheme.endswith("+cluster")
    if password and not is_tls and (is_cluster or not is_loopback(host)):
        raise not_private(address, "password_file")
    how: dict[str, Any] = {
        "username": address.user,
        "password": read_secret(password) if password else address.password,
        "socket_connect_timeout": address.connect_timeout,
        "socket_timeout": address.timeout,
        "protocol": 2,
    }
    if is_tls:
        how["ssl"] = True
        names = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}
        for option, theirs in names.items():
            path = address.option(option)
            if path:
                content_of(path)
                how[theirs] = path
    return how


def _database(path: str, *, cluster: bool) -> tuple[int, str]:
    """Return the number of the database and the prefix that a path names."""
    parts = [part for part in path.split("/") if part]
    number = parts.pop(0) if parts and parts[0].isdecimal() and not cluster else "0"
    return int(number[:9]), "".join(f"{part}:" for part in parts)


def _milliseconds(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
