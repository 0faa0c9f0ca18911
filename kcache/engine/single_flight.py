"""SingleFlight: if many threads and processes miss the same key, one of them makes the value."""

from __future__ import annotations

import copy
import os
import threading
import time
import types
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kcache.directory import open_file_of_cache
from kcache.util import log
from kcache.util.forks import after_fork
from kcache.util.locks import lock, release
from kcache.util.open_file import OwnFile, has_header

if TYPE_CHECKING:
    from kcache.engine.stats import Counters

#: The limits of the pause in seconds between two attempts to acquire a lock that another process
#: holds. The pause is a twentieth of the time waited so far, within these limits. Sixteen waiting
#: processes then use 2 % of a core.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.025
#: If a process waits for many keys, the longest pause is this number of seconds for each of them.
#: 800 threads then use a tenth of a core instead of a whole core.
_PAUSE_EACH = 0.0005
#: While another process holds the lock, a waiting process looks for the value once in this many
#: seconds: the holder may be stopped, and a third process may have timed out and made the value.
_LOOK_INTERVAL = 1.0
#: The whole content of the lock file. The locked bytes come after it, where no data is stored.
_MARK = b"kcache-flight/2\0"


class SingleFlight:
    """Makes each value once, by one thread of one process, while the others wait for it.

    In a process, the threads wait for the turn of the thread that makes the value. Between
    processes, the waiting process waits for a lock on the key (`_try_lock`), and looks for the
    value again when it has acquired the lock. If the wait takes longer than `wait` seconds, one of
    the waiting processes acquires the fallback lock and makes the value, and the others wait for
    the fallback lock, again up to `wait` seconds. After that, each makes the value itself. If the
    file system has no locks, every process makes the value at once, which is counted as `unlocked`.

    If making the value raises an exception, each waiting thread of the process raises a copy of the
    exception, and the next caller tries again. If the thread that makes the value is interrupted,
    or its process is killed, one of those that wait makes the value.

    Threads: may be used by several threads at the same time, but not in signal handlers. If the
    code that makes a value requests the same key in the same thread, the nested request makes the
    value, too. Processes: the lock file lets only one process make a value. Crash: the kernel
    releases the locks of a killed process. Fork: a forked child starts without turns and locks.

    Args:
        path: the path of the lock file. With None, only the threads of this process share the work.
        wait: how many seconds to wait, at least 0.
        counters: counts `coalesced`, `wait_timeouts` and `unlocked`, and a miss for each request
            that raises a copy of another thread's exception.
    """

    def __init__(self, path: str | None, *, wait: float, counters: Counters) -> None:
        self._path = path
        self._wait = wait
        self._count = counters.add
        self.after_fork()
        after_fork(self)

    def after_fork(self) -> None:
        """Start without turns and with a free lock; also called in the child after a fork."""
        self._lock = threading.Lock()
        self._leaders: dict[str, Turn] = {}

    @contextmanager
    def lead(self, key: str, *, scope: str = "", shares_old_errors: bool = True) -> Generator[Turn]:
        """Return a context manager that yields the turn of this thread for `key`.

        At its end, the `with` block releases the lock on the key and wakes the threads of this
        process that wait for the turn.

        Args:
            key: the key of the value, 64 hexadecimal digits.
            scope: if another turn ends with an exception, this turn raises a copy of it only if
                both have the same scope.
            shares_old_errors: whether this turn also raises a copy if the other turn began to make
                the value before this turn was created.
        """
        turn = Turn(self, key, scope, shares_old_errors)
        try:
            yield turn
            turn._has_made = turn._leads
            if turn._waited and not turn._leads:
                self._count("coalesced")
        except Exception as error:
            turn._error = error
            raise
        finally:
            try:
                if turn._held is not None:
                    release(turn._held)
            finally:
                with self._lock:
                    if self._leaders.get(key) is turn:
                        del self._leaders[key]
                turn._ended.set()

    def _time_out(self, key: str) -> None:
        self._count("wait_timeouts")
        log.info(
            "another compile of %s has not ended after %.0f s; it is compiled here, too",
            key,
            self._wait,
        )

    def _try_lock(self, key: str, *, is_fallback: bool) -> tuple[OwnFile | None, bool]:
        """Try to lock `key`; return the lock file if it is locked now, and whether `key` is free.

        `key` is free if no other process or thread has locked it. Without a lock file, or on a file
        system without locks, each key is free, and None is returned for the file.

        The lock is on one byte of the lock file, so that no file is needed for each key. The offset
        of the byte is 62 bits of the key; two keys share a byte with a probability of 2**-62.

        The lock file is opened again for each lock. If the file is removed or replaced, two
        processes may have locks in different files and both make the value, which only takes time.
        """
        if self._path is None:
            return None, True
        offset = len(_MARK) + (int(key[:16], 16) >> 2 ^ is_fallback << 61)
        try:
            file = open_file_of_cache(self._path, os.O_RDWR, lambda file: has_header(file, _MARK))
            try:
                if lock(file, offset):
                    return file, True
            except BaseException:  # the exception's traceback could keep the file open and locked
                release(file)
                raise
            reason = "this file system has no locks"
        except TimeoutError:
            return None, False
        except OSError as error:
            reason = str(error)
        self._count("unlocked")
        log.warning_once(
            "there are no locks between processes, so several may compile the same kernel at the "
            f"same time ({reason})"
        )
        return None, True


