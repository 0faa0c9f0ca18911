"""Limits: a circuit breaker for the failures of a remote, and a limit for the time of a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kcache.remote.storage import RemoteError, RemoteTimeout

_T = TypeVar("_T")

#: This many failures in a row open the breaker. A single failure may be a lost packet. Each costs
#: a program a time-out.
FAILURES = 3
#: Seconds from the opening to the first trial. Each trial that fails doubles them, up to the larger
#: value. A restarted Redis is back within seconds.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
#: Least seconds until a program asks again while the breaker is open.
SOON = 0.05


class Breaker:
    """A circuit breaker: open after `FAILURES` failures in a row, until an operation succeeds.

    While it is open, one trial may be made after each pause.

    Threads: safe to share.

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
        """Whether operations are to be left out."""
        return self._failures >= FAILURES

    @property
    def wait(self) -> float:
        """The seconds until it is worth asking again; 0.0 if it is closed."""
        return max(SOON, self._until - self._clock()) if self.is_open else 0.0

    def try_again(self) -> bool:
        """Return whether the caller makes the trial now. It then calls `succeeded` or `failed`."""
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
        """Count a failure. A minor one (a slow answer) has no reason until the breaker is open."""
        with self._lock:
            self._failures += 1
            self._trying = False
            self.reason = "" if minor and not self.is_open else reason
            now = self._clock()
            # Operations that were under way when it opened do not lengthen the pause.
            if self.is_open and now >= self._until:
                self._until = now + self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE)


class TimeLimit:
    """Calls functions, each in a thread of its own, and waits for them for a limited time.

    A client of a protocol limits each wait for bytes. Nothing else limits a server that sends one
    byte a second, a name server that does not answer, and a client with a defect.

    Threads: safe to share. A call that takes longer continues in its thread; its result is dropped.
    """

    def __init__(self) -> None:
        self._late: list[threading.Thread] = []

    @property
    def is_late(self) -> bool:
        """Whether a call that exceeded its limit still runs."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        return bool(self._late)

    def call(self, seconds: float, work: Callable[[], _T]) -> _T:
        """Return the result of `work`.

        Raises:
            RemoteTimeout: it takes longer than `seconds`.
            RemoteError: it raised something that is not an Exception.
            RuntimeError: the machine has no more threads.
            Exception: whatever `work` raises.
        """
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # a panic of Rust is not an Exception
                future.set_exception(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if not future.done():
            self._late.append(thread)
            raise RemoteTimeout(f"no answer within {seconds:g} s")
        error = future.exception()
        if error is None or isinstance(error, Exception):
            return future.result()
        raise RemoteError(repr(error)) from error
