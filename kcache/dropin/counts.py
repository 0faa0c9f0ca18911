"""Counts: what a server has done for the programs that it serves."""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

__all__ = ["Counts", "summary"]

#: Programs and reasons that are told apart; there may be thousands of the first.
_MOST = 256


class Counts:
    """Counts answers, and who asked.

    Threads: safe to share. Lives in memory alone: ends with its process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._handed: Counter[str] = Counter()
        self._saved = 0.0
        self._programs: dict[int, str] = {}

    def answered(self, *, hit: bool, failed: bool, saved: float = 0.0) -> None:
        """Count an answer; `saved` is how many seconds of compiling a hit spared."""
        with self._lock:
            self._counts["failed" if failed else "hits" if hit else "misses"] += 1
            self._saved += saved

    def handed(self, reason: str) -> None:
        """Count what a program left to the real NVRTC, or was told to."""
        with self._lock:
            if reason in self._handed or len(self._handed) < _MOST:
                self._handed[reason] += 1
            self._counts["handed_over"] += 1

    def asked(self, process: int) -> None:
        """Remember that a process asked."""
        if process in self._programs:
            return
        name = _name_of(process)
        with self._lock:
            if len(self._programs) < _MOST:
                self._programs[process] = name
            self._counts["programs"] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        with self._lock:
            return {
                **{
                    name: self._counts[name]
                    for name in ("hits", "misses", "failed", "handed_over", "programs")
                },
                "saved_seconds": round(self._saved, 3),
                "reasons": dict(self._handed),
                "names": dict(Counter(self._programs.values())),
            }


def _name_of(process: int) -> str:
    try:
        with open(f"/proc/{process}/comm", "rb") as file:
            return os.fsdecode(file.read()).strip()
    except OSError:
        return "unknown"


def summary(counts: dict[str, Any]) -> str:
    """Return one line about what a server did."""
    who = ", ".join(
        name if number == 1 else f"{number} x {name}" for name, number in counts["names"].items()
    )
    reasons = ", ".join(f"{name}: {number}" for name, number in counts["reasons"].items())
    parts = [
        f"hits {counts['hits']}",
        f"misses {counts['misses']}",
        f"refused sources {counts['failed']}",
        f"left to NVRTC {counts['handed_over']}" + (f" ({reasons})" if reasons else ""),
        f"saved {counts['saved_seconds']:.1f} s",
        f"programs: {who or 'none used NVRTC'}",
    ]
    return "; ".join(parts)
