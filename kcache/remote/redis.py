"""RedisStorage: a remote in Redis or Valkey, on one server or a cluster, by redis-py.

If the address is `redis://user:password@host:port/db/prefix`, the value under `KEY` is stored in
database `db` under `kcache:prefix:KEY`. The commands are GETRANGE, SET and EVAL, and the scripts
call GET, SET, DEL and PEXPIRE. A user who may not call EVAL can't merge manifests, and can't renew
or release leases.

kcache deletes no values. With the option `expire=30d`, each value expires 30 days after it was
written. With the server's settings `maxmemory` and `maxmemory-policy allkeys-lru`, the server
evicts the least recently used values.
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
#: Replaces a value if it is still the one that was read. The arguments are the old value (empty if
#: there was none), the new value, and the options of SET for its expiry.
_SWAP = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], unpack(ARGV, 3))
return 1
"""
#: Runs a command on the key of a lease if the token still holds the lease. The arguments are the
#: token, the name of the command, and the arguments of the command.
_IF_HELD = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call(ARGV[2], KEYS[1], unpack(ARGV, 3))
"""


class RedisStorage:
    """The values and leases of a remote in Redis or Valkey.

    A lease that is neither renewed nor released expires.

    Threads: Several threads may use one object, because each operation has a connection of its own.
    Fork: A forked child must not use the object; the daemon and the commands that use remotes do
    not fork.

    Args:
        address: the address of the remote.

    Raises:
        ConfigError: a file or an option in the address can't be used.
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
        """Return the value under `key`, or None if there is none; see `Storage.get`."""
        with self._server() as server:
            # One byte more than is allowed shows that a value is too long.
            value = server.getrange(self._prefix + key, 0, limit)
        if not isinstance(value, bytes):
            raise RemoteError(f"expected bytes from the server, got {type(value).__name__}")
        if len(value) > limit:
            raise RemoteTooLong(f"expected a value of at most {limit} bytes, got more")
        return Stored(value, value) if value else None  # kcache stores no empty value

    def put(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, in place of any older value."""
        with self._server() as server:
            server.set(self._prefix + key, value, ex=self._expire or None)

    def replace(self, key: str, value: bytes, old: Stored | None) -> bool:
        """Store `value` in place of `old`; return whether it is stored. See `Storage.replace`."""
        known = b"" if old is None else old.value
        expires = ("EX", self._expire) if self._expire else ()
        return self._eval(_SWAP, self._prefix + key, known, value, *expires)

    def lease(self, key: str, token: bytes, seconds: float) -> bool:
        """Try to acquire the lease of `key` for `seconds`; return whether it was free."""
        with self._server() as server:
            return bool(server.set(self._lease(key), token, nx=True, px=_milliseconds(seconds)))

    def renew(self, key: str, token: bytes, seconds: float) -> bool:
        """Renew the lease of `key` for `seconds`; return whether `token` still held it."""
        return self._eval(_IF_HELD, self._lease(key), token, "PEXPIRE", _milliseconds(seconds))

    def release(self, key: str, token: bytes) -> bool:
        """Release the lease of `key`; return whether `token` still held it."""
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
        """Yield redis-py's client, and raise RemoteError in place of its exceptions."""
        with translated(_explained):
            if self._redis is None:
                self._redis = self._cluster() if self._is_cluster else self._single()
            yield self._redis

    def _single(self) -> Any:  # noqa: ANN401  of two kinds, without a common type
        host, port = self._nodes[0]
        # An operation is tried once more if the server has closed an idle connection, but not after
        # a time-out, because then the time of the operation is used up.
        retry = Retry(NoBackoff(), 1, (redis.ConnectionError,))
        return redis.Redis(host=host, port=port, db=self._db, retry=retry, **self._options)

    def _cluster(self) -> Any:  # noqa: ANN401
        node: Any = ClusterNode
        nodes = [node(host, port) for host, port in self._nodes]
        return RedisCluster(startup_nodes=nodes, retry=Retry(NoBackoff(), 2), **self._options)


def _explained(error: Exception) -> tuple[str, bool]:
    return str(error).rstrip("."), isinstance(error, (redis.TimeoutError, TimeoutError))


def _connection_options(address: Address) -> dict[str, Any]:
    """Return the keyword arguments with which redis-py connects to a server.

    Raises:
        ConfigError: a file with a password or a certificate can't be read, or the password in
            `password_file` would be sent to another machine without TLS.
    """
    password = address.option("password_file")
    is_tls = address.scheme.split("+")[0] in ("rediss", "valkeys")
    host = urlsplit(f"//{address.hosts}").hostname or ""
    # A cluster returns the addresses of its nodes, which may be on other machines.
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
    """Return the number of the database, and the prefix of keys, that the path of an address names.

    A cluster has no numbered databases, so its path contains only the prefix.
    """
    parts = [part for part in path.split("/") if part]
    number = parts.pop(0) if parts and parts[0].isdecimal() and not cluster else "0"
    return int(number[:9]), "".join(f"{part}:" for part in parts)


def _milliseconds(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
