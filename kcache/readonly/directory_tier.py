"""DirectoryTier: the directory of a cache, which is only read, after the user's own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from kcache.entry import Candidate
from kcache.errors import BackendError, CorruptEntryError

if TYPE_CHECKING:
    from kcache.backend import Backend
    from kcache.readonly.bundle_file import Bundle
    from kcache.remote.daemon_client import DaemonClient

#: The exceptions that reading a layer may raise. kcache then treats the layer as empty.
_SURVIVED = (BackendError, OSError, MemoryError)
#: Envelopes of entries under keys, read-only. Nothing is checked: the caller checks each envelope,
#: as for every entry. `keep` tells whether a kernel that is found is also stored in the user's own
#: cache.
ReadOnlyTier: TypeAlias = "DirectoryTier | Bundle"
#: What offers the entries of its members, in their order. Whoever asks goes on until an offer is of
#: use.
Tier: TypeAlias = "ReadOnlyTiers | DaemonClient"


class DirectoryTier:
    """The directory of a cache, with a backend of any kind, which is only read.

    Threads, fork: as the backends.

    Args:
        path: path of the directory.
        backends: the backends in it, opened for reading.
        keep: whether a kernel that is found here is also stored in the user's own cache.
    """

    def __init__(self, path: str, backends: Sequence[Backend], *, keep: bool = False) -> None:
        self.path = path
        self.keep = keep
        self._backends = backends

    def get(self, key: str) -> bytes | None:
        """Return the envelope stored under `key`, or None; raises BackendError."""
        found = (backend.get(key) for backend in self._backends)
        return next((envelope for envelope in found if envelope is not None), None)

    def close(self) -> None:
        """Close the backends."""
        for backend in self._backends:
            backend.close()


class ReadOnlyTiers:
    """Layers as one source, in the order in which they are asked.

    Threads, fork: as the layers.

    Args:
        layers: the layers.
        report: called with the exception of a layer that can't be read.
    """

    def __init__(
        self, layers: Sequence[ReadOnlyTier], report: Callable[[Exception], object]
    ) -> None:
        self._layers = layers
        self._report = report

    def offers(self, *keys: str) -> Iterator[Candidate]:
        """Yield what the layers have in turn, each under the first of the keys that it has."""
        for layer in self._layers:
            for key in keys:
                offer = self._offer(layer, key)
                if offer is not None:
                    yield offer
                    break

    def _offer(self, layer: ReadOnlyTier, key: str) -> Candidate | None:
        try:
            found = layer.get(key)
        except CorruptEntryError as error:
            return Candidate(key, b"", layer.keep, error)
        except _SURVIVED as error:
            self._report(error)
            return None
        return None if found is None else Candidate(key, found, layer.keep)

    def close(self) -> None:
        """Close the layers. Idempotent."""
        for layer in self._layers:
            with suppress(*_SURVIVED):
                layer.close()
