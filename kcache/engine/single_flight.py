"""SingleFlight: if many threads and processes miss one key, one of them makes the value."""

from __future__ import annotations

import copy
import os
import threading
import time
import types
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kcache.directory import open_file_of_cache
from kcache.util import log
from kcache.util.forks import after_fork
from kcache.util.locks import lock, release
from kcache.util.open_file import OwnFile, has_header

if TYPE_CHECKING:
    from kcache.engine.stats import Counters

T = TypeVar("T")
S = TypeVar("S")

#: Seconds between two tries of a lock that another process holds: a twentieth of the time waited so
#: far, within these limits. Sixteen waiting processes then take 2 % of a core.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.025
#: ... and longer in a process that waits for so many keys that this is more: 800 threads then take
#: a tenth of a core, and not a whole one.
_PAUSE_EACH = 0.0005
#: After this many seconds, a waiting process checks whether the value is there although the lock is
#: held. The holder may be stopped, and another process may have timed out and made the value.
_LOOK_INTERVAL = 1.0
#: All that is in the file of locks. The locks are on bytes after it, where no data is stored.
_MARK = b"kcache-flight/2\0"


class _Made(NamedTuple):
    """The end of a call.

    Attributes:
        shared: what other threads may adopt; None if they may not.
        made: whether the value was made by the call, and not found.
    """

    shared: Any
    made: bool


class _Call:
    """One value that a thread of this process makes.

    Attributes:
        future: its end; None if the thread was interrupted.
        scope: threads with the same scope share an error.
        began: when it began to make the value; 0 while it waits for another process.
        thread: its number.
    """

    __slots__ = ("began", "future", "scope", "thread")

    def __init__(self, scope: str) -> None:
        self.future: Future[_Made | None] = Future()
        self.scope = scope
        self.began = 0.0
        self.thread = threading.get_ident()


