"""LMDB records: reads, writes and checks the B-tree, except for the values.

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

#: A recorded use that is further in the future than this, in nanoseconds, comes from a wrong clock,
#: and does not count.
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
    """Return how many bytes of pages a value of `length` bytes takes."""
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
    """Return (bytes, entries) of all entries; None in an empty tree."""
    record = txn.get(_SUMS)
    return None if record is None else _unpack(record)


def add_to_sums(txn: lmdb.Transaction[bytes], size: int, entries: int) -> None:
    """Add a change's bytes and entries to the sums; negative numbers subtract."""
    before = sums(txn) or (0, 0)
    if before[0] + size < 0 or before[1] + entries < 0:
        raise lmdb.CorruptedError(f"the sums are {before}, less than what is removed")
    txn.put(_SUMS, _pack(before[0] + size, before[1] + entries))


def time_key(used: int) -> bytes:
    """Return the place of a time in the index by recency."""
    return _TIME.pack(min(used, _LATEST))


def info(txn: lmdb.Transaction[bytes], raw: bytes) -> tuple[int, int] | None:
    """Return (last use, stored size) of an entry, or None if there is none."""
    record = txn.get(b"e" + raw)
    return None if record is None else _unpack(record)


def put_info(
    txn: lmdb.Transaction[bytes], raw: bytes, used: int, size: int
) -> tuple[int, int] | None:
    """Write the last use and stored size of an entry; return the previous ones, or None."""
    before = info(txn, raw)
    if before is not None:
        txn.delete(b"r" + _TIME.pack(before[0]) + raw)
    txn.put(b"e" + raw, _pack(used, size))
    txn.put(b"r" + _TIME.pack(used) + raw, _SIZE.pack(size))
    return before


def use(txn: lmdb.Transaction[bytes], raw: bytes, used: int) -> None:
    """Write a use of an entry, if the entry exists and no later use is recorded.

    A recorded use that is later by `FUTURE` or more is overwritten.
    """
    before = info(txn, raw)
    if before is not None and not used <= before[0] < used + FUTURE:
        put_info(txn, raw, used, before[1])


def remove_info(txn: lmdb.Transaction[bytes], raw: bytes) -> tuple[int, int] | None:
    """Remove the last use and stored size of an entry; return them, or None if it has none."""
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
    """Return (place, key, last use, stored size) of entries, least recently used first.

    These are at most `most` entries, from the place `after` on.
    """
    try:
        found = [
            (name[1:], name[9:], _TIME.unpack(name[1:9])[0], _SIZE.unpack(row)[0])
            for name, row in _pairs(txn, b"r", after, most)
        ]
    except struct.error as error:
        raise lmdb.CorruptedError(f"a row by recency: {error}") from None
    wrong = any(info(txn, raw) != (used, size) for _, raw, used, size in found)
    if wrong or (not found and not after and (sums(txn) or (0, 0))[1]):
        raise lmdb.CorruptedError("the index by recency differs from the entries")
    return found


# -- check -----------------------------------------------------------------------------------------


def problems(txn: lmdb.Transaction[bytes]) -> list[str]:
    """Return the differences between records and values, in words."""
    try:
        entries = {name[1:]: _unpack(row)[1] for name, row in _pairs(txn, b"e", b"", _ALL)}
        used, counted = len(rows(txn, b"", _ALL)), sums(txn) or (0, 0)
    except lmdb.CorruptedError as error:
        return [str(error)]
    values = _names(txn, b"v")
    if [b"v" + raw for raw in entries] != values or used != len(values):
        return [f"{len(values)} values, {len(entries)} records, {used} rows by recency"]
    right = (sum(entries.values()), len(entries))
    return [] if counted == right else [f"the sums are {counted}, expected {right}"]


def _names(txn: lmdb.Transaction[bytes], prefix: bytes) -> list[bytes]:
    """Return the keys that begin with a letter, at most 41 bytes each; values are not read."""
    with txn.cursor() as cursor:
        keys = cursor.iternext(values=False) if cursor.set_range(prefix) else iter(())
        return list(takewhile(lambda name: name.startswith(prefix), keys))
