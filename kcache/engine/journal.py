"""Journal: records why entries left the cache, in a small file.

The file has one line for each event. Whole lines are written in one call, so that the lines of
several processes never mix::

    1763779521.123 evicted 5f0c1be90db5a5f7b9a0a4d0c4e0a7d1 file

The fields are the time in seconds since the epoch, the event, the first half of the key (or `-` if
the event concerns all keys), the backend, and an optional detail. When the file has reached `LIMIT`
bytes, it is renamed to ``journal.1``, replacing an older file of this name. Readers skip malformed
lines, because a full disk may cut a line short.
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

#: The size in bytes at which a new file is begun. A file of this size has at least 1,800 events, so
#: at least as many are kept.
LIMIT = 128 << 10
#: The two files together are not larger than 1/200 of the cap or 16 KiB, whichever is more.
_SHARE = 400
_LEAST = 8 << 10
#: The events. They mean, in this order, that an entry was: evicted to stay below the cap; evicted
#: by a trim; deleted alone; deleted with all others; moved with all others to another backend;
#: ignored because it was damaged, of another version or of another program; not stored because
#: there was no room for it; not stored because it must not be cached.
What: TypeAlias = Literal[
    "evicted", "trimmed", "deleted", "cleared", "moved", "refused", "rejected", "uncacheable"
]
EVENTS = frozenset[str](get_args(What))

#: How many events `later` collects before it writes them.
_TOGETHER = 64
_DIGITS = 32
_ALL = "-"
#: Only the first characters of a longer detail are written.
_MAX_DETAIL = 200
#: The most bytes that are read from a file. kcache makes no journal that is larger.
_MAX_READ = 1 << 20
#: The pattern of the beginning of each line, and so of each journal.
_BEGINNING = rb"\d{1,12}\.\d{3} [a-z]+ "
_LONGEST_BEGINNING = 40
#: The pattern of a line: time, event, key, backend, detail. A time with more than 11 digits can't
#: be converted to a date.
_LINE = r"(\d{1,11}(?:\.\d+)?) ([a-z]+) (-|[0-9a-f]{32}) (\S+)(?: (.*))?"


class Event(NamedTuple):
    """What happened to an entry, or to all entries.

    Attributes:
        at: when it happened, in seconds since the epoch.
        what: one of `EVENTS`.
        key: the first 32 digits of the key; empty if the event concerns all entries.
        detail: text with more about the event; may be empty.
    """

    at: float
    what: str
    key: str
    detail: str = ""

    def concerns(self, key: str) -> bool:
        """Return whether the event is about the entry under `key`, but not about all entries."""
        return bool(self.key) and key.startswith(self.key)


class Journal:
    """Writes and reads the events of one backend in one cache's directory.

    If a write fails, the events are lost without an error, because they only explain misses.

    Threads: `note` and `events` may be called from several threads at the same time. `later` and
    `flush` may be called from one thread at a time, so the caller must hold a lock. Processes: any
    number of processes may write and read the same file. If two processes begin a new file at the
    same instant, older events may be lost. Crash: no file is kept open or locked. Events that
    `later` has collected but not yet written are lost.

    Args:
        directory: the path of the cache's directory; with None, nothing is written or read.
        backend: the name of the backend.
        read_only: whether to ignore new events. Events can be read in any case.
        max_size: the cap of the cache, on which the largest size of the file depends.
        clock: returns the time in seconds since the epoch.
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
        """Append an event to the file, about an entry or, without `key`, about all entries."""
        if not self._silent:
            self._write(self._line(what, key, detail))

    def later(self, what: What, key: str) -> None:
        """Collect an event about the entry under `key`, to be written by `flush`.

        The file is then opened only once for many events.
        """
        if not self._silent:
            self._lines.append(self._line(what, key, ""))
            if len(self._lines) >= _TOGETHER:
                self.flush()

    def flush(self) -> None:
        """Append the events that `later` has collected to the file."""
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
            # If another process has already begun a new file, that file must not be renamed.
            if is_full and file.is_at(self._path):
                os.replace(self._path, self._old)

    def events(self) -> Iterator[Event]:
        """Yield the events of this backend from both files, oldest first."""
        for path in (self._old, self._path) if self._there else ():
            for line in _lines(path):
                found = re.fullmatch(_LINE, line)
                if found and found[2] in EVENTS and found[4] == self._backend:
                    key = "" if found[3] == _ALL else found[3]
                    yield Event(float(found[1]), found[2], key, found[5] or "")


def _is_journal(file: OwnFile) -> bool:
    """Return whether a file is empty or begins like a journal."""
    found = pread(file.fd, _LONGEST_BEGINNING, 0)
    return not found or re.match(_BEGINNING, found) is not None


def _lines(path: str) -> list[str]:
    try:
        with open_own(path, os.O_RDONLY) as file:
            return os.read(file.fd, _MAX_READ).decode(errors="replace").split("\n")
    except OSError:
        return []
