"""Bundle: opens a file with entries for reading; it may also serve as a layer."""

from __future__ import annotations

import math
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import xxhash

from kcache.bundle.format import (
    HEAD_SIZE,
    MAX_VALUE,
    RECORD_SIZE,
    SEALED,
    TRAILER_SIZE,
    Layout,
    Record,
    read_layout,
    unpack_record,
)
from kcache.errors import BundleError

__all__ = ["Bundle", "is_bundle"]

#: Records that are read at a time: 64 KiB.
_BATCH = 1024
#: A range of at most this many records is read at once, and not halved again.
_FEW = 64
_KEY_BYTES = 32


class Bundle:
    """A bundle that is read in place: nothing is unpacked, and no value is kept in memory.

    `get` takes two reads of the file in most cases, whatever its length. Opening reads its first
    and last bytes only. `records` and `read` check everything that they return.

    If another file is renamed over it while it is open, this object goes on reading the old one. It
    reads with `pread` and maps nothing. So a file that is truncated meanwhile causes a BundleError,
    not a SIGBUS.

    Threads: safe to share. Fork: a child may go on using it, because there is no shared file
    position. Processes: any number.

    Args:
        file: path, or descriptor of an open file, which the caller closes.

    Raises:
        BundleError: it is no bundle, or a damaged one.
        OSError: it can't be opened or read.
    """

    def __init__(self, file: str | os.PathLike[str] | int) -> None:
        self.name = f"descriptor {file}" if isinstance(file, int) else os.fspath(file)
        self._fd = os.dup(file) if isinstance(file, int) else _open(self.name)
        status = os.fstat(self._fd)
        self._close = weakref.finalize(self, _close, self._fd, status)
        self._seeking = threading.Lock()
        try:
            if not stat.S_ISREG(status.st_mode):
                raise BundleError(f"{self.name}: it is no file")
            self.size = status.st_size
            self.layout: Layout = self._read_layout()
        except BaseException:
            self.close()
            raise

    def _read_layout(self) -> Layout:
        head = self._some(0, HEAD_SIZE)
        trailer = self._some(max(0, self.size - TRAILER_SIZE), TRAILER_SIZE)
        try:
            return read_layout(head, trailer, self.size)
        except BundleError as error:
            raise BundleError(f"{self.name}: {error}") from None

    @property
    def sealed(self) -> bool:
        """Whether the values are seals."""
        return self.layout.values == SEALED

    def __len__(self) -> int:
        return self.layout.entries

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._close()

    # -- one value ------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """Return the value under `key`, or None. Its digest is not checked here; the caller checks
        it.

        Raises:
            BundleError: the file changed since it was opened, or its index is damaged.
            OSError: it can't be read.
        """
        record = self.find(key)
        if record is None:
            if os.fstat(self._fd).st_size != self.size:
                raise BundleError(f"{self.name}: it was written over while it was open")
            return None
        if record.size > MAX_VALUE or record.offset + record.size > self.layout.index_at:
            raise BundleError(f"{self.name}: the index is damaged at key {key}")
        return self._exactly(record.offset, record.size)

    def find(self, key: str) -> Record | None:
        """Return where the value of `key` is, or None.

        Keys are digests, which are spread evenly, so the first digits of a key tell roughly where
        it is. If that guess is wrong, as with made-up keys, a binary search follows.

        Raises:
            BundleError, OSError: as `get`.
        """
        wanted = bytes.fromhex(key)
        count = self.layout.entries
        guess = int(key[:16], 16) * count >> 64
        reach = _FEW // 2 + 2 * math.isqrt(count)
        low, high = max(0, guess - reach), min(count, guess + reach)
        raw = self._rows(low, high)
        if low > 0 and raw[:_KEY_BYTES] > wanted:
            low, high = self._halve(wanted, 0, low)
            raw = self._rows(low, high)
        elif high < count and raw[-RECORD_SIZE:][:_KEY_BYTES] < wanted:
            low, high = self._halve(wanted, high, count)
            raw = self._rows(low, high)
        return _among(raw, wanted)

    def _halve(self, wanted: bytes, low: int, high: int) -> tuple[int, int]:
        """Return a short part of a range of records, which has the key if the range has it."""
        while high - low > _FEW:
            middle = (low + high) // 2
            if self._rows(middle, middle + 1)[:_KEY_BYTES] <= wanted:
                low = middle
            else:
                high = middle
        return low, high

    # -- all of it --------------------------------------------------------------------------------

    def records(self) -> Iterator[Record]:
        """Yield every record of the index, by ascending key.

        Raises:
            BundleError: the order of the keys, an offset, a size or the length is wrong.
            OSError: it can't be read.
        """
        last, at = "", HEAD_SIZE
        for start in range(0, self.layout.entries, _BATCH):
            raw = self._rows(start, min(start + _BATCH, self.layout.entries))
            for position in range(0, len(raw), RECORD_SIZE):
                record = unpack_record(raw, position)
                if record.key <= last:
                    raise BundleError(f"{self.name}: its keys are not in order at {record.key}")
                if not 0 < record.size <= MAX_VALUE or record.offset != at:
                    raise BundleError(f"{self.name}: the place of {record.key} is wrong")
                last, at = record.key, at + record.size
                yield record
        if at != self.layout.index_at:
            raise BundleError(f"{self.name}: there is something between the values and the index")

    def check_index(self) -> None:
        """Check the digest of head, index and trailer, and then every record.

        Raises:
            BundleError: something differs from what was written.
            OSError: it can't be read.
        """
        check = xxhash.xxh3_128(self.layout.head)
        for start in range(0, self.layout.entries, _BATCH):
            check.update(self._rows(start, min(start + _BATCH, self.layout.entries)))
        check.update(self.layout.counted)
        if check.digest() != self.layout.digest:
            raise BundleError(f"{self.name}: the checksum of its index is wrong")
        for _ in self.records():
            pass

    def read(self, record: Record) -> bytes:
        """Return the value of a record that `records` yielded, its digest checked.

        Raises:
            BundleError: it is damaged, or the file changed since it was opened.
            OSError: it can't be read.
        """
        value = self._exactly(record.offset, record.size)
        if xxhash.xxh3_128_digest(value) != record.digest:
            raise BundleError(f"{self.name}: the checksum of entry {record.key} is wrong")
        return value

    # -- bytes ----------------------------------------------------------------------------------

    def _rows(self, low: int, high: int) -> bytes:
        size = (high - low) * RECORD_SIZE
        return self._exactly(self.layout.index_at + low * RECORD_SIZE, size)

    def _exactly(self, offset: int, size: int) -> bytes:
        data = self._some(offset, size)
        if len(data) != size:
            raise BundleError(f"{self.name}: it was truncated while it was open")
        return data

    def _some(self, offset: int, size: int) -> bytes:
        """Return the given number of bytes from an offset, fewer only at the end of the file."""
        if not self._close.alive:
            raise BundleError(f"{self.name}: it is closed")
        data = self._pread(size, offset)
        while (
            0 < len(data) < size
        ):  # the system returns 2 GiB at most at a time, or was interrupted
            more = self._pread(size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def _pread(self, size: int, offset: int) -> bytes:
        if _system_pread is not None:
            return _system_pread(self._fd, size, offset)
        with self._seeking:  # Windows
            os.lseek(self._fd, offset, os.SEEK_SET)
            return os.read(self._fd, size)


_system_pread: Callable[[int, int, int], bytes] | None = getattr(os, "pread", None)


def is_bundle(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file begins as a bundle does.

    Raises:
        OSError: it can't be read.
    """
    from kcache.bundle.format import is_head

    fd = _open(os.fspath(path))
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and is_head(os.read(fd, HEAD_SIZE))
    finally:
        os.close(fd)


def _open(path: str) -> int:
    """Open a file for reading, without waiting for the writer of a pipe."""
    binary, nonblocking = getattr(os, "O_BINARY", 0), getattr(os, "O_NONBLOCK", 0)
    return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | binary | nonblocking)


def _close(fd: int, file: os.stat_result) -> None:
    """Close a descriptor, unless the program has closed it and its number may be another file's."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(fd), file):
            os.close(fd)


def _among(raw: bytes, wanted: bytes) -> Record | None:
    """Return the record of a key in rows of the index, or None."""
    at = raw.find(wanted)
    while at >= 0 and at % RECORD_SIZE:  # not a key, but a part of something else
        at = raw.find(wanted, at + 1)
    return None if at < 0 else unpack_record(raw, at)