class Turn:
    """One request for a key: its thread makes the value, or waits until another thread has made it.

    In the block of `SingleFlight.lead`, iterate over the turn, and look for the value at each step,
    because the value may exist by then. A step yields the result of another thread that has just
    ended its turn, or None. If the value is not found at any step, make it after the loop, and set
    `result`.

    Attributes:
        result: the value for the waiting threads; None if they have to make the value themselves.

    Raises:
        Exception: during a step, a copy of the exception with which another thread's turn ended.
    """

    def __init__(self, flight: SingleFlight, key: str, scope: str, shares_old_errors: bool) -> None:
        self.result: Any = None
        self._flight = flight
        self._key = key
        self._scope = scope
        self._shares_old_errors = shares_old_errors
        self._thread = threading.get_ident()
        self._asked = time.monotonic()
        #: When this thread began to make the value or, after a timeout, to wait for the fallback
        #: lock; 0 before that.
        self._began = 0.0
        self._leads = self._waited = False
        self._held: OwnFile | None = None
        #: Set at the end of the `with` block, when `_error` and `_has_made` are final.
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._has_made = False

    def __iter__(self) -> Iterator[Any]:
        flight, key = self._flight, self._key
        while True:
            with flight._lock:
                leader = flight._leaders.setdefault(key, self)
            if leader is self:
                yield from self._wait_for_lock()
                break
            if leader._thread == self._thread:  # a nested request by the code that makes the value
                break
            self._waited = True
            if not leader._ends_in_time(self._asked):
                with flight._lock:
                    if flight._leaders.get(key) is leader:  # otherwise another turn replaced it
                        flight._leaders[key] = self
                        self._began = time.monotonic()
                if self._began:
                    flight._time_out(key)
            elif leader._error is None:
                yield leader.result
                if leader._has_made and leader.result is None:
                    break
            elif leader._scope == self._scope and (
                self._shares_old_errors or leader._began >= self._asked
            ):
                flight._count("misses")
                raise copied(leader._error) from leader._error.__cause__
        self._leads, self._began = True, time.monotonic()

    def _ends_in_time(self, asked: float) -> bool:
        """Wait until this turn ends; return whether it has ended in time.

        This is called by another thread, whose turn was created at `asked`. The result is False in
        two cases: this turn has been making the value for longer than `wait` seconds, not counting
        the time before `asked`; or it is still waiting for another process `2 * wait` seconds after
        `asked`.
        """
        wait = self._flight._wait
        while True:
            since = max(asked, self._began) if self._began else asked + wait
            left = since + wait - time.monotonic()
            if self._ended.wait(max(0.0, min(_LOOK_INTERVAL, left))):
                return True
            if left <= 0:
                return False

    def _wait_for_lock(self) -> Iterator[None]:
        """Yield when the lock on the key is acquired, and once in a while before that.

        If another process holds the lock for longer than `wait` seconds, this waits for the
        fallback lock. After another timeout, this returns without a lock. A turn that has replaced
        another thread's turn after a timeout waits for the fallback lock alone.
        """
        flight = self._flight
        for is_fallback in (True,) if self._began else (False, True):
            began = looked = now = time.monotonic()
            while True:
                self._held, is_free = flight._try_lock(self._key, is_fallback=is_fallback)
                self._waited |= not is_free
                if is_free or now >= looked + _LOOK_INTERVAL:
                    looked = now
                    yield
                    if is_free:
                        return
                if now >= began + flight._wait:
                    break
                longest = max(_LONGEST_PAUSE, _PAUSE_EACH * len(flight._leaders))
                time.sleep(min(max(_FIRST_PAUSE, (now - began) / 20), longest))
                now = time.monotonic()
            if not is_fallback:
                self._began = now  # from now on, other threads measure their waits from here
                flight._time_out(self._key)


def copied(error: Exception) -> Exception:
    """Return a copy of `error` that another thread can raise, so that each has its own traceback.

    If the exception can't be copied, return `error` itself.
    """
    kind = type(error)
    try:
        if isinstance(kind.__init__, types.FunctionType):  # `args` may lack arguments of `__init__`
            made = kind.__new__(kind, *error.args)
            made.args = error.args
            made.__dict__.update(error.__dict__)
        else:
            made = copy.copy(error)
    except Exception:  # copying an exception class of the program may raise any exception
        return error
    made.__cause__ = error.__cause__
    return made
