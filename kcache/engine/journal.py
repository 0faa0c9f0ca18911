"""Journal: records why entries left the cache, in a small file.

The file has one line per event. Whole lines are written in one call, so that the lines of several
processes never mix::

    1763779521.123 evicted 5f0c1be90db5a5f7b9a0a4d0c4e0a7d1 file

The fields are seconds since the epoch, the event, the first half of the key (`-` for all keys), the
backend, and an optional detail. At `LIMIT` bytes, the file is renamed to ``journal.1``, which it
replaces. A reader skips malformed lines, which a full disk may leave.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal, NamedTuple, TypeAlias, get_args

from kcache.directory import CacheDirectory, open_file_of_cache
from kcache.util.locks import pread
from kcache.util.open_file import OwnFile, open_own

#: The size in bytes at which a new file is begun. At least the last 1,800 events are kept.
LIMIT = 128 << 10
#: The two files together have at most 1/200 of the cap, or 16 KiB if that is more.
_SHARE = 400
_LEAST = 8 << 10
#: Events, in this order. An entry was evicted to stay under the cap; evicted by a trim; deleted
#: alone; deleted with all others; moved with all others to another backend; ignored, because it was
#: damaged or of another version or program; not stored for lack of room; not stored because it must
#: not be cached.
What: TypeAlias = Literal[
    "evicted", "trimmed", "deleted", "cleared", "moved", "refused", "rejected", "uncacheable"
]
EVENTS = frozenset[str](get_args(What))

#: How many events `later` collects for one write.
_TOGETHER = 64
_DIGITS = 32
_ALL = "-"
#: How many characters of a detail are kept.
_MAX_DETAIL = 200
#: How many bytes of a file are read; no file is larger.
_MAX_READ = 1 << 20
#: How each line begins, and so the file.
_BEGINNING = rb"\d{1,12}\.\d{3} [a-z]+ "
_LONGEST_BEGINNING = 40
#: A line: time, event, key, backend, detail. Times of more than 11 digits can't be formatted.
_LINE = r"(\d{1,11}(?:\.\d+)?) ([a-z]+) (-|[0-9a-f]{32}) (\S+)(?: (.*))?"


class Event(NamedTuple):
    """What happened to an entry, or to all entries.

    Attributes:
        at: seconds since the epoch.
        what: one of `EVENTS`.
        key: first 32 digits of the key; empty for all entries.
        detail: more about it, any text.
    """

    at: float
    what: str
    key: str
    detail: str = ""

    def concerns(self, key: str) -> bool:
        """Return whether the event names the entry under `key`."""
        return bool(self.key) and key.startswith(self.key)


class Journal:
    """The events of one backend in one directory.

    Threads: `note` and `events` are safe to share; `later` and `flush` are for one thread at a
    time, which holds the caller's lock. Processes: any number write and read one file; if two begin
    a new file at the same instant, older events may be lost. Crash: nothing is kept open or locked;
    events that `later` has collected are lost. A failed write is ignored, because the events only
    explain misses.

    Args:
        directory: the cache's directory; with None, nothing is written or read.
        backend: its name.
        read_only: read events, and note nothing.
        max_size: the cap of the cache, which bounds the file.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        directory: str | None = None,
        backend: str = "",
        *,
        read_only: bool = False,
        max_size: int = LIMIT * _SHARE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        files = CacheDirectory(directory or "")
        self._path, self._old = files.journal, files.old_journal
        self._there = directory is not None
        self._silent = read_only or directory is None
        self._backend = "_".join(backend.split()) or _ALL
        self._limit = min(max(_LEAST, max_size // _SHARE), LIMIT)
        self._clock = clock
        self._lines: list[str] = []

    def note(self, what: What, key: str = "", detail: str = "") -> None:
        """Append an event about the entry under `key`; without a key, about all entries."""
        if not self._silent:
            self._write(self._line(what, key, detail))

    def later(self, what: What, key: str) -> None:
        """Collect an event for `flush`, so that the file is opened once for many events."""
        if not self._silent:
            self._lines.append(self._line(what, key, ""))
            if len(self._lines) >= _TOGETHER:
                self.flush()

    def flush(self) -> None:
        """Append the events that `later` has collected."""
        if self._lines:
            self._write("".join(self._lines))
            self._lines.clear()

    def _line(self, what: str, key: str, detail: str) -> str:
        words = " ".join(detail[:_MAX_DETAIL].split())
        fields = (f"{self._clock():.3f}", what, key[:_DIGITS] or _ALL, self._backend, words)
        return " ".join(fields).rstrip() + "\n"

    def _write(self, lines: str) -> None:
        flags = os.O_RDWR | os.O_APPEND
        with suppress(OSError), open_file_of_cache(self._path, flags, _is_journal) as file:
            os.write(file.fd, lines.encode("utf-8", "backslashreplace"))
            is_full = os.fstat(file.fd).st_size >= self._limit
            # Another process may have begun a new file.
            if is_full and file.is_at(self._path):
                os.replace(self._path, self._old)

    def events(self) -> Iterator[Event]:
        """Yield the events of this backend, oldest first."""
        for path in (self._old, self._path) if self._there else ():
            for line in _lines(path):
                found = re.fullmatch(_LINE, line)
                if found and found[2] in EVENTS and found[4] == self._backend:
                    key = "" if found[3] == _ALL else found[3]
                    yield Event(float(found[1]), found[2], key, found[5] or "")


def _is_journal(file: OwnFile) -> bool:
    """Return whether a file is empty, or begins as every journal does."""
    found = pread(file.fd, _LONGEST_BEGINNING, 0)
    return not found or re.match(_BEGINNING, found) is not None


def _lines(path: str) -> list[str]:
    try:
        with open_own(path, os.O_RDONLY) as file:
            return os.read(file.fd, _MAX_READ).decode(errors="replace").split("\n")
    except OSError:
        return []
