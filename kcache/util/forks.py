"""Forks: makes kcache safe in a forked child, and at the end of an interpreter.

Objects with locks of their own register with `after_fork`. What a hit does not need is imported
late, perhaps in one thread while another forks. The child would inherit the lock of that module but
not the thread that holds it, and would wait forever. So kcache's late imports hold `importing`, and
a fork waits.

When an interpreter ends, it kills daemon threads in the middle of any operation. Some operations
must not be killed in this way (a call of a database, a line to standard error). So from then on,
daemon threads may not begin them.
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
        """An object with locks, which a thread of the parent may have held at the fork."""

        def after_fork(self) -> None:
            """Make the object usable in a child process."""
            ...


#: Not a WeakSet, which runs Python code when an object is freed: an exception that a signal handler
#: raises in that code would be lost.
_objects: dict[int, ref[Forked]] = {}


def after_fork(each: Forked) -> None:
    """Call `each.after_fork()` in every child process that is forked while `each` lives."""
    _objects[id(each)] = ref(each, partial(_objects.pop, id(each)))


def at_fork(before: Callable[[], object], after: Callable[[], object]) -> None:
    """Call `before` before every fork, and then `after` in both processes.

    `after` is not called for a fork that began before this call, or if `before` failed.
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


#: A fork waits for it. Held during late imports, each of which takes 0.1 s at most, and while a
#: worker or a daemon is started.
importing = kcache.importing


# -- the end ---------------------------------------------------------------------------------------

#: The thread in which the interpreter ends; 0 before that.
_ending = 0
_at_end: list[Callable[[], None]] = []


def at_end(*calls: Callable[[], None]) -> None:
    """Call `calls`, if other threads run, when the interpreter begins to end.

    That is before all functions that are registered with `atexit` so far, and after all threads but
    daemons have ended.
    """
    _at_end.extend(call for call in calls if call not in _at_end)
    atexit.unregister(_end)  # the handler that is registered last is called first
    atexit.register(_end)


def is_ending() -> bool:
    """Return whether the interpreter ends and will soon kill this thread."""
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
