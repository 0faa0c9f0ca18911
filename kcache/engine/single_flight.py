"""Flight: single flight. If many threads and processes miss one key, one makes the value."""

from __future__ import annotations

import os
import threading
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from kcache.engine.circles import leaders, leads_to, waits_for
from kcache.engine.key_locks import KeyLocks
from kcache.util import log
from kcache.util.forks import after_fork

if TYPE_CHECKING:
    from kcache.engine.stats import Counters

__all__ = ["Busy", "Flight", "Made", "Work", "copied"]

T = TypeVar("T")

#: Seconds between two looks at a lock that another process holds: a twentieth of the time waited so
#: far, within these limits. Sixteen waiting processes then take 2 % of a core.
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.025
#: After this many seconds, a waiting process checks whether the value is there although the lock is
#: held. The holder may have been stopped, and another process may have stopped waiting and made the
#: value.
_LOOK_INTERVAL = 1.0
#: The value of `Busy.ends` if a thread of this process is busy.
_UNKNOWN = -1
#: How many flights a thread joins or leads at most if they bring no value that it can use.
_FLIGHTS = 2


class Made(NamedTuple, Generic[T]):
    """What one flight made.

    Attributes:
        value: what its leader returns.
        reusable: whether others may use it; if not, those that waited make their own at once.
        stored: whether another process finds it.
    """

    value: T
    reusable: bool
    stored: bool


class Work(NamedTuple, Generic[T]):
    """How a value is found or computed.

    Attributes:
        find: returns the value if it is there now, otherwise None.
        compute: makes it, and stores it.
        adopt: returns this thread's form of a value that another thread has just computed; None if
            this thread can't use it.
        timeless: whether a thread that joins a call may take over an error from before it joined.
        location: where it is computed; an error is valid for the same location only.
    """

    find: Callable[[], T | None]
    compute: Callable[[], Made[T]]
    adopt: Callable[[T], T | None]
    timeless: bool = True
    location: str = ""


class Busy(NamedTuple):
    """Somebody else makes the value; to be given to the next `Flight.attempt`.

    Attributes:
        since: the `time.monotonic` at which this was first seen.
        ends: `KeyLocks.ends` then; -1 if it is a thread of this process.
    """

    since: float
    ends: int


