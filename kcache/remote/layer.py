"""Layer: a cache that somebody else put on this machine; it is asked after the user's own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kcache.errors import BackendError, CorruptEntryError

if TYPE_CHECKING:
    from kcache.backend import Backend

__all__ = ["DirectoryLayer", "Layer", "Layers", "Offer", "Source"]

#: The exceptions that reading a layer may raise. kcache then treats the layer as empty.
_SURVIVED = (BackendError, OSError, MemoryError)


class Offer(NamedTuple):
    """A value that a source has, which nobody has checked.

    Attributes:
        key: the key that it has it under.
        envelope: the value.
        keep: whether it is stored in the user's own cache if it is used.
        problem: why the value is not to be used; None if the source knows nothing against it.
    """

    key: str
    envelope: bytes
    keep: bool
    problem: CorruptEntryError | None = None


class Source(Protocol):
    """Offers of the members of a source, in their order. Threads: safe to share."""

    def offers(self, *keys: str) -> Iterator[Offer]:
        """Yield the offer of each member: its value under the first of the keys that it has.

        Whoever asks goes on until an offer is of use.

        Raises:
            Exception: at the end, if a member did not answer.
        """
        ...

    def close(self) -> None:
        """Close what is open. Idempotent."""
        ...


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


class Layers:
    """Layers as one source, in the order in which they are asked.

    Threads, fork: as the layers.

    Args:
        layers: the layers.
        report: called with the exception of a layer that can't be read.
    """

    def __init__(self, layers: Sequence[Layer], report: Callable[[Exception], object]) -> None:
        self._layers = layers
        self._report = report

    def offers(self, *keys: str) -> Iterator[Offer]:
        """Yield what the layers have in turn, each under the first of the keys that it has."""
        for layer in self._layers:
            for key in keys:
                offer = self._offer(layer, key)
                if offer is not None:
                    yield offer
                    break

    def _offer(self, layer: Layer, key: str) -> Offer | None:
        try:
            found = layer.get(key)
        except CorruptEntryError as error:
            return Offer(key, b"", layer.keep, error)
        except _SURVIVED as error:
            self._report(error)
            return None
        return None if found is None else Offer(key, found, layer.keep)

    def close(self) -> None:
        """Close the layers. Idempotent."""
        for layer in self._layers:
            with suppress(*_SURVIVED):
                layer.close()
