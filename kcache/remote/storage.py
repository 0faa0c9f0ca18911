"""Storage: the protocol of all clients of remotes, which keep values, and their errors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

from kcache.errors import ConfigError, KcacheError
from kcache.remote.address import Address

#: Kind of an address -> its client, which only the daemon loads, when it is first needed;
#: and the package and the extra that the client needs.
_STORAGES = {
    "http": ("HttpStorage", "urllib3", "http"),
    "redis": ("RedisStorage", "redis", "redis"),
    "objects": ("open_bucket", "obstore", "s3"),
}


class RemoteError(KcacheError):
    """A remote failed, rejected this user, or broke its protocol; a later question may succeed."""


class RemoteTimeout(RemoteError):  # noqa: N818  a kind of RemoteError
    """A remote did not answer in time."""


class RemoteTooLong(RemoteError):  # noqa: N818  a kind of RemoteError
    """A value is longer than `max_entry`, or than the server takes; the remote works."""


@contextmanager
def translated(explain: Callable[[Exception], tuple[str, bool]]) -> Generator[None]:
    """Turn what a client raises into RemoteError.

    Args:
        explain: returns the text of an error, and whether it is a time-out.
    """
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:
        text, is_late = explain(error)
        raise (RemoteTimeout if is_late else RemoteError)(text or type(error).__name__) from error


class Stored(NamedTuple):
    """A value of a remote.

    Attributes:
        value: the bytes.
        version: what `Storage.replace` needs to replace this value and no other one.
    """

    value: bytes
    version: object


class Storage(Protocol):
    """Values under keys (64 hexadecimal digits) on a server.

    A client adds the prefix of its address to each key. It does not examine values. It limits each
    wait for a server by the time-outs of the address; `guarded_storage` limits their sum.

    Threads: several may use it at the same time. Processes: only in the daemon, which was started
    by exec and never forks.
    """

    def get(self, key: str, limit: int) -> Stored | None:
        """Return the value, or None if there is none.

        Raises:
            RemoteTooLong: it is longer than `limit` bytes; RemoteError: the remote failed.
        """

    def put(self, key: str, value: bytes) -> None:
        """Store a value in place of the one that is there, if any.

        Raises:
            RemoteError: it is not stored, or its state is unknown.
        """

    def replace(self, key: str, value: bytes, old: Stored | None) -> bool:
        """Store a value in place of `old` (None: of nothing); return whether it is stored.

        Nothing is stored if another value is in place of `old`. A server without conditional
        requests stores the value anyway.

        Raises:
            RemoteError: its state is unknown.
        """
        ...

    def close(self) -> None:
        """Close the connections. Idempotent."""


@runtime_checkable
class Leases(Protocol):
    """A client with leases, by which only one process on all machines does something at a time.

    A lease belongs to a random token and ends by itself after some seconds.
    """

    def lease(self, key: str, token: bytes, seconds: float) -> bool:
        """Acquire the lease of `key`; return whether it was free. Raises RemoteError."""
        ...

    def renew(self, key: str, token: bytes, seconds: float) -> bool:
        """Extend a lease; return whether the token still held it. Raises RemoteError."""
        ...

    def release(self, key: str, token: bytes) -> bool:
        """Release a lease; return whether the token still held it. Raises RemoteError."""
        ...


def open_storage(address: Address) -> Storage:
    """Return the client of an address, which connects at the first question.

    Raises:
        ConfigError: the package that the client needs is not installed, or a credential can't be
            read.
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