class _Call(Generic[T]):
    """One value being made by a thread of this process."""

    __slots__ = ("done", "error", "location", "made", "since", "thread")

    def __init__(self, location: str) -> None:
        self.done = threading.Event()
        self.thread = threading.get_ident()
        self.location = location
        #: If this leader took over from one that made others wait for too long: when it began. Else
        #: 0.
        self.since = 0.0
        self.made: Made[T] | None = None
        self.error: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether it ended with a value or an error."""
        return self.made is not None or self.error is not None


class Flight(Generic[T]):
    """Makes each value once, by one thread of one process, while the others wait for it.

    Threads of one process wait for the leader's call. Processes wait for a lock on the key
    (`KeyLocks`), and look again when they have it. They wait `wait` seconds for a leader. Then one
    of the waiting threads looks once more and makes the value, and the others wait as long for that
    one. Without working locks, every process makes the value at once, counted as `unlocked`. There
    is no queue: if a leader ends without a usable value, all threads that waited for it continue at
    the same time.

    Exceptions of the leader reach the threads that wait for it, each its own copy; the next caller
    tries again. If a leader is interrupted or killed, one of the waiting threads replaces it.

    Threads: safe to share; not from signal handlers. `compute` may ask for other keys, and for its
    own: the same thread then makes the value. It also makes the value if waiting would never end,
    because the thread that it would wait for waits for this thread. Among threads, this is
    detected. Between processes, a thread that makes something waits for larger keys only.
    Processes: by the lock file. Crash: the kernel releases the lock of a killed leader, and one of
    the waiting processes makes the value. Fork: the child starts without calls and locks.

    Args:
        path: of the lock file; None excludes threads only.
        wait: seconds to wait at most, at least 0.
        counters: where `coalesced`, `wait_timeouts` and `unlocked` are counted.
    """

    def __init__(self, path: str | None, *, wait: float, counters: Counters) -> None:
        self._locks = None if path is None else KeyLocks(path)
        self._path = "" if path is None else os.path.realpath(path)
        self._wait = wait
        self._count = counters.add
        #: Changed only by `setdefault` and `pop`; other threads see each of these as one step.
        self._calls: dict[str, _Call[T]] = {}
        #: Held while a waiting thread takes the place of a leader.
        self._taking = threading.Lock()
        self._complained = False
        after_fork(self)

    def run(self, key: str, work: Work[T]) -> T:
        """Return the value of `key`, made here or by another thread, after a wait if necessary.

        Raises:
            Exception: what `compute` raised, here or in the thread that was waited for.
        """
        deadline = time.monotonic() + self._wait
        while isinstance(value := self._fly(key, work, deadline, None), Busy):
            pass  # another thread took this one's place
        return value

    def attempt(self, key: str, work: Work[T], busy: Busy | None = None) -> T | Busy:
        """Return the value of `key`, or `Busy` without waiting while somebody else makes it.

        `busy` is the result of the attempt before this one. If it is old enough, this thread makes
        the value alone.
        """
        now = time.monotonic()
        if busy is not None and now >= busy.since + self._wait:
            call = self._calls.get(key)
            if call is not None and now < call.since + self._wait:
                return Busy(call.since, _UNKNOWN)  # another thread stopped waiting earlier
            taken = self._take_over(call, key, work)
            return Busy(now, _UNKNOWN) if taken is None else taken.value
        return self._fly(key, work, None, busy)

    def close(self) -> None:
        """Close the lock file once no flight uses it. Idempotent; the next one opens it again."""
        if self._locks is not None:
            self._locks.close()

    # -- threads -------------------------------------------------------------------------------

    def _fly(self, key: str, work: Work[T], deadline: float | None, busy: Busy | None) -> T | Busy:
        flights = 0
        while flights < _FLIGHTS:
            call = self._lead_or_join(key, work, deadline, busy)
            if isinstance(call, Busy):
                return call
            if isinstance(call, Made):
                made: T = call.value
                return made
            if call.thread == threading.get_ident():  # requested while it is being made
                break
            if deadline is None:
                return Busy(time.monotonic(), _UNKNOWN) if busy is None else busy
            ended = self._await(call, key, deadline)
            if ended is None:  # its leader waits for a value that this thread makes
                break
            if not ended:
                taken = self._take_over(call, key, work)
                if taken is not None:
                    return taken.value
                continue
            if (
                call.error is not None
                and call.location == work.location
                and (work.timeless or flights)
            ):
                raise copied(call.error)
            if call.made is not None:
                if not call.made.reusable:
                    break
                value = self._joined(call.made.value, work)
                if value is not None:
                    return value
            flights += call.over  # else its leader was interrupted or did not wait
        return work.compute().value

    def _lead_or_join(
        self, key: str, work: Work[T], deadline: float | None, busy: Busy | None
    ) -> _Call[T] | Made[T] | Busy:
        """Return the call to wait for; if there is none, lead one and return its outcome."""
        call = self._calls.get(key)
        if call is not None:
            return call
        mine: _Call[T] = _Call(work.location)
        try:
            call = self._calls.setdefault(key, mine)
            return call if call is not mine else self._lead(mine, key, work, deadline, busy)
        finally:
            if self._calls.get(key) is mine:
                self._calls.pop(key, None)
            mine.done.set()

    def _await(self, call: _Call[T], key: str, deadline: float) -> bool | None:
        """Wait for a call; tell whether it ended in time, or None if it waits for this thread."""
        me = threading.get_ident()
        waits_for[me] = call.thread
        try:
            while True:
                if leads_to(call.thread, me):
                    return None
                left = max(deadline, call.since + self._wait) - time.monotonic()
                if left <= 0:
                    return call.done.is_set()
                if call.done.wait(min(_LOOK_INTERVAL, left)):
                    return True
                if self._calls.get(key) is not call:
                    return True  # its leader was interrupted at the very end, or replaced
        finally:
            waits_for.pop(me, None)

    def _take_over(self, call: _Call[T] | None, key: str, work: Work[T]) -> Made[T] | None:
        """Replace a leader that was waited for too long; None if another thread has done so."""
        if not self._wait:
            return self._alone(key, work)
        mine: _Call[T] = _Call(work.location)
        mine.since = time.monotonic()
        with self._taking:
            if self._calls.get(key) is not call:
                return None
            if call is not None and mine.since < call.since + self._wait:
                return None  # its leader has just stopped waiting for another process
            self._calls[key] = mine
        try:
            mine.made = self._alone(key, work)
        except Exception as error:
            mine.error = error
            raise
        finally:
            if self._calls.get(key) is mine:
                self._calls.pop(key, None)
            mine.done.set()
        return mine.made

    def _joined(self, made: T, work: Work[T]) -> T | None:
        value = work.find()
        if value is None:
            value = work.adopt(made)
        if value is not None:
            self._count("coalesced")
        return value

    def _lead(
        self, call: _Call[T], key: str, work: Work[T], deadline: float | None, busy: Busy | None
    ) -> Made[T] | Busy:
        try:
            made = self._among_processes(call, key, work, deadline, busy)
        except Exception as error:
            call.error = error
            raise
        if not isinstance(made, Busy):
            call.made = made
        return made

    def _alone(self, key: str, work: Work[T]) -> Made[T]:
        """End a wait that was too long: look again, and make the value as the only process."""
        self._count("wait_timeouts")
        log.info("waited %.0f s for somebody else to make %s; making it here, too", self._wait, key)
        second, deadline = _second(key), time.monotonic() + self._wait
        looked = 0.0
        try:
            while True:
                now = time.monotonic()
                if now >= looked + _LOOK_INTERVAL or not self._wait:
                    looked = now
                    found = self._find(work, waited=True)
                    if found is not None:
                        return found
                if now >= deadline or self._acquire(second) is not False:
                    return self._find(work, waited=True) or work.compute()
                time.sleep(_LONGEST_PAUSE)
        finally:
            self._release(second)

    def _find(self, work: Work[T], *, waited: bool) -> Made[T] | None:
        value = work.find()
        if value is None:
            return None
        if waited:
            self._count("coalesced")
        return Made(value, reusable=True, stored=True)

    # -- processes -----------------------------------------------------------------------------

    def _among_processes(
        self,
        call: _Call[T],
        key: str,
        work: Work[T],
        deadline: float | None,
        busy: Busy | None,
    ) -> Made[T] | Busy:
        """Make the value, or wait for another process that makes it."""
        began = looked = time.monotonic()
        ends = self._ends(key)  # before this process sees that the lock is held
        waiting = busy is not None
        try:
            while (locked := self._acquire(key)) is not True or waiting:
                if locked is None:
                    break
                now = time.monotonic()
                if not locked:
                    if self._is_hopeless(key):
                        break
                    if busy is None or busy.ends == _UNKNOWN:
                        busy = Busy(now if busy is None else busy.since, ends)
                    if deadline is None:
                        return busy
                    if now >= deadline:
                        with self._taking:
                            call.since = now if self._calls.get(key) is call else 0.0
                        return self._alone(key, work) if call.since else busy
                    waiting = True
                    time.sleep(min(max(_FIRST_PAUSE, (now - began) / 20), _LONGEST_PAUSE))
                    if now < looked + _LOOK_INTERVAL:
                        continue
                    looked = now
                # All waiting processes look at the same time, not one after the other. If the
                # holder had ended before, and the value is not there, then it left no value for us.
                # So nobody need wait for us.
                self._release(key)
                ends = self._ends(key)
                found = self._find(work, waited=True)
                if found is not None:
                    return found
                if locked:
                    if busy is not None and busy.ends not in (_UNKNOWN, ends):
                        return work.compute()
                    waiting = False
            return self._find(work, waited=busy is not None) or self._compute(key, work)
        finally:
            waits_for.pop(threading.get_ident(), None)
            self._release(key)

    def _is_hopeless(self, key: str) -> bool:
        """Tell whether waiting for the lock of a key might never end.

        This thread holds the lock through another object, or a thread that waits for this one holds
        it. Or this thread makes something else, and the process with the lock may wait for that. A
        thread can't see this, so it then waits for larger keys only. Not all processes of a circle
        can do that.
        """
        me = threading.get_ident()
        leader = leaders.get((self._path, key))
        if leader is not None:
            waits_for[me] = leader
            return leader == me or leads_to(leader, me)
        return any(mine > key for (_, mine), thread in list(leaders.items()) if thread == me)

    def _compute(self, key: str, work: Work[T]) -> Made[T]:
        waits_for.pop(threading.get_ident(), None)
        me = (self._path, key)
        leaders[me] = threading.get_ident()
        try:
            return work.compute()
        finally:
            leaders.pop(me, None)
            if self._locks is not None:
                self._locks.end(key)

    def _acquire(self, key: str) -> bool | None:
        """Tell whether the lock was taken; None if there is no lock."""
        if self._locks is None:
            return None
        try:
            return self._locks.acquire(key)
        except OSError as error:
            self._count("unlocked")
            say = log.debug if self._complained else log.warning
            self._complained = True
            say("no lock between processes, each compiles for itself (%s)", error)
            return None

    def _release(self, key: str) -> None:
        if self._locks is not None:
            self._locks.release(key)

    def _ends(self, key: str) -> int:
        return 0 if self._locks is None else self._locks.ends(key)

    # -- a child process -------------------------------------------------------------------------

    def after_fork(self) -> None:
        """Forget, in a child process, the parent's calls and its lock file."""
        self._taking = threading.Lock()
        self._calls.clear()
        leaders.clear()
        waits_for.clear()
        if self._locks is not None:
            self._locks.after_fork()


def _second(key: str) -> str:
    """Return the key of the lock for a thread that goes on alone, as the key's own is held."""
    return f"{int(key[:16], 16) ^ (1 << 63):016x}{key[16:]}"


def copied(error: Exception) -> Exception:
    """Return a copy for another thread, so that the two tracebacks don't mix."""
    import copy  # only a caller that got an error needs it

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
