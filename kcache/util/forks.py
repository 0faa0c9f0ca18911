"""Forks: makes kcache safe in a forked child, and at the end of an interpreter.

Objects with locks of their own register with `after_fork`. Imports are made safe, too. What only a
miss needs is imported at the first miss, perhaps in one thread while another forks. If a thread was
importing a module, the child inherits the lock but not the thread, and would wait forever. So a
fork waits for running imports, at most `PATIENCE` seconds.

When an interpreter ends, it kills daemon threads in the middle of any operation. Some operations
must not be killed in this way (a call of a database, a line to standard error). So from then on,
daemon threads may not begin them.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import ref

#: How many seconds a fork waits for imports of other threads. The largest import that kcache begins
#: (the resolver of misses) takes 0.1 s. An import that hangs must not hold up the fork for long.
PATIENCE = 2.0
_PAUSE = 0.0005


class Forked(Protocol):
    """An object with locks, which a thread of the parent may have held at the fork."""

    def after_fork(self) -> None:
        """Make the object usable in a child process."""
        ...


#: Not a WeakSet: it runs code of Python when an object goes, and so would swallow the exception of
#: a signal's handler.
_objects: dict[int, ref[Forked]] = {}


def after_fork(each: Forked) -> None:
    """Call `each.after_fork()` in every child process that is forked while `each` lives."""
    _objects[id(each)] = ref(each, partial(_objects.pop, id(each)))


def at_fork(before: Callable[[], object], after: Callable[[], object]) -> None:
    """Call `before` before every fork, and `after` in both processes after it."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after, after_in_child=after)


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


# -- imports ---------------------------------------------------------------------------------------


def _others_import() -> bool:
    """Return whether another thread is importing a module.

    importlib has a lock for each module that is being imported, private to itself; the attribute
    `owner`, the thread, is there in every version since 3.3.
    """
    bootstrap = sys.modules.get("_frozen_importlib")
    locks: dict[str, Any] = getattr(bootstrap, "_module_locks", {})
    owners = [getattr(each(), "owner", None) for each in list(locks.values())]
    return any(owner not in (None, threading.get_ident()) for owner in owners)


def _wait_for_imports() -> None:
    """Wait until no other thread imports anything: the child would wait for that thread forever."""
    deadline = time.monotonic() + PATIENCE
    while _others_import() and time.monotonic() < deadline:
        time.sleep(_PAUSE)


def _in_child() -> None:
    global _ending  # noqa: PLW0603
    _ending = 0
    for known in list(_objects.values()):
        each = known()
        if each is not None:
            each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_imports, after_in_child=_in_child)
