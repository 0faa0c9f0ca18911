"""Limits: for how long a call of a remote may take, and whether a failed remote is asked at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kcache.remote.remote_client import RemoteError, RemoteTimeout

__all__ = ["FAILURES", "FIRST_PAUSE", "LONGEST_PAUSE", "SOON", "Breaker", "TimeLimit"]

_T = TypeVar("_T")
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

    Threads: safe to share. Lives in the service, so all programs with its settings share it.

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


class TimeLimit:
    """Calls functions, each in a thread of its own, and waits for them as long as is allowed.

    A client of a protocol limits each wait for bytes. A server that sends a byte a second, a name
    server that does not answer, and a client with a defect have no such limit.

    Threads: safe to share. A call that takes longer goes on in its thread; its result is dropped.
    """

    def __init__(self) -> None:
        self._late: list[threading.Thread] = []

    @property
    def is_late(self) -> bool:
        """Whether a call that took too long still runs."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        return bool(self._late)

    def call(self, seconds: float, work: Callable[[], _T]) -> _T:
        """Return the result of `work`.

        Raises:
            RemoteTimeout: it takes longer than `seconds`.
            RemoteError: it has raised something that is no Exception.
            RuntimeError: the machine has no more threads.
            Exception: whatever `work` raises.
        """
        results: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:  # a panic of Rust is no Exception
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if errors and isinstance(errors[0], Exception):
            raise errors[0]
        if errors:
            raise RemoteError(repr(errors[0])) from errors[0]
        if results:
            return results[0]
        self._late.append(thread)
        raise RemoteTimeout(f"no answer within {seconds:g} s")
