"""Verify: reads and checks every entry of a cache, and repairs what is damaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

from kcache.backend import Backend, EntryInfo
from kcache.errors import BackendError
from kcache.nvrtc.entries import DAMAGED, UNREADABLE, Item, look_into
from kcache.util import log

#: How many further checks must find the same problem, if they take no lock. During two checks, a
#: busy writer is in the same one of 256 shards once in 256 times.
_MORE_LOOKS = 2

#: Takes a title and a number of steps, and shows a progress display in a block. The block gets the
#: function to call after each step.
Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


class Report:
    """The results of a pass over a cache."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.bytes = 0
        self.bad: list[Item] = []
        self.deleted = 0
        #: What is wrong with the medium, and what is still wrong after a repair.
        self.medium: list[str] = []
        self.left: list[str] = []

    def add(self, item: Item) -> None:
        """Count one entry that was read."""
        self.kinds[item.kind] += 1
        self.bytes += item.size
        if item.kind in (DAMAGED, UNREADABLE):
            self.bad.append(item)

    @property
    def entries(self) -> int:
        """Number of entries that were read."""
        return self.kinds.total()

    @property
    def sound(self) -> bool:
        """Whether no damage is left."""
        return self.deleted == len(self.bad) and not self.left


def verify(backend: Backend, *, repair: bool, progress: Progress) -> Report:
    """Read the entries, then check the medium.

    If the entries can't be listed, and the medium was repaired, they are read after the repair.

    Args:
        backend: what is checked.
        repair: delete damaged entries, and mend the medium.
        progress: begins a progress display, with a title and a number of steps.

    Raises:
        BackendError: the medium can't be checked either.
    """
    report = Report()
    failure = _read_all(backend, report, repair=repair, progress=progress)
    report.medium += [*failure, *_check(backend, repair=repair)]
    if not repair:
        report.left += report.medium
    elif report.medium:
        report.left += backend.check()
        if failure:
            report.left += _read_all(backend, report, repair=repair, progress=progress)
    return report


def _check(backend: Backend, *, repair: bool) -> list[str]:
    """Return what is wrong with the medium.

    Without `repair`, the check takes no lock, so a concurrent write can look like damage. It checks
    several times, and only reports what every check finds.
    """
    found = list(backend.check(repair=repair))
    for _ in range(0 if repair else _MORE_LOOKS):
        if found:
            again = set(backend.check())
            found = [problem for problem in found if problem in again]
    return found


def _read_all(backend: Backend, report: Report, *, repair: bool, progress: Progress) -> list[str]:
    """Read every entry; return why that failed, in one sentence, or nothing."""
    try:
        with progress("verifying", backend.usage().entries) as advance:
            for info in backend.scan():
                opened = look_into(backend, info)
                advance()
                if opened is not None:
                    report.add(opened.item)
                    if repair and opened.item.kind == DAMAGED:
                        report.deleted += _delete(backend, info)
    except BackendError as error:
        return [str(error)]
    return []


def _delete(backend: Backend, info: EntryInfo) -> bool:
    """Delete a damaged entry; return whether it is deleted, gone or sound now."""
    opened = look_into(backend, info)
    if opened is None or opened.item.kind != DAMAGED:
        return opened is None or opened.item.kind != UNREADABLE
    try:
        backend.delete(info.key)
    except BackendError as error:
        log.warning("%s", error)
        return False
    return True
