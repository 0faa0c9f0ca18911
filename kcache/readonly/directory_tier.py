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

#: The exceptions that reading a tier may raise. Then kcache treats the tier as empty.
_BACKEND_ERRORS = (BackendError, OSError, MemoryError)
#: Envelopes of entries under keys, read-only. The caller checks each envelope. With `keep`, a
#: kernel that is found is also stored in the user's own cache.
ReadOnlyTier: TypeAlias = "DirectoryTier | Bundle"
#: Offers the entries of its members in their order, as candidates. The caller uses the first sound
#: one.
Tier: TypeAlias = "ReadOnlyTiers | DaemonClient"


class DirectoryTier:
    """A cache's directory, opened only for reading; its backends may be of any kind.

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
    """Several read-only tiers as one, in the order in which they are asked.

    Threads, fork: as the tiers.

    Args:
        tiers: the tiers, in this order.
        report: called with the exception of a tier that can't be read.
    """

    def __init__(
        self, tiers: Sequence[ReadOnlyTier], report: Callable[[Exception], object]
    ) -> None:
        self._tiers = tiers
        self._report = report

    def offers(self, *keys: str) -> Iterator[Candidate]:
        """Yield what each tier has, in order, under the first of the keys that it has."""
        for tier in self._tiers:
            for key in keys:
                candidate = self._candidate(tier, key)
                if candidate is not None:
                    yield candidate
                    break

    def _candidate(self, tier: ReadOnlyTier, key: str) -> Candidate | None:
        try:
            found = tier.get(key)
        except CorruptEntryError as error:
            return Candidate(key, b"", tier.keep, error)
        except _BACKEND_ERRORS as error:
            self._report(error)
            return None
        return None if found is None else Candidate(key, found, tier.keep)

    def close(self) -> None:
        """Close the tiers. Idempotent."""
        for tier in self._tiers:
            with suppress(*_BACKEND_ERRORS):
                tier.close()
