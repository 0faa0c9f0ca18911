"""Backend: the interface of a store of bytes under keys, and how to open a backend by its name."""

from __future__ import annotations

import errno
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, NamedTuple, cast

from kcache.errors import BackendError, ConfigError, UnknownBackendError
from kcache.util.forks import importing

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoints

#: Entry-point group for backends of other packages. It maps a name to a `Backend` subclass or a
#: factory, called as `factory(directory, max_size=..., read_only=...)`.
GROUP = "kcache.backends"
#: A key has this many lower-case hexadecimal digits (a SHA-256 digest).
KEY_LENGTH = 64

#: The error numbers for a full disk or an exhausted quota. Evicting entries then makes room.
NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))

_HEX = "0123456789abcdef"


def is_key(key: object) -> bool:
    """Return whether `key` is a valid key: 64 lower-case hexadecimal digits."""
    return isinstance(key, str) and len(key) == KEY_LENGTH and not key.strip(_HEX)


def check_key(key: object) -> None:
    """Raise an error if `key` is not a valid key.

    Raises:
        ConfigError: `key` is not 64 lower-case hexadecimal digits.
    """
    if not is_key(key):
        raise ConfigError(f"key: expected 64 lower-case hexadecimal digits, got {key!r}")


def failure(operation: str, error: OSError) -> BackendError:
    """Return a BackendError saying that `operation` failed because of `error`."""
    where = f" {error.filename}" if error.filename else ""
    return BackendError(f"{operation}{where}: {error.strerror or error}")


def increasing(clock: Callable[[], int]) -> Callable[[], int]:
    """Return a function that returns the time of `clock`, but a later time at each call.

    If `clock` has not advanced since the last call, or was set back, the function returns the last
    time plus 1.
    """
    last = 0

    def now() -> int:
        nonlocal last
        last = now = max(clock(), last + 1)
        return now

    return now


class EntryInfo(NamedTuple):
    """What a backend reports about one entry without reading its value.

    Attributes:
        key: 64 hexadecimal digits.
        size: stored size in bytes, as `Backend.usage` counts it.
        used_ns: time of the last recorded use, in nanoseconds since the epoch.
    """

    key: str
    size: int
    used_ns: int


class Usage(NamedTuple):
    """How much a backend stores.

    Attributes:
        bytes: stored bytes; may be more than the actual number, but never less.
        entries: number of entries; may be more than the actual number, but never less.
    """

    bytes: int
    entries: int


class Backend(ABC):
    """Stores byte strings under keys, and records the size and the last use of each.

    A backend does not depend on kernels, envelopes or caps, and the engine does not depend on
    files. Keys are 64 lower-case hexadecimal digits. The engine checks each key before it calls a
    method.

    Errors: if the storage medium fails, any method may raise `BackendError`, but no other
    exception. A miss is None, never an exception. Threads: each method may be called from several
    threads at the same time. Processes: any number of processes may open the same folder. Crash: a
    process that is killed at any instant leaves neither a partly written value nor a held lock,
    and the figures of `usage` are still not below the actual ones.

    Eight methods are abstract. Override `use`, `batch` and `check` as well if the backend can do
    better than their defaults. `kcache.testing.BackendContract` tests the whole contract.
    """

    #: By how many bytes the stored size of a value may exceed its length.
    overhead: int = 0

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return the whole value under `key`, or None if there is none; never a part of a value."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> int:
        """Store `value` under `key` atomically, and return its stored size.

        The value replaces an older value under `key`. If several writers store a value under the
        same key, the last writer wins.
        """

    @abstractmethod
    def delete(self, key: str) -> int:
        """Delete the entry under `key`; return the bytes freed, or 0 if there was no entry."""

    @abstractmethod
    def touch(self, key: str) -> None:
        """Record that the entry under `key` was used. If there is no entry, do nothing.

        The record may be buffered. It may be lost in a crash, or if it can't be written.
        """

    def use(self, key: str) -> bytes | None:
        """Return the value under `key` like `get`, and record the use like `touch`.

        A backend may do both in one step. If the use can't be recorded, for example on a read-only
        medium, the value is returned without an error.
        """
        value = self.get(key)
        if value is not None:
            with suppress(BackendError):
                self.touch(key)
        return value

    def batch(self) -> AbstractContextManager[None]:
        """Return a context manager that may combine this thread's changes into one transaction.

        The engine makes room for a value and stores it in one `with` block. A backend with
        transactions makes the block one transaction: the changes take effect when the block ends,
        `usage` is exact within the block, and if the block or its end raises an exception, nothing
        was changed. In other backends, and by default, each change takes effect at once.
        """
        return nullcontext()

    @abstractmethod
    def usage(self) -> Usage:
        """Return how many bytes and entries all processes have stored. This takes constant time."""

    @abstractmethod
    def coldest(self) -> Iterator[EntryInfo]:
        """Yield entries, least recently used first, each at most once.

        The iterator is lazy: its first step does not read the whole backend. A backend may examine
        only a sample of its entries; then the order is approximate.
        """

    @abstractmethod
    def scan(self) -> Iterator[EntryInfo]:
        """Yield every entry, in any order, even if entries are deleted during the iteration."""

    def check(self, *, repair: bool = False) -> Iterator[str]:
        """Yield one sentence for each fault in how the backend stores its entries.

        A wrong count of stored bytes is such a fault. If `repair` is true, the faults are also
        repaired. The values are not checked, because a backend does not know their format. A check
        may take as long as reading every entry. By default, nothing is checked.
        """
        del repair
        return iter(())

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the backend. Calling this again does nothing."""


class WrappingBackend(Backend):
    """A backend that passes each call to an inner backend; subclasses override some methods.

    Args:
        inner: the inner backend; closed when this backend is closed.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.overhead = inner.overhead

    def inner_for(self, method: str) -> Backend:
        """Return the inner backend, for a call of its method called `method`.

        Each method of this class calls `inner_for` first, so a subclass can override it to act
        before every call.
        """
        del method
        return self.inner

    def get(self, key: str) -> bytes | None:
        """Call `get` of the inner backend."""
        return self.inner_for("get").get(key)

    def use(self, key: str) -> bytes | None:
        """Call `use` of the inner backend."""
        return self.inner_for("use").use(key)

    def put(self, key: str, value: bytes) -> int:
        """Call `put` of the inner backend."""
        return self.inner_for("put").put(key, value)

    def delete(self, key: str) -> int:
        """Call `delete` of the inner backend."""
        return self.inner_for("delete").delete(key)

    def touch(self, key: str) -> None:
        """Call `touch` of the inner backend."""
        self.inner_for("touch").touch(key)

    def batch(self) -> AbstractContextManager[None]:
        """Call `batch` of the inner backend."""
        return self.inner_for("batch").batch()

    def usage(self) -> Usage:
        """Call `usage` of the inner backend."""
        return self.inner_for("usage").usage()

    def coldest(self) -> Iterator[EntryInfo]:
        """Call `coldest` of the inner backend."""
        return self.inner_for("coldest").coldest()

    def scan(self) -> Iterator[EntryInfo]:
        """Call `scan` of the inner backend."""
        return self.inner_for("scan").scan()

    def check(self, *, repair: bool = False) -> Iterator[str]:
        """Call `check` of the inner backend."""
        return self.inner_for("check").check(repair=repair)

    def close(self) -> None:
        """Call `close` of the inner backend."""
        self.inner_for("close").close()


