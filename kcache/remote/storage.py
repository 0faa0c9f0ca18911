"""Storage: the interface of the clients of remotes, and the errors that clients raise."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

from kcache.errors import ConfigError, KcacheError
from kcache.remote.address import Address

#: Maps each kind of address to the name of its client, which is imported when it is first needed,
#: and to the package and the extra that the client needs.
_STORAGES = {
    "http": ("HttpStorage", "urllib3", "http"),
    "redis": ("RedisStorage", "redis", "redis"),
    "objects": ("open_bucket", "obstore", "s3"),
}


class RemoteError(KcacheError):
    """A remote failed, rejected this user, or violated its protocol. A later try may succeed."""


class RemoteTimeout(RemoteError):  # noqa: N818  a kind of RemoteError
    """A remote did not answer in time."""


class RemoteTooLong(RemoteError):  # noqa: N818  a kind of RemoteError
    """A value is longer than `max_entry`, or than the server accepts. The remote has not failed."""


@contextmanager
def translated(explain: Callable[[Exception], tuple[str, bool]]) -> Generator[None]:
    """Raise RemoteError, or RemoteTimeout, in place of any exception that the block raises.

    Args:
        explain: a function that returns, for an exception, the text of the error, and whether it is
            a time-out.
    """
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:
        text, is_late = explain(error)
        raise (RemoteTimeout if is_late else RemoteError)(text or type(error).__name__) from error


class Stored(NamedTuple):
    """A value that a remote has.

    Attributes:
        value: the bytes.
        version: what `Storage.replace` needs to replace only this value.
    """

    value: bytes
    version: object


class Storage(Protocol):
    """A client, which stores values under keys (64 hexadecimal digits) on a server.

    A client adds the prefix in its address to each key. It does not examine the values. It limits
    each single wait for a server by the time-outs in the address; `guarded_storage` limits the
    total time of an operation.

    Threads: Several threads may use one object. Fork: A client need not work in a forked child,
    because the daemon and the commands that use clients do not fork.
    """

    def get(self, key: str, limit: int) -> Stored | None:
        """Return the value under `key`, or None if there is none.

        Raises:
            RemoteTooLong: the value is longer than `limit` bytes.
            RemoteError: the remote failed.
        """

    def put(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, in place of any older value.

        Raises:
            RemoteError: `value` was not stored, or may not have been stored.
        """

    def replace(self, key: str, value: bytes, old: Stored | None) -> bool:
        """Store `value` under `key` if the server still has `old`; return whether it is stored.

        If `old` is None, `value` is stored only if the server has no value under `key`. A server
        that does not support conditional requests stores `value` in any case.

        Raises:
            RemoteError: it is unknown whether `value` is stored.
        """
        ...

    def close(self) -> None:
        """Close the connections. Idempotent."""


@runtime_checkable
class Leases(Protocol):
    """A client that can also grant leases.

    At any time, at most one process on all machines holds the lease of a key. The holder is
    identified by a random token. A lease expires after some seconds unless it is renewed.
    """

    def lease(self, key: str, token: bytes, seconds: float) -> bool:
        """Try to acquire the lease of `key` for `seconds`; return whether it was free.

        Raises:
            RemoteError: the remote failed.
        """
        ...

    def renew(self, key: str, token: bytes, seconds: float) -> bool:
        """Renew the lease of `key` for `seconds`; return whether `token` still held it.

        Raises:
            RemoteError: the remote failed.
        """
        ...

    def release(self, key: str, token: bytes) -> bool:
        """Release the lease of `key`; return whether `token` still held it.

        Raises:
            RemoteError: the remote failed.
        """
        ...


def open_storage(address: Address) -> Storage:
    """Return the client for `address`. It connects when it is first used.

    Raises:
        ConfigError: the package that the client needs is not installed, or a file or an option in
            the address can't be used.
    """
    name, package, extra = _STORAGES[address.kind]
    importlib.invalidate_caches()  # the package may have been installed since it was missing
    try:
        module = importlib.import_module(f"kcache.remote.{address.kind}")
    except ImportError as error:
        needs = f"{address.scheme}:// needs the package {package}: pip install {package}"
        raise ConfigError(f"{needs}, or install kcache with the extra {extra}") from error
    make: Callable[[Address], Storage] = getattr(module, name)
    return make(address)
