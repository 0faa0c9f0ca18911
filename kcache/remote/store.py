"""RemoteStore: the methods of a client of one protocol, and the errors that it may raise."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kcache.errors import ConfigError, KcacheError

if TYPE_CHECKING:
    from kcache.remote.address import Address

__all__ = [
    "Change",
    "Leases",
    "RemoteError",
    "RemoteReadOnly",
    "RemoteRefused",
    "RemoteStore",
    "RemoteTimeout",
    "RemoteTooLong",
    "Several",
    "open_store",
]

#: Kind of an address -> its client, which is loaded only in the agent, when it is first needed.
_STORES = {
    "http": ("kcache.remote.http", "HttpStore"),
    "redis": ("kcache.remote.redis", "RedisStore"),
    "objects": ("kcache.remote.objects", "ObjectStore"),
}
#: Gets the value that a store holds under a key, or None. Returns the value that it should hold, or
#: None to change nothing.
Change = Callable[[bytes | None], bytes | None]


class RemoteError(KcacheError):
    """A remote did not answer, or broke its protocol; a later question may succeed."""


class RemoteTimeout(RemoteError):  # noqa: N818  a kind of RemoteError
    """A remote did not answer in time."""


class RemoteRefused(RemoteError):  # noqa: N818  a kind of RemoteError
    """A remote refuses this user: credentials are missing or wrong, or its certificate is bad.

    Asking again for another key is useless.
    """


class RemoteTooLong(RemoteError):  # noqa: N818  a kind of RemoteError
    """A value is longer than this user wants; the remote works."""


class RemoteReadOnly(RemoteRefused):
    """A remote refuses to store what this user writes. It may let the user read."""


class RemoteStore(Protocol):
    """Sealed values under keys (64 hexadecimal digits) on a server.

    A store adds the prefix of its address to each key. It does not examine values. Every method
    ends within the time-outs of the address.

    Threads: used by several threads at a time. Processes: only in the agent, which was started by
    exec and never forks.
    """

    def get(self, key: str, limit: int) -> bytes | None:
        """Return the value, or None if there is none.

        Raises:
            RemoteTooLong: it is longer than `limit` bytes; RemoteError: the remote failed.
        """
        ...

    def put(self, key: str, value: bytes) -> None:
        """Store a value in place of what is there.

        Raises:
            RemoteError: it is not stored, or its state is unknown.
        """
        ...

    def merge(self, key: str, change: Change, limit: int) -> None:
        """Replace a value by the result of `change`, so that no other machine's value is lost.

        If the protocol has conditional writes (a script in Redis, If-Match in HTTP), the result is
        stored only if nobody has changed the value meanwhile. If somebody has, `change` is called
        again, at most a few times. If the protocol has none, the last writer wins.

        Raises:
            RemoteError: it is not stored; otherwise as for `get`.
        """
        ...

    def close(self) -> None:
        """Close the connections. Idempotent."""
        ...


@runtime_checkable
class Several(Protocol):
    """A store that returns several values in one round trip."""

    def get_several(self, keys: Sequence[str], limit: int) -> Sequence[bytes | None]:
        """Return the results of `get` for several keys. Raises RemoteError."""
        ...


@runtime_checkable
class Leases(Protocol):
    """A store with leases, by which one process of all machines does something at a time.

    A lease belongs to a random token and ends by itself after some seconds.
    """

    def lease(self, key: str, token: str, seconds: float) -> bool:
        """Take the lease of `key`; tell whether it was free. Raises RemoteError."""
        ...

    def renew(self, key: str, token: str, seconds: float) -> bool:
        """Extend a lease; tell whether the token still had it. Raises RemoteError."""
        ...

    def release(self, key: str, token: str) -> None:
        """Release a lease, if the token still has it. Raises RemoteError."""
        ...


def open_store(address: Address) -> RemoteStore:
    """Return the client of an address. Connects at the first question.

    Raises:
        ConfigError: the package that it needs is not installed, or a credential can't be read.
        RemoteError: it can't be made for another reason.
    """
    module, name = _STORES[address.kind]
    importlib.invalidate_caches()  # the package may have been installed since it was missing
    try:
        make: Callable[[Address], RemoteStore] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{address.redacted()} can't be used: {error}") from error
    return make(address)
