"""DirectoryTier: the directory of a cache that is only read, after the user's own cache."""

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

#: The exceptions that reading a tier may raise. If one is raised, kcache treats the tier as empty.
_BACKEND_ERRORS = (BackendError, OSError, MemoryError)
#: Returns the envelope that is stored under a key, which the caller checks. If `keep` is true, a
#: kernel that is found there is also stored in the user's own cache.
ReadOnlyTier: TypeAlias = "DirectoryTier | Bundle"
#: Returns what its members have under a key, in their order, as candidates. The caller uses the
#: first valid candidate.
Tier: TypeAlias = "ReadOnlyTiers | DaemonClient"


class DirectoryTier:
    """A cache's directory, opened only for reading; its backends may be of any kind.

    Threads and forks: the guarantees are those of the backends.

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
        """Return the envelope under `key` from the first backend that has the key, or None.

        Raises:
            BackendError: a backend can't be read.
        """
        found = (backend.get(key) for backend in self._backends)
        return next((envelope for envelope in found if envelope is not None), None)

    def close(self) -> None:
        """Close the backends."""
        for backend in self._backends:
            backend.close()


class ReadOnlyTiers:
    """Several read-only tiers, which are looked into in their order.

    Threads and forks: the guarantees are those of the tiers.

    Args:
        tiers: the tiers, in the order in which they are looked into.
        report: called with the exception if a tier can't be read.
    """

    def __init__(
        self, tiers: Sequence[ReadOnlyTier], report: Callable[[Exception], object]
    ) -> None:
        self._tiers = tiers
        self._report = report

    def offers(self, *keys: str) -> Iterator[Candidate]:
        """Yield a candidate from each tier that has one of `keys`, under the first key it has."""
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
