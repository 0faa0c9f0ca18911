"""JobThreads: threads that run jobs. A job that would have to wait goes to the end of the queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, thread
from typing import Any, TypeVar

from kcache.engine.single_flight import Busy
from kcache.nvrtc.workers.cores import usable_cores

__all__ = ["JobThreads", "usable_cores"]

T = TypeVar("T")

#: Seconds between two tries of all jobs that were put aside: a twentieth of the time that a job has
#: waited, within these limits.
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.025


class JobThreads:
    """Threads that carry out jobs in order, except that a busy one goes to the end of the queue.

    So processes that get the same list of kernels at the same time compile different ones, instead
    of all waiting for the first.

    Threads: safe to share. Fork: do not use it in a child.

    Args:
        count: how many threads, at least 1.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="kcache")
        self._lock = threading.Lock()
        #: How many jobs have not begun, and how many were put aside.
        self._fresh = self._aside = 0
        self._cancelled = False

    def submit(self, job: Callable[[Busy | None], T | Busy]) -> Future[T]:
        """Call `job` in a thread until it returns something other than a `Busy`; return its future.

        It gets the `Busy` that it returned before, at first None. Nobody can cancel the future.

        Raises:
            RuntimeError: closed, or no thread can be started.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._fresh += 1
        try:
            self._pool.submit(self._begin, job, future)
        except BaseException:
            with self._lock:
                self._fresh -= 1
            raise
        return future

    def close(self, *, cancel: bool = False) -> None:
        """Take no more jobs, and let the threads end after the present jobs.

        With `cancel`, and when the interpreter ends, jobs that were not begun, or put aside, raise
        CancelledError. Idempotent.
        """
        self._cancelled |= cancel
        self._pool.shutdown(wait=False)

    def _begin(self, job: Callable[[Busy | None], Any], future: Future[Any]) -> None:
        with self._lock:
            self._fresh -= 1
        busy = self._try(job, future, None)
        if busy is not None:
            self._put_aside(job, future, busy)

    def _put_aside(
        self, job: Callable[[Busy | None], Any], future: Future[Any], busy: Busy
    ) -> None:
        with self._lock:
            self._aside += 1
        try:
            self._pool.submit(self._again, job, future, busy)
        except RuntimeError:  # closed, or the interpreter is ending: there will be no other job
            with self._lock:
                self._aside -= 1
            again: Busy | None = busy
            while again is not None:
                time.sleep(_LONGEST_PAUSE)
                again = self._try(job, future, again)

    def _again(self, job: Callable[[Busy | None], Any], future: Future[Any], busy: Busy) -> None:
        with self._lock:
            idle, aside = not self._fresh, self._aside
        if idle and not self._over:
            waited = time.monotonic() - busy.since
            time.sleep(min(max(_FIRST_PAUSE, waited / 20), _LONGEST_PAUSE) / aside)
        with self._lock:
            self._aside -= 1
        again = self._try(job, future, busy)
        if again is not None:
            self._put_aside(job, future, again)

    def _try(
        self, job: Callable[[Busy | None], Any], future: Future[Any], busy: Busy | None
    ) -> Busy | None:
        """Call a job, unless this object is closed; return None if its future is settled now."""
        if self._over:
            future.set_exception(CancelledError("the workers were closed"))
            return None
        try:
            result = job(busy)
        except BaseException as error:  # the thread that waits for the future gets this exception
            future.set_exception(error)
            return None
        if isinstance(result, Busy):
            return result
        future.set_result(result)
        return None

    @property
    def _over(self) -> bool:
        # At its end, the interpreter joins the pool's threads, and these first finish the whole
        # queue.
        return self._cancelled or getattr(thread, "_shutdown", False)