class NoBackend(Backend):
    """A backend that accepts every value but stores nothing.

    It takes the place of a backend if there is no usable directory or the backend can't be opened.
    Compiled kernels are then kept in the memory tier only.

    Args:
        reason: why no other backend was opened.
        kind: `refused` if the environment names a directory that kcache refuses to use, `no_cache`
            if nothing has been cached yet, `unusable` in all other cases.
    """

    def __init__(self, reason: str, *, kind: str = "unusable") -> None:
        self.reason = reason
        self.kind = kind

    def get(self, key: str) -> bytes | None:
        """Return None, because nothing is stored."""
        return None

    def put(self, key: str, value: bytes) -> int:
        """Store nothing, and return 0 as the stored size."""
        return 0

    def delete(self, key: str) -> int:
        """Return 0, because there is nothing to delete."""
        return 0

    def touch(self, key: str) -> None:
        """Do nothing."""

    def usage(self) -> Usage:
        """Return a usage of 0 bytes and 0 entries."""
        return Usage(0, 0)

    def coldest(self) -> Iterator[EntryInfo]:
        """Return an empty iterator."""
        return iter(())

    def scan(self) -> Iterator[EntryInfo]:
        """Return an empty iterator."""
        return iter(())

    def close(self) -> None:
        """Do nothing."""


# -- backends by their names -----------------------------------------------------------------------

#: The backends that come with kcache. They are found without reading the entry points of all
#: installed packages, which takes 15 to 50 ms.
_FIRST_PARTY = {
    "file": "kcache_backends.file:FileBackend",
    "lmdb": "kcache_backends.lmdb:LmdbBackend",
    "zstd": "kcache_backends.zstd:zstd_file",
    "zstd+lmdb": "kcache_backends.zstd:zstd_lmdb",
}


def backend_names() -> list[str]:
    """Return the names of all installed backends, sorted."""
    return sorted({*_FIRST_PARTY, *_registered().names})


def _registered() -> EntryPoints:
    """Return the entry points of the backends that other packages provide."""
    with importing:
        from importlib.metadata import entry_points  # noqa: PLC0415  25 ms

    return entry_points(group=GROUP)


def is_backend(name: str) -> bool:
    """Return whether a backend called `name` is installed."""
    return name in _FIRST_PARTY or name in backend_names()


def require_backend(value: str, *, name: str = "backend") -> str:
    """Return `value`, without surrounding whitespace, if it is the name of an installed backend.

    `name` is the name of the setting or variable that has this value; the errors mention it.

    Raises:
        ConfigError: `value` is not a text, or is empty.
        UnknownBackendError: no backend called `value` is installed.
    """
    if not isinstance(value, str) or not value.strip():  # pyright: ignore
        raise ConfigError(f"{name}: expected the name of a backend, got {value!r}")
    if not is_backend(value.strip()):
        known = ", ".join(backend_names())
        raise UnknownBackendError(f"{name}: expected one of {known}, got {value.strip()!r}")
    return value.strip()


def open_backend(name: str, folder: str, *, max_size: int, read_only: bool = False) -> Backend:
    """Open the backend called `name`, which stores its entries in `folder`. The caller closes it.

    Raises:
        UnknownBackendError: no backend called `name` is installed.
        ConfigError: the backend rejects `max_size`.
        BackendError: the backend can't be imported, or it can't be opened in `folder`.
    """
    require_backend(name)
    try:
        factory = cast("Callable[..., Backend]", _load(name))
    except ImportError as error:
        raise BackendError(f"backend {name} can't be imported: {error}") from error
    return factory(folder, max_size=max_size, read_only=read_only)


def _load(name: str) -> object:
    if name not in _FIRST_PARTY:
        return _registered()[name].load()
    module, _, attribute = _FIRST_PARTY[name].partition(":")
    with importing:
        return getattr(importlib.import_module(module), attribute)
