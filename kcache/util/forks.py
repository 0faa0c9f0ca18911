"""Forks: makes kcache safe in a forked child, and at the end of an interpreter.

Objects that have locks register with `after_fork`, to get new locks in a forked child.

kcache imports many modules only when they are needed. If one thread forks while another thread
imports a module, the child inherits the module's import lock, but not the thread that holds the
lock, and would wait forever when it imports the module. So kcache holds the lock `importing` during
such imports, and a fork waits for this lock.

When an interpreter ends, it kills daemon threads in the middle of any operation. Some operations
must not be interrupted in this way, such as a call of a database or writing a line to standard
error. So daemon threads do not begin such an operation when the interpreter is ending.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from functools import partial
from weakref import ref

import kcache

TYPE_CHECKING = False  # `typing` takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Forked(Protocol):
        """An object that has to be changed in a forked child, for example to get new locks."""

        def after_fork(self) -> None:
            """Make the object usable in the child after a fork."""
            ...


#: The registered objects by their ids. This is not a WeakSet, because a WeakSet runs Python code
#: when an object is freed, and an exception of a signal handler would be lost in that code.
_objects: dict[int, ref[Forked]] = {}


def after_fork(each: Forked) -> None:
    """Call `each.after_fork()` in every child that is forked from now on.

    This keeps only a weak reference to `each`. When `each` is freed, the calls end.
    """
    _objects[id(each)] = ref(each, partial(_objects.pop, id(each)))


def at_fork(before: Callable[[], object], after: Callable[[], object]) -> None:
    """Call `before` before every fork, and `after` in both processes after the fork.

    `after` is not called for a fork that began before this function was called, or if `before`
    raised an exception.
    """
    forking = set[int]()

    def begin() -> None:
        before()
        forking.add(threading.get_ident())

    def end() -> None:
        if threading.get_ident() in forking:
            forking.remove(threading.get_ident())
            after()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=begin, after_in_parent=end, after_in_child=end)


#: A lock that a fork waits for. It is held while a module is imported late, which takes 0.1 s at
#: most, and while a worker or a daemon is started.
importing = kcache.importing


# -- the end of the interpreter --------------------------------------------------------------------

#: The identifier of the thread in which the interpreter is ending; 0 before that.
_ending = 0
_at_end: list[Callable[[], None]] = []


def at_end(*calls: Callable[[], None]) -> None:
    """Call each of `calls` when the interpreter begins to end, if other threads still run then.

    At that time, all threads except daemon threads have ended. The calls come before all functions
    that are registered with `atexit` so far.
    """
    _at_end.extend(call for call in calls if call not in _at_end)
    atexit.unregister(_end)  # register it again, because the last registered function runs first
    atexit.register(_end)


def is_ending() -> bool:
    """Return whether the interpreter is ending and will soon kill this thread."""
    return _ending not in (0, threading.get_ident())


def _end() -> None:
    global _ending  # noqa: PLW0603
    _ending = threading.get_ident()
    if len(sys._current_frames()) > 1:
        for call in _at_end:
            call()


def _in_child() -> None:
    global _ending  # noqa: PLW0603
    _ending = 0
    for known in list(_objects.values()):
        each = known()
        if each is not None:
            each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
