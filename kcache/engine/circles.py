"""Circles: finds threads that wait for each other, so that none would ever go on."""

from __future__ import annotations

__all__ = ["leaders", "leads_to", "waits_for"]

#: Which thread of this process makes which value: (lock file, key) -> thread.
leaders: dict[tuple[str, str], int] = {}
#: Which thread of this process waits for which other thread.
waits_for: dict[int, int] = {}


def leads_to(thread: int, me: int) -> bool:
    """Tell whether a thread waits for this one, directly or through others."""
    seen: set[int] = set()
    while thread not in seen:
        seen.add(thread)
        if thread == me:
            return True
        thread = waits_for.get(thread, thread)
    return False
