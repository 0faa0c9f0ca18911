"""Verify: reads and checks every entry of a cache, and repairs what is damaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

from kcache.backend import Backend, EntryInfo
from kcache.errors import BackendError
from kcache.nvrtc.entries import DAMAGED, UNREADABLE, Item, look_into
from kcache.util import log

#: How many further checks must find a problem before it is reported, if the checks take no lock. A
#: write at the same time can look like a problem, but a busy writer is in the same one of 256
#: shards during two checks only once in 256 times.
_MORE_LOOKS = 2

#: A function that takes a title and a number of steps, and returns a context manager. This shows
#: the progress during its block, and yields a function that the block calls after each step.
Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


class Report:
    """What `verify` has found and repaired."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.bytes = 0
        self.bad: list[Item] = []
        self.deleted = 0
        #: The problems of the medium (the backend's files), and the problems that are left after a
        #: repair.
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
        """The number of entries that were read."""
        return self.kinds.total()

    @property
    def sound(self) -> bool:
        """Whether no damage is left."""
        return self.deleted == len(self.bad) and not self.left


def verify(backend: Backend, *, repair: bool, progress: Progress) -> Report:
    """Read and check every entry of a backend, then check its medium; return what was found.

    If the entries can't be listed, but the medium is repaired, they are read after the repair.

    Args:
        backend: the backend to check.
        repair: whether to delete damaged entries and to repair the medium.
        progress: begins to show the progress; see `Progress`.

    Raises:
        BackendError: the medium can't be checked.
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
    """Return the problems of the medium, each in a sentence.

    Without `repair`, the backend takes no lock while it checks, so a concurrent write can look like
    damage. So a check that finds problems is repeated, and only those that every check finds are
    returned.
    """
    found = list(backend.check(repair=repair))
    for _ in range(0 if repair else _MORE_LOOKS):
        if found:
            again = set(backend.check())
            found = [problem for problem in found if problem in again]
    return found


def _read_all(backend: Backend, report: Report, *, repair: bool, progress: Progress) -> list[str]:
    """Read every entry, and add it to the report; return why that failed, or an empty list."""
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
    """Delete an entry if it is still damaged; return whether it is now deleted, gone or sound."""
    opened = look_into(backend, info)
    if opened is None or opened.item.kind != DAMAGED:
        return opened is None or opened.item.kind != UNREADABLE
    try:
        backend.delete(info.key)
    except BackendError as error:
        log.warning("%s", error)
        return False
    return True
