"""History: what all processes did with a cache in each hour of the last three months, in one file.

The file (``history``) has a header of 64 bytes and `HOURS` records of 64 bytes, 136 KiB in all. It
never grows. Hours are counted from the epoch, and hour `h` has the record `h % HOURS`. The first
process that adds to an hour takes the record over from an older hour. Record: u32 CRC-32 of the
rest, i64 hour, one IEEE double per field of `COUNTED`, four zeros. Everything is little-endian.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable

from kcache.errors import BackendError
from kcache.util.locks import RangeLocks, pread, pwrite
from kcache.util.marker import open_or_replace
from kcache.util.open_file import OpenFile, has_header, open_own
from kcache.util.record import Record

__all__ = ["COUNTED", "HOURS", "HOUR_SECONDS", "History", "Hour"]

#: How many hours are kept: 90 days.
HOURS = 90 * 24
HOUR_SECONDS = 3600
#: The fields of `kcache.engine.stats.Stats` that are counted by the hour, in the order of the file.
COUNTED = ("hits", "misses", "compiles", "evictions", "saved_seconds", "compile_seconds")


#: The count of an hour stays below this: a double counts exactly up to here.
_MOST = 2.0**53


class Hour(Record):
    """What all processes did in one hour; counts are those of `kcache.engine.stats.Stats`.

    Attributes:
        start: its beginning, seconds since the epoch.
    """

    start: int
    hits: float
    misses: float
    compiles: float
    evictions: float
    saved_seconds: float
    compile_seconds: float


class History:
    """The counts of each hour, added to by every process that uses a directory.

    It keeps nothing open and nothing in memory, so it needs no care with threads and forks.
    Processes: a process that adds holds a lock on the bytes of the hour's record, and waits for it
    at most 20 ms. On a file system without locks, counts may get lost. Crash: a record is written
    by one call, and a damaged record counts as zeros. A file that can't be written changes nothing
    else.
    """

    _HEADER = b"kcache-history/1".ljust(64, b"\0")
    _RECORD = 64
    _BODY = struct.Struct(f"<q{len(COUNTED)}d4x")
    #: A process holds a record for some 20 us. If it holds it for longer, it was stopped. The next
    #: `add` follows soon.
    _PATIENCE = 0.02
    #: How often a record is read: one that is read while it is written looks damaged.
    _TRIES = 8

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = os.path.abspath(path)
        self._clock = clock

    def add(self, counts: Iterable[float]) -> bool:
        """Add counts, in the order of `COUNTED`, to the present hour; tell whether it worked.

        If it did not (no space, no permission, a lock that another process holds), nothing was
        added.
        """
        added = tuple(counts)
        if not any(added):
            return True
        hour = int(self._clock() // HOUR_SECONDS)
        try:
            file = open_or_replace(self.path, os.O_RDWR, self._is_ours)
            return self._add(file, hour, added)
        except OSError:
            return False

    def hours(self) -> list[Hour]:
        """Return the hours that something was counted in, oldest first, the present one last.

        Raises:
            BackendError: the file is there and can't be read.
        """
        now = int(self._clock() // HOUR_SECONDS)
        try:
            file = open_own(self.path, os.O_RDONLY)
            image = pread(file.fd, len(self._HEADER) + HOURS * self._RECORD, 0)
            if not image.startswith(self._HEADER):
                return []
            return [
                Hour(hour * HOUR_SECONDS, *counts)
                for hour in range(now - HOURS + 1, now + 1)
                if any(counts := self._counts(file, hour, image))
            ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> BackendError:
        return BackendError(f"history in {self.path}: {error.strerror}")

    def _offset(self, hour: int) -> int:
        return len(self._HEADER) + hour % HOURS * self._RECORD

    def _is_ours(self, file: OpenFile) -> bool:
        return has_header(file, self._HEADER)

    def _add(self, file: OpenFile, hour: int, added: tuple[float, ...]) -> bool:
        at = self._offset(hour)
        with RangeLocks(file).held(at, self._RECORD, timeout=self._PATIENCE):
            before = self._decode(hour, pread(file.fd, self._RECORD, at)) or (0.0,) * len(COUNTED)
            body = self._BODY.pack(hour, *(a + b for a, b in zip(before, added, strict=True)))
            record = zlib.crc32(body).to_bytes(4, "little") + body
            return pwrite(file.fd, record, at) == len(record)

    def _counts(self, file: OpenFile, hour: int, image: bytes) -> tuple[float, ...]:
        """Return the counts of an hour in the file's bytes; nothing if there are none."""
        raw = image[self._offset(hour) :][: self._RECORD]
        for _ in range(self._TRIES):
            if not any(raw):
                break
            counts = self._decode(hour, raw)
            if counts is not None:
                return counts
            raw = pread(file.fd, self._RECORD, self._offset(hour))
        return ()

    def _decode(self, hour: int, raw: bytes) -> tuple[float, ...] | None:
        """Return an hour's counts: none if the record is another hour's, None if it is damaged."""
        if len(raw) < self._RECORD or int.from_bytes(raw[:4], "little") != zlib.crc32(raw[4:]):
            return None
        held, *counts = self._BODY.unpack_from(raw, 4)
        if held != hour:
            return ()
        return tuple(counts) if all(0 <= n < _MOST for n in counts) else None
