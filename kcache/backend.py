"""Backend: the contract of a store of bytes under keys, and how a backend is found by its name."""

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

#: Error numbers of a full disk or quota: evicting entries of this cache helps.
NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))

_HEX = "0123456789abcdef"


def is_key(key: object) -> bool:
    """Return whether `key` is a valid key: 64 lower-case hexadecimal digits."""
    return isinstance(key, str) and len(key) == KEY_LENGTH and not key.strip(_HEX)


def check_key(key: object) -> None:
    """Reject a text that is not a key.

    Raises:
        ConfigError: `key` is not 64 lower-case hexadecimal digits.
    """
    if not is_key(key):
        raise ConfigError(f"key: expected 64 lower-case hexadecimal digits, got {key!r}")


def failure(operation: str, error: OSError) -> BackendError:
    """Return the exception of a backend for an error of the operating system."""
    where = f" {error.filename}" if error.filename else ""
    return BackendError(f"{operation}{where}: {error.strerror or error}")


def increasing(clock: Callable[[], int]) -> Callable[[], int]:
    """Return a clock whose times increase with each call, even if `clock` is set back."""
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
        used_ns: time of the last recorded use, nanoseconds since the epoch.
    """

    key: str
    size: int
    used_ns: int


class Usage(NamedTuple):
    """How much a backend holds.

    Attributes:
        bytes: stored bytes, never below the truth.
        entries: number of entries, never below the truth.
    """

    bytes: int
    entries: int


class Backend(ABC):
    """Stores opaque bytes under keys, and knows their sizes and recency.

    A backend does not depend on kernels, envelopes or caps, and the engine does not depend on
    files. Keys are 64 lower-case hexadecimal digits; the engine checks them before a call.

    Errors: every method may raise `BackendError`, and nothing else, when the medium fails; a
    miss is `None`, never an exception. Threads: every method may be called from any thread.
    Processes: any number of processes may open the same folder. Crash: a process killed at any
    instant leaves no torn value and no lock, and `usage` at or above the truth.

    Eight methods are abstract. Override `use`, `batch` and `check` if a medium can do better.
    `kcache.testing.BackendContract` tests the whole contract.
    """

    #: By how many bytes the stored size of a value may exceed its length.
    overhead: int = 0

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return the value under `key`, or None if there is none; never partial bytes."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> int:
        """Store `value` under `key` atomically, last writer wins; return its stored size."""

    @abstractmethod
    def delete(self, key: str) -> int:
        """Remove `key`; return the bytes freed, 0 if it was absent."""

    @abstractmethod
    def touch(self, key: str) -> None:
        """Record a use of `key`; an absent key is ignored.

        The record may be buffered. It may be lost in a crash, or if it can't be written.
        """

    def use(self, key: str) -> bytes | None:
        """Return what `get` returns, and `touch` the key; a backend may do both in one step.

        A use that can't be recorded (read-only medium) is not an error.
        """
        value = self.get(key)
        if value is not None:
            with suppress(BackendError):
                self.touch(key)
        return value

    def batch(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's changes may take effect together, at its end.

        The engine evicts and stores inside one batch. A backend with transactions makes the
        batch one transaction: `usage` in the block is exact, and if the block or its end raises,
        nothing was changed. Other backends, and this default, make each change at once.
        """
        return nullcontext()

    @abstractmethod
    def usage(self) -> Usage:
        """Return the bytes and entries that all processes have stored, in constant time."""

    @abstractmethod
    def coldest(self) -> Iterator[EntryInfo]:
        """Yield entries, least recently used first, each at most once.

        Lazy: starting the iteration does not read the whole backend. The order may be approximate
        if a backend is larger than the sample that it examines.
        """

    @abstractmethod
    def scan(self) -> Iterator[EntryInfo]:
        """Yield every entry in any order, even while others delete entries."""

    def check(self, *, repair: bool = False) -> Iterator[str]:
        """Yield a sentence for each fault of the medium itself.

        With `repair`, the faults are repaired. The content of the values is not checked, because it
        is opaque to a backend. A check may take as long as reading everything. This default finds
        nothing.
        """
        del repair
        return iter(())

    @abstractmethod
    def close(self) -> None:
        """Release what the backend holds. Idempotent."""


