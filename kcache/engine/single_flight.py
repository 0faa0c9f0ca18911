"""Flight: single flight. If many threads and processes miss one key, one makes the value."""

from __future__ import annotations

import errno
import os
import threading
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from kcache.directory import open_file_of_cache
from kcache.util import log
from kcache.util.forks import after_fork
from kcache.util.locks import lock, release
from kcache.util.open_file import OwnFile, has_header

if TYPE_CHECKING:
    from kcache.engine.stats import Counters

T = TypeVar("T")
S = TypeVar("S")

#: Seconds between two looks at a lock that another process holds: a twentieth of the time waited so
#: far, within these limits. Sixteen waiting processes then take 2 % of a core.
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.025
#: ... and longer in a process that waits for so many keys that this is more: 800 threads then take
#: a tenth of a core, and not a whole one.
_PAUSE_EACH = 0.0005
#: After this many seconds, a waiting process checks whether the value is there although the lock is
#: held. The holder may have been stopped, and another process may have stopped waiting and made the
#: value.
_LOOK_INTERVAL = 1.0
#: All that is in the file of locks. The locks are on bytes behind it, where no data is stored.
_MARK = b"kcache-flight/2\0"


def lock_key(path: str, key: str) -> OwnFile | None:
    """Return the lock of a key, in the file at `path`; None if somebody else holds it.

    It is on one byte of the file, whose offset is 62 bits of the key. So no file is made per key,
    and two keys share a byte once in 2**62. A lock lasts until its file is closed, by the holder or
    with the holder's last reference to it.

    Threads: the file is opened anew for each lock. Crash: the kernel releases the locks of a killed
    process. Fork: a child closes its copies. If somebody removes or replaces the file, two
    processes that hold locks in two files both make the entry, which costs time and nothing else.

    Raises:
        OSError: the file can't be opened, or its file system has no locks.
    """
    file = open_file_of_cache(path, os.O_RDWR, lambda file: has_header(file, _MARK))
    try:
        if lock(file, len(_MARK) + (int(key[:16], 16) >> 2)):
            return file
    except TimeoutError:
        return None
    raise OSError(errno.ENOLCK, "this file system has no locks")


class _Leader:
    """A thread that makes a value, as long as its frame holds this; and the locks that it holds.

    So an interrupt at any point leaves nobody waiting, and nothing locked.
    """

    __slots__ = ("__weakref__", "locks")

    def __init__(self) -> None:
        self.locks: list[OwnFile] = []


class _Call:
    """One value that a thread of this process makes.

    Attributes:
        leader: returns None once nobody makes it any more.
        began: when it began to make the value, or to take another leader's place; 0 before that.
        done: set when it is over, with a value, with an error, or interrupted.
        error: what was raised.
        made: whether a value was made.
        shared: what other threads may adopt; None if they may not.
    """

    __slots__ = ("asker", "began", "done", "error", "leader", "made", "shared", "thread")

    def __init__(self, leader: _Leader, asker: str) -> None:
        self.leader = ref(leader)
        self.thread = threading.get_ident()
        self.asker = asker
        self.began = 0.0
        self.done = threading.Event()
        self.error: Exception | None = None
        self.made = False
        self.shared: Any = None


