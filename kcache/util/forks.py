"""Forks: objects that have something to do in a child process before anybody uses them there."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Forked", "after_fork"]


class Forked(Protocol):
    """What has locks, which a thread of the parent may have held at the fork."""

    def after_fork(self) -> None:
        """Make the object usable in a child process."""
        ...


_objects: weakref.WeakSet[Forked] = weakref.WeakSet()


def after_fork(each: Forked) -> None:
    """Have `each.after_fork()` called in every child process that is forked while it lives."""
    _objects.add(each)


def _in_child() -> None:
    for each in list(_objects):
        each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