class SingleFlight:
    """Makes each value once, by one thread of one process, while the others wait for it.

    Threads of one process wait for the future of the thread that makes it. Processes wait for a
    lock on the key (`_try_lock`), and look again when they have it. No wait for the maker takes
    longer than `wait` seconds. After that, one of those that wait takes its place, by a second
    lock, and the others wait as long for that one. Then each makes the value itself. Without
    working locks, every process makes the value at once, counted as `unlocked`.

    An exception reaches the threads that wait, each as its own copy, and the next caller tries
    again. If the thread that makes the value is interrupted or its process killed, one of those
    that wait replaces it.

    Threads: safe to share; not from signal handlers. A thread that asks for the key that it is
    making makes the value. Processes: by the lock file. Crash: the kernel releases the lock of a
    killed process. Fork: the child starts without calls and locks.

    Args:
        path: of the lock file; None excludes threads only.
        wait: seconds, at least 0.
        counters: where `coalesced`, `wait_timeouts` and `unlocked` are counted, and as `misses` the
            errors of others.
    """

    def __init__(self, path: str | None, *, wait: float, counters: Counters) -> None:
        self._path = path
        self._wait = wait
        self._count = counters.add
        self._complained = False
        self.after_fork()
        after_fork(self)

    def after_fork(self) -> None:
        """Begin without calls, also in a child process."""
        self._lock = threading.Lock()
        self._calls: dict[str, _Call] = {}

    def run(
        self,
        key: str,
        find: Callable[[], T | None],
        make: Callable[[], tuple[T, S | None]],
        adopt: Callable[[S], T | None],
        *,
        scope: str = "",
        shares_old_errors: bool = True,
    ) -> T:
        """Return the value of `key`, made here or by another thread, after a wait if necessary.

        Args:
            key: what to make, 64 hexadecimal digits.
            find: returns the value if it is there now, otherwise None.
            make: makes and stores it; returns it, and what other threads may adopt, or None.
            adopt: returns this thread's form of what another one has just made; None if it is of no
                use to this thread.
            scope: an error is shared by threads with the same scope only.
            shares_old_errors: whether an error is shared although its call began before this one.

        Raises:
            Exception: what `make` raised, here or in the thread that was waited for.
        """
        asked = time.monotonic()
        while True:
            mine = _Call(scope)
            with self._lock:
                call = self._calls.setdefault(key, mine)
            if call is mine:
                return self._lead(mine, key, find, make)
            if call.thread == mine.thread:  # asked for while it is being made
                return make()[0]
            try:
                done = self._result_of(call, asked)
            except TimeoutError:
                if self._replace(call, key, mine):
                    mine.began = time.monotonic()
                    return self._lead(mine, key, find, make, is_late=True)
                continue
            except Exception as error:
                if call.scope != scope or not (shares_old_errors or call.began >= asked):
                    continue
                self._count("misses")
                raise copied(error) from error.__cause__
            found = find()
            if found is None and done is not None and done.shared is not None:
                found = adopt(done.shared)
            if found is not None:
                self._count("coalesced")
                return found
            if done is not None and done.made and done.shared is None:
                return make()[0]

    # -- threads -------------------------------------------------------------------------------

    def _lead(
        self,
        call: _Call,
        key: str,
        find: Callable[[], T | None],
        make: Callable[[], tuple[T, Any]],
        *,
        is_late: bool = False,
    ) -> T:
        """Make the value, unless another process has; then end the wait of this call's threads."""
        done: _Made | None = None
        problem: Exception | None = None
        try:
            with self._locked(call, key, find, is_late=is_late) as found:
                if found is not None:
                    done = _Made(None, made=False)
                    return found
                call.began = time.monotonic()
                value, shared = make()
                done = _Made(shared, made=True)
                return value
        except Exception as error:
            problem = error
            raise
        finally:
            with self._lock:
                if self._calls.get(key) is call:
                    del self._calls[key]
            if problem is None:
                call.future.set_result(done)
            else:
                call.future.set_exception(problem)

    def _result_of(self, call: _Call, asked: float) -> _Made | None:
        """Return the end of another thread's call; raise its exception.

        Raises:
            TimeoutError: it makes the value for longer than `wait` seconds, or waits for another
                process that does.
        """
        while True:
            since = max(asked, call.began) if call.began else asked + self._wait
            left = since + self._wait - time.monotonic()
            try:
                return call.future.result(max(0.0, min(_LOOK_INTERVAL, left)))
            except TimeoutError:
                if call.future.done() or left <= 0:
                    raise

    def _replace(self, call: _Call, key: str, mine: _Call) -> bool:
        """Put a call in the place of one that takes too long; False if another thread did so."""
        with self._lock:
            if self._calls.get(key) is not call:
                return False
            self._calls[key] = mine
        self._time_out(key)
        return True

    def _time_out(self, key: str) -> None:
        self._count("wait_timeouts")
        log.info("waited %.0f s for another compile of %s; compiling it here, too", self._wait, key)

    # -- processes -----------------------------------------------------------------------------

    @contextmanager
    def _locked(
        self, call: _Call, key: str, find: Callable[[], T | None], *, is_late: bool
    ) -> Generator[T | None]:
        """Hold the lock of a key; return the value if it is there when the lock is acquired.

        If another process holds it for too long, wait for the fallback lock, and after that do
        without one. A late call has waited already.
        """
        held: OwnFile | None = None
        try:
            for is_fallback in (True,) if is_late else (False, True):
                began = looked = now = time.monotonic()
                while True:
                    held, is_free = self._try_lock(key, is_fallback=is_fallback)
                    if is_free or now >= looked + _LOOK_INTERVAL:
                        looked, found = now, find()
                        if found is not None and (now > began or is_fallback):
                            self._count("coalesced")
                        if is_free or found is not None:
                            yield found
                            return
                    if now >= began + self._wait:
                        break
                    longest = max(_LONGEST_PAUSE, _PAUSE_EACH * len(self._calls))
                    time.sleep(min(max(_FIRST_PAUSE, (now - began) / 20), longest))
                    now = time.monotonic()
                if not is_fallback:
                    call.began = now  # from now on, other threads wait for this one
                    self._time_out(key)
            yield None
        finally:
            if held is not None:
                release(held)

    def _try_lock(self, key: str, *, is_fallback: bool) -> tuple[OwnFile | None, bool]:
        """Return the lock of a key if it could be acquired, and whether the key is free.

        It is on one byte of the file, whose offset is 62 bits of the key, so that no file is made
        per key. Two keys share a byte once in 2**62. The fallback lock is acquired after a timeout.

        The file is opened anew for each lock. The kernel releases the locks of a killed process. If
        the file is removed or replaced, two processes that hold locks in two files both make the
        entry, which costs time and nothing else.
        """
        if self._path is None:
            return None, True
        offset = len(_MARK) + (int(key[:16], 16) >> 2 ^ is_fallback << 61)
        try:
            file = open_file_of_cache(self._path, os.O_RDWR, lambda file: has_header(file, _MARK))
            if lock(file, offset):
                return file, True
            reason = "this file system has no locks"
        except TimeoutError:
            return None, False
        except OSError as error:
            reason = str(error)
        self._count("unlocked")
        say = log.debug if self._complained else log.warning
        self._complained = True
        say("no lock between processes, each compiles for itself (%s)", reason)
        return None, True


def copied(error: Exception) -> Exception:
    """Return a copy for another thread, so that the two tracebacks don't mix."""
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
