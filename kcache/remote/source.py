"""Source: something outside of the cache that may have kernels: the agent with its remotes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kcache.errors import CorruptEntryError

__all__ = ["Offer", "Source"]


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
