"""LMDB forks: closes open databases before a fork and at the end of a process."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Protocol

from kcache.util.forks import at_end, at_fork

__all__ = ["keep_for_ever", "watch"]


class Watched(Protocol):
    """An object with an open database."""

    def before_fork(self) -> None:
        """Close the database."""
        ...

    def after_fork_in_parent(self) -> None:
        """Let the other threads go on."""
        ...

    def after_fork_in_child(self) -> None:
        """Forget everything that belongs to the parent."""
        ...

    def at_exit(self) -> None:
        """Close the database beside daemon threads."""
        ...


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
#: Held during a fork. Two threads that fork at the same time take turns.
_forking = threading.RLock()


def watch(each: Watched) -> None:
    """Tell an object about forks and the exit while it lives."""
    _watched.add(each)
    at_end(_at_exit)


def keep_for_ever(each: object) -> None:
    """Keep an object of LMDB from being freed, at the end of the process too.

    In a child, and at the end of an interpreter, freeing it would wait for the transactions of
    threads that no longer exist.
    """
    import ctypes  # few processes need it

    with suppress(AttributeError):  # PyPy has no reference counts
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _before_fork() -> None:
    _forking.acquire()
    for each in list(_watched):
        each.before_fork()


def _after_fork_in_parent() -> None:
    for each in list(_watched):
        each.after_fork_in_parent()
    _forking.release()


def _after_fork_in_child() -> None:
    global _forking  # noqa: PLW0603  a lock of a thread that is not there
    _forking = threading.RLock()
    for each in list(_watched):
        each.after_fork_in_child()


def _at_exit() -> None:
    for each in list(_watched):
        each.at_exit()


at_fork(before=_before_fork, in_parent=_after_fork_in_parent, in_child=_after_fork_in_child)
