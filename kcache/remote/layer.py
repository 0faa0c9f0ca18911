"""Layer: a cache that somebody else put on this machine; it is asked after the user's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kcache.backend import Backend

__all__ = ["DirectoryLayer", "Layer"]


class Layer(Protocol):
    """Envelopes of entries under keys, read-only.

    Threads: safe to share. Fork: a child may go on using it. A layer checks nothing: the caller
    checks the envelope, as for every entry.
    """

    @property
    def keep(self) -> bool:
        """Whether a kernel that is found here is also stored in the user's own cache."""
        ...

    def get(self, key: str) -> bytes | None:
        """Return the envelope stored under `key`, or None.

        Raises:
            BackendError, OSError: it can't be read.
        """
        ...

    def close(self) -> None:
        """Close what is open. Idempotent."""
        ...


class DirectoryLayer:
    """The directory of a cache, with a backend of any kind, which is only read.

    Threads, fork: as the backends.

    Args:
        path: path of the directory, for messages.
        backends: the backends in it, opened for reading.
        keep: see `Layer`.
    """

    def __init__(self, path: str, backends: Sequence[Backend], *, keep: bool = False) -> None:
        self.path = path
        self.keep = keep
        self._backends = backends

    def get(self, key: str) -> bytes | None:
        """Return the envelope stored under `key`, or None; raises BackendError."""
        for backend in self._backends:
            found = backend.get(key)
            if found is not None:
                return found
        return None

    def close(self) -> None:
        """Close the backends."""
        for backend in self._backends:
            backend.close()

    def __repr__(self) -> str:
        """Return the layer with its path."""
        return f"{type(self).__name__}({self.path!r})"
