"""Breaker: decides whether a remote is asked, or skipped for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["DOWN", "LACKING", "REFUSED", "Breaker"]

#: Causes of a failure: the remote does not answer as it should; it refuses this user; this machine
#: lacks what it needs for the remote (a package, a file of keys).
DOWN, REFUSED, LACKING = "down", "refused", "lacking"

#: This many failures in a row open the breaker. One failure may be a lost packet. Each costs a
#: program a time-out.
FAILURES = 3
#: Seconds until the remote is tried again. Each probe that fails doubles them, up to the larger
#: value. A restarted Redis is back within seconds.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
#: Least seconds until a program asks again while the breaker is open.
SOON = 0.05
#: Seconds until the remote is tried again after it has refused the user. Somebody has to change
#: something there first, and servers log each attempt.
REFUSED_PAUSE = 60.0
#: Seconds until kcache checks again whether this machine lacks something. The check asks no server:
#: a failed import takes less than a millisecond.
LACKING_PAUSE = 1.0
_PAUSES = {REFUSED: REFUSED_PAUSE, LACKING: LACKING_PAUSE}


class Breaker:
    """Counts failures of one remote. While it is open, nobody asks the remote.

    A closed breaker lets every question through. It opens after `FAILURES` failures in a row. It
    opens at once after a refusal, or if this machine lacks something that the remote needs. When
    its pause is over, one probe may be sent, for which nobody waits. If the probe succeeds, the
    breaker closes.

    Threads: safe to share. Lives in the agent, so all programs of a user share it.

    Args:
        slow: seconds; a miss that took longer counts as a failure.
        clock: monotonic seconds, for tests.
    """

    def __init__(self, slow: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._slow = slow
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._until: float | None = None
        self._probe_began: float | None = None
        self.reason = ""
        #: The cause of the last failure; empty after an answer.
        self.cause = ""

    @property
    def is_open(self) -> bool:
        """Whether the remote is skipped."""
        return self._until is not None

    def wait(self) -> float:
        """Return the seconds until it is worth asking again; 0.0 if it is closed.

        While a probe is under way, that is the time that it has taken so far. So a remote that is
        back is soon used, and one that never answers is asked only a few times.
        """
        until, began = self._until, self._probe_began
        if until is None:
            return 0.0
        now = self._clock()
        return max(SOON, until - now if began is None else now - began)

    def is_slow(self, seconds: float) -> bool:
        """Tell whether a miss that takes this long makes a remote useless."""
        return seconds > self._slow

    def succeeded(self, seconds: float, *, hit: bool) -> None:
        """Count an answer that took that many seconds."""
        if not hit and self.is_slow(seconds):
            self.failed(f"a miss took {seconds:.2f} s")
            return
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._failures = 0
        self._until = None
        self._pause = FIRST_PAUSE
        self.reason = ""
        self.cause = ""

    def failed(self, reason: str, cause: str = DOWN) -> None:
        """Count a failure, with the reason in words and one of the causes."""
        with self._lock:
            self._failures += 1
            self.reason, self.cause = reason, cause
            if cause != DOWN:
                self._until = self._clock() + _PAUSES[cause]
            elif self._until is not None:
                # Questions that were under way when the breaker opened say nothing new.
                self._until = max(self._until, self._clock() + self._pause / 2)
            elif self._failures >= FAILURES:
                self._until = self._clock() + self._pause

    def begin_probe(self) -> bool:
        """Tell whether this caller should send a probe now."""
        with self._lock:
            if self._until is None or self._probe_began is not None:
                return False
            now = self._clock()
            if now < self._until:
                return False
            self._probe_began = now
            return True

    def end_probe(self, failure: str, cause: str = DOWN) -> None:
        """Close it if `failure` is empty, otherwise leave it open for longer."""
        with self._lock:
            self._probe_began = None
            if not failure:
                self._close()
                return
            self.reason, self.cause = failure, cause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._until = self._clock() + _PAUSES.get(cause, self._pause)