class Flight:
    """Makes each value once, by one thread of one process, while the others wait for it.

    Threads of one process wait for the leader's call. Processes wait for a lock on the key
    (`lock_key`), and look again when they have it. Nobody waits for longer than `wait` seconds for
    a leader that makes the value. Then one of those that wait takes its place, and the others wait
    as long for that one. Without working locks, every process makes the value at once, counted as
    `unlocked`.

    An exception of the leader reaches the threads that wait for it, each its own copy, and the next
    caller tries again. If a leader is interrupted or killed, one of those that wait replaces it. A
    process that gets the lock of a leader that failed makes the value.

    Threads: safe to share; not from signal handlers. A thread that asks for the key that it is
    making makes the value; if makers ask for each other's keys, they wait for `wait` seconds.
    Processes: by the lock file. Crash: the kernel releases the lock of a killed leader. Fork: the
    child starts without calls and locks.

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
        #: Other threads see each change as one step.
        self._calls: dict[str, _Call] = {}
        #: Held while a waiting thread takes the place of a leader.
        self._taking = threading.Lock()
        self._complained = False
        after_fork(self)

    def run(
        self,
        key: str,
        find: Callable[[], T | None],
        make: Callable[[], tuple[T, S | None]],
        adopt: Callable[[S], T | None],
        *,
        asker: str = "",
        timeless: bool = True,
    ) -> T:
        """Return the value of `key`, made here or by another thread, after a wait if necessary.

        Args:
            key: what to make, 64 hexadecimal digits.
            find: returns the value if it is there now, otherwise None.
            make: makes and stores it; returns it, and what other threads may adopt, or None.
            adopt: returns this thread's form of what another one has just made; None if it is of no
                use to this thread.
            asker: an error is shared by threads with the same asker only.
            timeless: whether an error is shared although its maker began before this call.

        Raises:
            Exception: what `make` raised, here or in the thread that was waited for.
        """
        asked = time.monotonic()
        while True:
            leader = _Leader()
            mine = _Call(leader, asker)
            try:
                call = self._calls.setdefault(key, mine)
                if call is mine:
                    return self._lead(mine, leader, key, find, make)
                if call.thread == threading.get_ident():  # asked for while it is being made
                    return make()[0]
                if not self._ends_in_time(call, key, asked):
                    if self._replace(call, key, mine):
                        return self._lead(mine, leader, key, find, make, late=True)
                    continue
            finally:
                self._forget(key, mine)
                mine.done.set()
            self._forget(key, call)  # its leader may have been interrupted at the very end
            if call.error is not None and call.asker == asker and (timeless or call.began >= asked):
                self._count("misses")
                raise copied(call.error)
            found = find()
            if found is None and call.shared is not None:
                found = adopt(call.shared)
            if found is not None:
                self._count("coalesced")
                return found
            if call.made and call.shared is None:
                return make()[0]

    # -- threads -------------------------------------------------------------------------------

    def _forget(self, key: str, call: _Call) -> None:
        if self._calls.get(key) is call:
            self._calls.pop(key, None)

    def _lead(
        self,
        call: _Call,
        leader: _Leader,
        key: str,
        find: Callable[[], T | None],
        make: Callable[[], tuple[T, Any]],
        *,
        late: bool = False,
    ) -> T:
        """Make the value, unless another process has made it. A `late` leader took one's place."""
        try:
            found = self._find_among_processes(call, leader, key, find, late=late)
            if found is not None:
                return found
            call.began = time.monotonic()
            value, call.shared = make()
            call.made = True
        except Exception as error:
            call.error = error
            raise
        else:
            return value
        finally:
            for held in leader.locks:
                release(held)

    def _ends_in_time(self, call: _Call, key: str, asked: float) -> bool:
        while True:
            # As long as it waits for another process, it will lose patience first.
            limit = max(asked, call.began) + (self._wait if call.began else 2 * self._wait)
            left = limit - time.monotonic()
            if left <= 0:
                return call.done.is_set()
            if call.done.wait(min(_LOOK_INTERVAL, left)) or call.leader() is None:
                return True
            if self._calls.get(key) is not call:  # it was replaced
                return True

    def _replace(self, call: _Call, key: str, mine: _Call) -> bool:
        """Put a call in the place of one that takes too long; False if another thread did so."""
        with self._taking:
            if self._calls.get(key) is not call:
                return False
            mine.began = time.monotonic()
            self._calls[key] = mine
        self._tell_of_wait(key)
        return True

    def _tell_of_wait(self, key: str) -> None:
        self._count("wait_timeouts")
        log.info("waited %.0f s for somebody else to make %s; making it here, too", self._wait, key)

    # -- processes -----------------------------------------------------------------------------

    def _find_among_processes(
        self, call: _Call, leader: _Leader, key: str, find: Callable[[], T | None], *, late: bool
    ) -> T | None:
        """Wait until no other process makes the value; return it if it is there then.

        If the wait is too long, wait as long for one that has stopped waiting earlier.
        """
        lock = _second(key) if late else key
        waited = late
        found: T | None = None
        began = looked = now = time.monotonic()
        while self._is_held(lock, leader) and (now < began + self._wait or not late):
            if now >= began + self._wait:
                call.began = now  # from now on, other threads wait for this one
                self._tell_of_wait(key)
                return self._find_among_processes(call, leader, key, find, late=True)
            waited = True
            if now >= looked + _LOOK_INTERVAL:
                looked = now
                found = find()
                if found is not None:
                    break
            longest = max(_LONGEST_PAUSE, _PAUSE_EACH * len(self._calls))
            time.sleep(min(max(_FIRST_PAUSE, (now - began) / 20), longest))
            now = time.monotonic()
        else:
            found = find()
        if found is not None and waited:
            self._count("coalesced")
        return found

    def _is_held(self, key: str, leader: _Leader) -> bool:
        """Take the lock of a key, if there are locks; tell whether another process has it."""
        if self._path is None:
            return False
        try:
            taken = lock_key(self._path, key)
            if taken is not None:
                leader.locks.append(taken)
        except OSError as error:
            self._count("unlocked")
            say = log.debug if self._complained else log.warning
            self._complained = True
            say("no lock between processes, each compiles for itself (%s)", error)
            return False
        else:
            return taken is None

    # -- a child process -------------------------------------------------------------------------

    def after_fork(self) -> None:
        """Forget, in a child process, the parent's calls."""
        self._taking = threading.Lock()
        self._calls.clear()


def _second(key: str) -> str:
    """Return the key of the lock of who has waited in vain, as the key's own is held."""
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
