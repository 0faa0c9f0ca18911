"""LMDB records: reads, writes and checks all records in the B-tree, except for the values.

The keys of the tree begin with a letter. Numbers are little-endian, except the times in keys, which
are big-endian so that they sort; KEY is the key as 32 bytes::

    c             u64 bytes, u64 entries, u32 CRC-32 of both: the sums over all entries
    e KEY         u64 time of the last use in nanoseconds, u64 stored size, u32 CRC-32 of both
    r time KEY    u64 stored size: the entries by last use
    v KEY         the value

All records are in one tree, not in LMDB's named databases. The Python binding opens a named
database in a write transaction, for which a process that only reads would have to wait. If a record
fails its check, the file is damaged. LMDB: http://www.lmdb.tech/doc/.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from itertools import islice, takewhile

import lmdb

PAGE = min(mmap.PAGESIZE, 32768)
_PAGE_HEADER = 16
#: A stored size exceeds the length of its value by at most this many bytes.
OVERHEAD = PAGE + _PAGE_HEADER - 1

#: A time of use that is more than this many nanoseconds in the future comes from a wrong clock. The
#: next use overwrites it, and eviction treats its entry as the least recently used one.
FUTURE = 86_400_000_000_000

#: A key and its record.
Pair = tuple[bytes, bytes]

_SUMS = b"c"
_PAIR = struct.Struct("<QQ")
_CHECK = struct.Struct("<I")
_SIZE = struct.Struct("<Q")
_TIME = struct.Struct(">Q")
_LATEST = (1 << 64) - 1
#: More rows than any database has.
_ALL = 1 << 62


def stored_size(length: int) -> int:
    """Return the stored size of a value of `length` bytes: the size of the pages that it takes."""
    return max(1, -(-(length + _PAGE_HEADER) // PAGE)) * PAGE


def _pack(first: int, second: int) -> bytes:
    pair = _PAIR.pack(first, second)
    return pair + _CHECK.pack(zlib.crc32(pair))


def _unpack(record: bytes) -> tuple[int, int]:
    pair = record[: _PAIR.size]
    if record[_PAIR.size :] != _CHECK.pack(zlib.crc32(pair)):
        raise lmdb.CorruptedError("a record fails its check")
    first, second = _PAIR.unpack(pair)
    return first, second


def sums(txn: lmdb.Transaction[bytes]) -> tuple[int, int] | None:
    """Return the sums (bytes, entries) over all entries, or None if the tree is empty."""
    record = txn.get(_SUMS)
    return None if record is None else _unpack(record)


def add_to_sums(txn: lmdb.Transaction[bytes], size: int, entries: int) -> None:
    """Add `size` bytes and `entries` entries to the sums. Both numbers may be negative."""
    before = sums(txn) or (0, 0)
    if before[0] + size < 0 or before[1] + entries < 0:
        raise lmdb.CorruptedError(f"the sums are {before}, but more was removed")
    txn.put(_SUMS, _pack(before[0] + size, before[1] + entries))


def time_key(used: int) -> bytes:
    """Return the bytes by which a time of use is sorted in the recency index."""
    return _TIME.pack(min(used, _LATEST))


def info(txn: lmdb.Transaction[bytes], raw: bytes) -> tuple[int, int] | None:
    """Return (last use, stored size) of an entry, or None if the entry does not exist."""
    record = txn.get(b"e" + raw)
    return None if record is None else _unpack(record)


def put_info(
    txn: lmdb.Transaction[bytes], raw: bytes, used: int, size: int
) -> tuple[int, int] | None:
    """Write last use and stored size of an entry; return the old ones, or None if it was absent."""
    before = info(txn, raw)
    if before is not None:
        txn.delete(b"r" + _TIME.pack(before[0]) + raw)
    txn.put(b"e" + raw, _pack(used, size))
    txn.put(b"r" + _TIME.pack(used) + raw, _SIZE.pack(size))
    return before


def use(txn: lmdb.Transaction[bytes], raw: bytes, used: int) -> None:
    """Record a use of an entry, if the entry exists and no later use is recorded.

    A recorded use that is later by `FUTURE` or more comes from a wrong clock, and is overwritten.
    """
    before = info(txn, raw)
    if before is not None and not used <= before[0] < used + FUTURE:
        put_info(txn, raw, used, before[1])


def remove_info(txn: lmdb.Transaction[bytes], raw: bytes) -> tuple[int, int] | None:
    """Remove last use and stored size of an entry; return both, or None if it was absent."""
    found = info(txn, raw)
    if found is not None:
        txn.delete(b"e" + raw)
        txn.delete(b"r" + _TIME.pack(found[0]) + raw)
    return found


def _pairs(txn: lmdb.Transaction[bytes], prefix: bytes, after: bytes, most: int) -> list[Pair]:
    with txn.cursor() as cursor:
        pairs = iter(cursor) if cursor.set_range(prefix + after) else iter(())
        return list(takewhile(lambda pair: pair[0].startswith(prefix), islice(pairs, most)))


def rows(
    txn: lmdb.Transaction[bytes], after: bytes, most: int
) -> list[tuple[bytes, bytes, int, int]]:
    """Return up to `most` rows of the recency index, least recently used first.

    A row is (place, key, last use, stored size). The place consists of the time and the key, and is
    unique. The first row returned is the one at the place `after`, or the next one.
    """
    try:
        found = [
            (name[1:], name[9:], _TIME.unpack(name[1:9])[0], _SIZE.unpack(row)[0])
            for name, row in _pairs(txn, b"r", after, most)
        ]
    except struct.error as error:
        raise lmdb.CorruptedError(f"a row of the recency index is damaged: {error}") from None
    wrong = any(info(txn, raw) != (used, size) for _, raw, used, size in found)
    if wrong or (not found and not after and (sums(txn) or (0, 0))[1]):
        raise lmdb.CorruptedError("the recency index does not match the entries")
    return found


# -- check -----------------------------------------------------------------------------------------


def problems(txn: lmdb.Transaction[bytes]) -> list[str]:
    """Return a sentence for each difference between the records and the values."""
    try:
        entries = {name[1:]: _unpack(row)[1] for name, row in _pairs(txn, b"e", b"", _ALL)}
        used, counted = len(rows(txn, b"", _ALL)), sums(txn) or (0, 0)
    except lmdb.CorruptedError as error:
        return [str(error)]
    values = _names(txn, b"v")
    if [b"v" + raw for raw in entries] != values or used != len(values):
        found = f"{len(values)} values, {len(entries)} records and {used} rows of the index"
        return [f"expected the same entries everywhere, got {found}"]
    right = (sum(entries.values()), len(entries))
    return [] if counted == right else [f"the sums are {counted}, expected {right}"]


def _names(txn: lmdb.Transaction[bytes], prefix: bytes) -> list[bytes]:
    """Return all keys in the tree that begin with `prefix`, without reading the values."""
    with txn.cursor() as cursor:
        keys = cursor.iternext(values=False) if cursor.set_range(prefix) else iter(())
        return list(takewhile(lambda name: name.startswith(prefix), keys))
