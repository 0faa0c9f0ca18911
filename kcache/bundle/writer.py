"""BundleWriter: writes a bundle from its beginning to its end."""

from __future__ import annotations

from typing import BinaryIO

import xxhash

from kcache.bundle.format import (
    MAX_ENTRIES,
    MAX_VALUE,
    PLAIN,
    Record,
    pack_head,
    pack_record,
    pack_trailer,
    trailer_end,
)
from kcache.errors import BundleError

__all__ = ["BundleWriter"]


class BundleWriter:
    """Writes values in the order of their keys; the file need not be seekable.

    Memory: 64 bytes for each entry. Threads: for one thread. Crash: a file that `finish` has not
    completed is no bundle, and every reader says so.

    Args:
        file: the file to write to; it stays open.
        values: `PLAIN` or `SEALED`.
    """

    def __init__(self, file: BinaryIO, values: int = PLAIN) -> None:
        self._write = file.write
        head = pack_head(values)
        self._check = xxhash.xxh3_128(head)
        self._index = bytearray()
        self._last = ""
        self._at = len(head)
        self.entries = 0
        self._write(head)

    def add(self, key: str, value: bytes) -> None:
        """Append a value.

        Raises:
            BundleError: the key does not follow the one before, or a bound is exceeded.
            OSError: it can't be written.
        """
        if key <= self._last:
            raise BundleError(f"key {key} comes after {self._last}")
        if not 0 < len(value) <= MAX_VALUE:
            raise BundleError(f"a value of {len(value)} bytes; allowed: 1 to {MAX_VALUE}")
        if self.entries >= MAX_ENTRIES:
            raise BundleError(f"more than {MAX_ENTRIES} entries")
        record = Record(key, self._at, len(value), xxhash.xxh3_128_digest(value))
        self._index += pack_record(record)
        self._write(value)
        self._at += len(value)
        self._last = key
        self.entries += 1

    def finish(self) -> int:
        """Write the index and the trailer; return the length of the bundle.

        Raises:
            OSError: they can't be written.
        """
        counted = pack_trailer(self._at, self.entries)
        self._check.update(self._index)
        self._check.update(counted)
        end = counted + trailer_end(self._check.digest())
        self._write(self._index)
        self._write(end)
        return self._at + len(self._index) + len(end)
