"""Layer: kernels that somebody else put on this machine, read below the user's own cache."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Layer"]


class Layer(Protocol):
    """Entries' envelopes under keys, only ever read.

    Threads: safe to share. Fork: a child may go on using it. A layer checks nothing: whoever asks
    checks the envelope, as that of every entry.
    """

    def get(self, key: str) -> bytes | None:
        """Return the envelope stored under `key`, or None.

        Raises:
            BackendError, OSError: it can't be read.
        """
        ...

    def close(self) -> None:
        """Let go of what is open. Idempotent."""
        ...
