"""Format: defines the bytes of a bundle.

A bundle is a head, the values without gaps, an index and a trailer. All integers are little-endian.

==========  =====  ==============================================================================
head        bytes
==========  =====  ==============================================================================
magic       8      ``KCBUNDLE``
version     4      `VERSION`
values      4      `PLAIN` (the values are envelopes) or `SEALED` (they are seals of envelopes)
==========  =====  ==============================================================================

==========  =====  ==============================================================================
record      bytes  of the index: one per value, by ascending key, no key twice
==========  =====  ==============================================================================
key         32
offset      8      from the file's beginning: where the value before ends
size        8      1 to `MAX_VALUE`
digest      16     XXH3-128 of the value (big-endian canonical form)
==========  =====  ==============================================================================

==========  =====  ==============================================================================
trailer     bytes
==========  =====  ==============================================================================
index       8      offset of the index: where the last value ends
entries     8      number of records, `MAX_ENTRIES` at most
digest      16     XXH3-128 of the head, the index, and the 16 bytes before this field
magic       8      ``KCBNDEND``
==========  =====  ==============================================================================

The trailer ends the file. Nothing is compressed, and nothing says when, where or by whom a bundle
was made, so equal entries make equal files.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kcache.errors import BundleError

__all__ = [
    "HEAD_SIZE",
    "MAX_ENTRIES",
    "MAX_VALUE",
    "PLAIN",
    "RECORD_SIZE",
    "SEALED",
    "TRAILER_SIZE",
    "VERSION",
    "Layout",
    "Record",
    "is_head",
    "pack_head",
    "pack_record",
    "pack_trailer",
    "read_layout",
    "trailer_end",
    "unpack_record",
]

VERSION = 1
PLAIN, SEALED = 0, 1
#: An export leaves larger values out, and a reader refuses them, because one whole value at a time
#: is in memory. The largest kernels of CUTLASS have 10 MB.
MAX_VALUE = 256 << 20
#: A writer keeps the index in memory: 64 MB for this many entries.
MAX_ENTRIES = 1_000_000

_MAGIC, _END = b"KCBUNDLE", b"KCBNDEND"
_HEAD = struct.Struct("<8sII")
_RECORD = struct.Struct("<32sQQ16s")
_TRAILER = struct.Struct("<QQ16s8s")
HEAD_SIZE, RECORD_SIZE, TRAILER_SIZE = _HEAD.size, _RECORD.size, _TRAILER.size
_COUNTED = 16


class Record(NamedTuple):
    """The key of one value, its offset and size in the file, and its digest."""

    key: str
    offset: int
    size: int
    digest: bytes


class Layout(NamedTuple):
    """Where the parts of a bundle are.

    Attributes:
        values: `PLAIN` or `SEALED`.
        index_at: offset of the index.
        entries: number of records.
        head: bytes of the head.
        counted: bytes of the trailer that its digest covers.
        digest: digest of head, index and `counted`.
    """

    values: int
    index_at: int
    entries: int
    head: bytes
    counted: bytes
    digest: bytes


def is_head(start: bytes) -> bool:
    """Tell whether a file that begins with these bytes is a bundle, of any version."""
    return start.startswith(_MAGIC)


def pack_head(values: int) -> bytes:
    """Return the head of a bundle whose values are `PLAIN` or `SEALED`."""
    return _HEAD.pack(_MAGIC, VERSION, values)


def pack_record(record: Record) -> bytes:
    """Return a row of the index."""
    return _RECORD.pack(bytes.fromhex(record.key), record.offset, record.size, record.digest)


def unpack_record(raw: bytes, at: int = 0) -> Record:
    """Return the row of the index that begins at `at`."""
    key, offset, size, digest = _RECORD.unpack_from(raw, at)
    return Record(key.hex(), offset, size, digest)


def pack_trailer(index: int, entries: int) -> bytes:
    """Return the part of the trailer that its digest covers; `trailer_end` returns the rest."""
    return struct.pack("<QQ", index, entries)


def trailer_end(digest: bytes) -> bytes:
    """Return the second part of the trailer."""
    return digest + _END


def read_layout(head: bytes, trailer: bytes, size: int) -> Layout:
    """Return where the parts of a bundle of `size` bytes are, from its first and last bytes.

    All parts lie within the file. The index and the values are not checked.

    Raises:
        BundleError: it is no bundle, one of another version, or a damaged one.
    """
    if not is_head(head):
        raise BundleError("it is no bundle")
    if size < HEAD_SIZE + TRAILER_SIZE or len(head) < HEAD_SIZE or len(trailer) < TRAILER_SIZE:
        raise BundleError("it is truncated")
    _, version, values = _HEAD.unpack(head)
    if version != VERSION:
        raise BundleError(f"it has format version {version}, and this kcache reads {VERSION}")
    if values not in (PLAIN, SEALED):
        raise BundleError(f"its values are of an unknown kind, {values}")
    index, entries, digest, end = _TRAILER.unpack(trailer)
    if end != _END:
        raise BundleError("it is truncated: it does not end as bundles do")
    if entries > MAX_ENTRIES:
        raise BundleError(f"it says that it has {entries} entries; allowed: {MAX_ENTRIES}")
    if index < HEAD_SIZE or index + entries * RECORD_SIZE + TRAILER_SIZE != size:
        raise BundleError("its trailer does not fit its length")
    return Layout(values, index, entries, head, trailer[:_COUNTED], digest)
