"""SingleFlight: if many threads and processes miss one key, one of them makes the value."""

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

#: Seconds between two attempts to acquire another process's lock: a twentieth of the time waited so
#: far, within these limits. Sixteen waiting processes then take 2 % of a core.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.025
#: The longest pause is this for each key that the process waits for, if that is more: 800 threads
#: then take a tenth of a core instead of a whole one.
_PAUSE_EACH = 0.0005
#: After this many seconds, a waiting process checks whether the value is there although the lock is
#: held. The holder may be stopped, and another process may have timed out and made the value.
_LOOK_INTERVAL = 1.0
#: The whole content of the lock file. The locks are on bytes after it, where no data is stored.
_MARK = b"kcache-flight/2\0"


class SingleFlight:
    """Makes each value once, by one thread of one process, while the others wait for it.

    The threads of a process wait for the turn of the thread that makes the value. Processes wait
    for a lock on the key (`_try_lock`), and look for the value again when they have acquired it. A
    wait ends after `wait` seconds. Then one of the waiters acquires the fallback lock and makes the
    value, and the others wait for it, again up to `wait` seconds. After that, each makes the value
    itself. Without working locks, every process makes the value at once, counted as `unlocked`.

    If making the value raises an exception, each waiting thread raises a copy of it, and the next
    caller tries again. If the thread that makes the value is interrupted, or its process is killed,
    one of the waiters makes the value.

    Threads: safe to share, but not in signal handlers. A nested call for the same key in one thread
    makes the value again. Processes: by the lock file. Crash: the kernel releases the lock of a
    killed process. Fork: the child starts without turns and locks.

    Args:
        path: of the lock file; None if only threads exclude each other.
        wait: seconds, at least 0.
        counters: gets `coalesced`, `wait_timeouts` and `unlocked`, and a miss for each error of
            another thread's turn.
    """

    def __init__(self, path: str | None, *, wait: float, counters: Counters) -> None:
        self._path = path
        self._wait = wait
        self._count = counters.add
        self.after_fork()
        after_fork(self)

    def after_fork(self) -> None:
        """Begin without turns, also in a child process."""
        self._lock = threading.Lock()
        self._leaders: dict[str, Turn] = {}

    @contextmanager
    def lead(self, key: str, *, scope: str = "", shares_old_errors: bool = True) -> Generator[Turn]:
        """Return the turn of this thread for a key.

        The end of the block releases the lock, and wakes the threads of this process that wait.

        Args:
            key: of the value, 64 hexadecimal digits.
            scope: only threads with the same scope share an error.
            shares_old_errors: whether this turn raises the error of a turn that began to make the
                value before this one was created.
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
        log.info("waited %.0f s for another compile of %s; compiling it here, too", self._wait, key)

    def _try_lock(self, key: str, *, is_fallback: bool) -> tuple[OwnFile | None, bool]:
        """Try to lock a key; return the file if that succeeded, and whether the key is free.

        Without a lock file or working locks, every key is free.

        The lock is on one byte of the lock file. Its offset is 62 bits of the key, so that no file
        is made per key; two keys have the same byte with a probability of 2**-62.

        The file is opened anew for each lock. If it is removed or replaced, two processes may hold
        locks in two files and both make the value, which only costs time.
        """
        if self._path is None:
            return None, True
        offset = len(_MARK) + (int(key[:16], 16) >> 2 ^ is_fallback << 61)
        try:
            file = open_file_of_cache(self._path, os.O_RDWR, lambda file: has_header(file, _MARK))
            try:
                if lock(file, offset):
                    return file, True
            except BaseException:  # the traceback of an interrupt may keep the file, and its lock
                release(file)
                raise
            reason = "this file system has no locks"
        except TimeoutError:
            return None, False
        except OSError as error:
            reason = str(error)
        self._count("unlocked")
        log.warning_once(f"no lock between processes; each compiles for itself ({reason})")
        return None, True


class Turn:
    """One request for a key: its thread makes the value, or waits until another thread has made it.

    In the block of `SingleFlight.lead`, iterate over it, and look for the value at each step,
    because it may exist by then. A step yields the result that another thread has just made, or
    None. If no step finds the value, make it after the last one, and set `result`.

    Attributes:
        result: what the waiting threads may use; None if they have to make the value themselves.

    Raises:
        Exception: at a step, a copy of the exception that ended the block of another thread.
    """

    def __init__(self, flight: SingleFlight, key: str, scope: str, shares_old_errors: bool) -> None:
        self.result: Any = None
        self._flight = flight
        self._key = key
        self._scope = scope
        self._shares_old_errors = shares_old_errors
        self._thread = threading.get_ident()
        self._asked = time.monotonic()
        #: When this thread began to make the value; 0 while it waits for another process.
        self._began = 0.0
        self._leads = self._waited = False
        self._held: OwnFile | None = None
        #: Set at the end of the block, after `_error` and `_has_made` have their values.
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
            if leader._thread == self._thread:  # requested by the code that makes it
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
        """Wait, in another thread whose turn was created at `asked`, for the end of this turn.

        Returns False if this turn, or the process that it waits for, has been making the value for
        longer than `wait` seconds.
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
        """Yield when the lock is acquired, and at intervals while another process holds it.

        If another process holds the lock for longer than `wait` seconds, this waits for the
        fallback lock, and after another timeout returns without a lock. A turn that has replaced
        another one waits for the fallback lock alone.
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
                self._began = now  # from now on, other threads wait for this one
                flight._time_out(self._key)


def copied(error: Exception) -> Exception:
    """Return a copy of an exception for another thread, so that each has its own traceback."""
    kind = type(error)
    try:
        if isinstance(kind.__init__, types.FunctionType):  # its arguments are not in `args`
            made = kind.__new__(kind, *error.args)
            made.args = error.args
            made.__dict__.update(error.__dict__)
        else:
            made = copy.copy(error)
    except Exception:  # an exception of the caller's own that can't be copied
        return error
    made.__cause__ = error.__cause__
    return made
