"""Counts: the questions to one remote, and their results."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

__all__ = ["COUNTS", "Counts", "save_counts", "saved_counts"]

#: Name -> what is counted.
COUNTS = {
    "hits": "questions that the remote answered with a value that was good",
    "misses": "questions that it answered with nothing, or with a value longer than `max_entry`",
    "errors": "operations that failed",
    "timeouts": "operations that took too long",
    "refused": "operations that it refused: credentials, certificates",
    "skipped": "questions that it was not asked, since its breaker was open",
    "damaged": "values that were not what was stored under the key",
    "unsigned": "values without the signature that is asked for",
    "uploads": "values stored there",
    "dropped": "values not stored there: too long, queue full, breaker open, failed",
    "bytes_in": "bytes of the values that came",
    "bytes_out": "bytes of the values that went",
}


class Counts:
    """Counts of one remote. Threads: safe to share."""

    def __init__(self, past: Mapping[str, object] | None = None) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0)
        for name, value in (past or {}).items():
            if name in COUNTS and isinstance(value, int) and 0 <= value < 1 << 53:
                self._counts[name] = value

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one count."""
        with self._lock:
            self._counts[name] += amount

    def as_dict(self) -> dict[str, int]:
        """Return all counts as they are now."""
        with self._lock:
            return dict(self._counts)


def save_counts(path: str, tiers: Sequence[Mapping[str, object]]) -> None:
    """Write the counts of an agent's remotes beside its socket; a failure only loses counts."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with suppress(OSError):
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(list(tiers), file)
        os.replace(temporary, f"{path}.counts")


def saved_counts(path: str) -> dict[str, dict[str, Any]]:
    """Return the counts of each remote, by its address, from the last agent at a socket's path."""
    try:
        with open(f"{path}.counts", encoding="utf-8") as file:
            found: object = json.load(file)
    except (OSError, ValueError):
        return {}
    tiers = cast("list[object]", found) if isinstance(found, list) else []
    told = [cast("dict[str, Any]", each) for each in tiers if isinstance(each, dict)]
    return {str(each.get("address", "")): each for each in told}
