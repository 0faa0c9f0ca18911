"""Counts: what one remote has been asked, and what became of it."""

from __future__ import annotations

import threading

__all__ = ["COUNTS", "Counts"]

#: Name -> what is counted.
COUNTS = {
    "hits": "questions that the remote answered with a value that was good",
    "misses": "questions that it answered with nothing",
    "errors": "operations that failed",
    "timeouts": "operations that took too long",
    "refused": "operations that it refused: credentials, certificates",
    "skipped": "questions that it was not asked, since its breaker was open",
    "damaged": "values that were not what was stored under the key",
    "unsigned": "values without the signature that is asked for",
    "uploads": "values stored there",
    "dropped": "values not stored there: queue full, breaker open, failed",
    "bytes_in": "bytes of the values that came",
    "bytes_out": "bytes of the values that went",
}


class Counts:
    """Counts of one remote. Threads: safe to share."""

    def __init__(self, past: dict[str, int] | None = None) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0)
        for name, value in (past or {}).items():
            if name in COUNTS and 0 <= value < 1 << 53:
                self._counts[name] = value

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one."""
        with self._lock:
            self._counts[name] += amount

    def as_dict(self) -> dict[str, int]:
        """Return all of them as they are now."""
        with self._lock:
            return dict(self._counts)