class WrappingBackend(Backend):
    """A backend that passes each call to another one; subclasses change what some calls do.

    Args:
        inner: the other backend; closed with this one.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.overhead = inner.overhead

    def inner_for(self, method: str) -> Backend:
        """Return the other backend; called before each call of one of its methods."""
        del method
        return self.inner

    def get(self, key: str) -> bytes | None:
        """Return what the other backend returns; so do the methods below."""
        return self.inner_for("get").get(key)

    def use(self, key: str) -> bytes | None:
        """Pass on."""
        return self.inner_for("use").use(key)

    def put(self, key: str, value: bytes) -> int:
        """Pass on."""
        return self.inner_for("put").put(key, value)

    def delete(self, key: str) -> int:
        """Pass on."""
        return self.inner_for("delete").delete(key)

    def touch(self, key: str) -> None:
        """Pass on."""
        self.inner_for("touch").touch(key)

    def batch(self) -> AbstractContextManager[None]:
        """Pass on."""
        return self.inner_for("batch").batch()

    def usage(self) -> Usage:
        """Pass on."""
        return self.inner_for("usage").usage()

    def coldest(self) -> Iterator[EntryInfo]:
        """Pass on."""
        return self.inner_for("coldest").coldest()

    def scan(self) -> Iterator[EntryInfo]:
        """Pass on."""
        return self.inner_for("scan").scan()

    def check(self, *, repair: bool = False) -> Iterator[str]:
        """Pass on."""
        return self.inner_for("check").check(repair=repair)

    def close(self) -> None:
        """Pass on."""
        self.inner_for("close").close()


class NoBackend(Backend):
    """A backend that accepts every value and keeps none.

    It replaces a backend that could not be opened, after a warning to the user. Compiled kernels
    are then kept in the memory tier only.

    Args:
        reason: why there is no other backend.
        kind: `unusable`, `refused` (the environment names a directory that kcache does not use), or
            `no_cache` (nothing has been cached yet).
    """

    def __init__(self, reason: str, *, kind: str = "unusable") -> None:
        self.reason = reason
        self.kind = kind

    def get(self, key: str) -> bytes | None:
        """Return None."""
        return None

    def put(self, key: str, value: bytes) -> int:
        """Keep nothing; return 0."""
        return 0

    def delete(self, key: str) -> int:
        """Return 0."""
        return 0

    def touch(self, key: str) -> None:
        """Do nothing."""

    def usage(self) -> Usage:
        """Return that nothing is stored."""
        return Usage(0, 0)

    def coldest(self) -> Iterator[EntryInfo]:
        """Return nothing."""
        return iter(())

    def scan(self) -> Iterator[EntryInfo]:
        """Return nothing."""
        return iter(())

    def close(self) -> None:
        """Do nothing."""


# -- backends by their names -----------------------------------------------------------------------

#: First-party backends. They are found without a scan of entry points (which takes 15 to 50 ms).
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
    """Return the backends of other packages."""
    with importing:
        from importlib.metadata import entry_points  # noqa: PLC0415  25 ms

    return entry_points(group=GROUP)


def is_backend(name: str) -> bool:
    """Return whether a backend of that name is installed."""
    return name in _FIRST_PARTY or name in backend_names()


def require_backend(value: str, *, name: str = "backend") -> str:
    """Return `value`, the name of an installed backend; errors say that `name` has this value.

    Raises:
        ConfigError: `value` is not a name; UnknownBackendError: no such backend is installed.
    """
    if not isinstance(value, str) or not value.strip():  # pyright: ignore
        raise ConfigError(f"{name}: expected the name of a backend, got {value!r}")
    if not is_backend(value.strip()):
        known = ", ".join(backend_names())
        raise UnknownBackendError(f"{name}: expected one of {known}, got {value.strip()!r}")
    return value.strip()


def open_backend(name: str, folder: str, *, max_size: int, read_only: bool = False) -> Backend:
    """Open the backend called `name` in a folder of its own; the caller closes it.

    Raises:
        UnknownBackendError: no backend of that name is installed.
        ConfigError: the backend rejects `max_size`.
        BackendError: the backend can't be opened there, or imported.
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
