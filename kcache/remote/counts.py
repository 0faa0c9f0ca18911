"""Counts: the questions to one remote, and their results."""

from __future__ import annotations

import threading

__all__ = ["COUNTS", "Counts"]

#: Name -> what is counted.
COUNTS = {
    "hits": "questions that the remote answered with a value that was good",
    "misses": "questions that it answered with nothing, or with a value longer than `max_entry`",
    "errors": "operations that failed",
    "timeouts": "operations that took too long",
    "skipped": "questions that it was not asked, since it had failed",
    "damaged": "values that were not what was stored under the key",
    "unsigned": "values without the signature that is asked for",
    "uploads": "values stored there",
    "dropped": "values not stored there: too long, queue full, or the remote had failed",
    "bytes_in": "bytes of the values that came",
    "bytes_out": "bytes of the values that went",
}


class Counts:
    """Counts of one remote, in memory. Threads: safe to share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one count."""
        with self._lock:
            self._counts[name] += amount

    def as_dict(self) -> dict[str, int]:
        """Return all counts as they are now."""
        with self._lock:
            return dict(self._counts)
