"""Counts: what a server has done for the programs that it serves."""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

__all__ = ["REMOTE_COUNTS", "Counts", "since", "summary"]

#: The counts of the cache that the summary tells.
REMOTE_COUNTS = ("remote_hits", "remote_misses", "remote_errors")

#: Most names of programs, and most reasons, that are counted one by one.
_MOST = 256
#: Most processes that are remembered. One that asks again after this many others counts twice.
_MOST_PROCESSES = 1 << 14


class Counts:
    """Counts answers and the processes that asked.

    Threads: safe to share. The counts are in memory only, and end with the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._handed: Counter[str] = Counter()
        self._saved = 0.0
        self._processes: dict[int, None] = {}
        self._names: Counter[str] = Counter()

    def answered(self, *, hit: bool, failed: bool, saved: float = 0.0) -> None:
        """Count an answer; `saved` is the compile time in seconds that a hit saved."""
        with self._lock:
            self._counts["failed" if failed else "hits" if hit else "misses"] += 1
            self._saved += saved

    def handed(self, reason: str) -> None:
        """Count a compile that the program, or this server, left to the real NVRTC."""
        with self._lock:
            if reason in self._handed or len(self._handed) < _MOST:
                self._handed[reason] += 1
            self._counts["handed_over"] += 1

    def asked(self, process: int) -> None:
        """Remember that a process asked, and count it the first time."""
        with self._lock:
            if process in self._processes:
                return
            if len(self._processes) >= _MOST_PROCESSES:
                del self._processes[next(iter(self._processes))]
            self._processes[process] = None
            self._counts["programs"] += 1
        name = _name_of(process)
        with self._lock:
            self._names[name if name in self._names or len(self._names) < _MOST else "others"] += 1

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
                "names": dict(self._names),
            }


def _name_of(process: int) -> str:
    try:
        with open(f"/proc/{process}/comm", "rb") as file:
            return os.fsdecode(file.read()).strip()
    except OSError:
        return "unknown"


def since(before: dict[str, Any], counts: dict[str, Any]) -> dict[str, Any]:
    """Return what was counted after `before`; both are in the form of `Counts.as_dict`."""
    told = {name: counts[name] - before[name] for name in counts.keys() - {"reasons", "names"}}
    return {**told, **{name: _more(before[name], counts[name]) for name in ("reasons", "names")}}


def _more(before: dict[str, int], counts: dict[str, int]) -> dict[str, int]:
    more = {name: number - before.get(name, 0) for name, number in counts.items()}
    return {name: number for name, number in more.items() if number > 0}


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
    hits, misses, errors = (counts.get(name, 0) for name in REMOTE_COUNTS)
    if hits or misses or errors:
        parts.append(f"remotes: hits {hits}, misses {misses}, without an answer {errors}")
    return "; ".join(parts)
