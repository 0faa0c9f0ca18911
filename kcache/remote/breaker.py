"""Breaker: decides whether a remote is asked, or left alone for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Breaker"]

#: So many failures in a row open it: one may be a lost packet. Each costs a program a time-out.
FAILURES = 3
#: Seconds until it is tried again, doubled by each failure up to the larger one. A restarted Redis
#: is back within seconds.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
#: Seconds until it is tried again after the remote has refused the user: credentials change seldom.
REFUSED_PAUSE = 300.0


class Breaker:
    """Counts failures of one remote; open means that nobody asks it.

    Closed, it lets every question through. It opens after `FAILURES` in a row. When its pause is
    over, one probe may be sent, which nobody waits for: its success closes the breaker.

    Threads: safe to share. Lives in the agent, so all programs of a user share it.

    Args:
        slow: a miss that took longer, in seconds, counts as a failure.
        clock: monotonic seconds, for tests.
    """

    def __init__(self, slow: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._slow = slow
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._until: float | None = None
        self._probing = False
        self.reason = ""

    @property
    def is_open(self) -> bool:
        """Whether the remote is left alone."""
        return self._until is not None

    def wait(self) -> float:
        """Return the seconds until it may close; 0.0 if it is closed."""
        until = self._until
        return 0.0 if until is None else max(0.05, until - self._clock())

    def is_slow(self, seconds: float) -> bool:
        """Tell whether a miss that takes so long makes a remote useless."""
        return seconds > self._slow

    def succeeded(self, seconds: float, *, hit: bool) -> None:
        """Count an answer that took so long."""
        if not hit and self.is_slow(seconds):
            self.failed(f"a miss took {seconds:.2f} s")
            return
        with self._lock:
            self._failures = 0
            self._until = None
            self._pause = FIRST_PAUSE
            self.reason = ""

    def failed(self, reason: str, *, refused: bool = False) -> None:
        """Count a failure."""
        with self._lock:
            self._failures += 1
            self.reason = reason
            if refused:
                self._until = self._clock() + REFUSED_PAUSE
            elif self._until is not None:
                # Questions that were under way when it opened say nothing new.
                self._until = max(self._until, self._clock() + self._pause / 2)
            elif self._failures >= FAILURES:
                self._until = self._clock() + self._pause

    def begin_probe(self) -> bool:
        """Tell whether the caller is the one who is to send a probe now."""
        with self._lock:
            due = self._until is not None and self._clock() >= self._until and not self._probing
            self._probing |= due
            return due

    def end_probe(self, failure: str, *, refused: bool = False) -> None:
        """Close it if `failure` is empty, else leave it open for longer."""
        with self._lock:
            self._probing = False
            if not failure:
                self._failures = 0
                self._until = None
                self._pause = FIRST_PAUSE
                self.reason = ""
                return
            self.reason = failure
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._until = self._clock() + (REFUSED_PAUSE if refused else self._pause)
