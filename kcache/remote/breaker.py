"""Breaker: decides whether a remote is asked, or left alone for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["FAILURES", "FIRST_PAUSE", "LONGEST_PAUSE", "SOON", "Breaker"]

#: This many failures in a row open the breaker. One failure may be a lost packet. Each costs a
#: program a time-out.
FAILURES = 3
#: Seconds until the remote is tried again. Each trial that fails doubles them, up to the larger
#: value. A restarted Redis is back within seconds.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
#: Least seconds until a program asks again while the breaker is open.
SOON = 0.05


class Breaker:
    """Counts failures in a row. After `FAILURES` of them it is open until something succeeds.

    While it is open, one trial may be made after each pause.

    Threads: safe to share. Lives in the agent, so all programs with its settings share it.

    Args:
        clock: monotonic seconds, for tests.

    Attributes:
        reason: why the last operation failed; empty after one that succeeded.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._until = 0.0
        self._trying = False
        self.reason = ""

    @property
    def is_open(self) -> bool:
        """Whether nobody should ask."""
        return self._failures >= FAILURES

    @property
    def wait(self) -> float:
        """The seconds until it is worth asking again; 0.0 if it is closed."""
        return max(SOON, self._until - self._clock()) if self.is_open else 0.0

    def try_again(self) -> bool:
        """Tell whether this caller should try now; the caller then reports how that ended."""
        with self._lock:
            if not self.is_open or self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def succeeded(self) -> None:
        """Close it."""
        with self._lock:
            self._failures = 0
            self._pause = FIRST_PAUSE
            self._trying = False
            self.reason = ""

    def failed(self, reason: str, *, minor: bool = False) -> None:
        """Count a failure, with the reason in words.

        A minor one (a slow answer) is no reason to warn anybody until there are enough in a row.
        """
        with self._lock:
            self._failures += 1
            self._trying = False
            self.reason = "" if minor and not self.is_open else reason
            now = self._clock()
            # Operations that were under way when it opened say nothing new.
            if self.is_open and now >= self._until:
                self._until = now + self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
