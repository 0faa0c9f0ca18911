"""Wire: messages between a program and processes of kcache: bounded lists of byte strings.

A frame is the magic `KCW1`, a u32 count, one u64 length per field, then the fields, little-endian.
Nothing in it can run code, and nothing is allocated before its length was checked. If a reader gets
anything else, it raises `WireError`, and the connection is closed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

_MAGIC = b"KCW1"
_HEAD = struct.Struct("<4sI")
#: More fields than a request with 4,096 in-memory headers has.
_MAX_FIELDS = 1 << 20
#: A CUBIN with debug information may have hundreds of megabytes.
_MAX_BYTES = 4 << 30
_CHUNK = 1 << 20


class WireError(Exception):
    """The data is not a message, or the other side has closed."""


def heading(fields: Sequence[bytes]) -> bytes:
    """Return the head of a message, before its fields."""
    return struct.pack(f"<4sI{len(fields)}Q", _MAGIC, len(fields), *map(len, fields))


def send(write: Callable[[memoryview], int], fields: Sequence[bytes]) -> None:
    """Write one message by `write`; raises OSError."""
    data = memoryview(b"".join((heading(fields), *fields)))
    while data:
        data = data[write(data) :]


def receive(read: Callable[[int], bytes]) -> list[bytes]:
    """Read one message by `read`.

    Raises:
        WireError: the other side has closed, or sent something else; OSError: reading failed.
    """
    magic, count = _HEAD.unpack(_exactly(_HEAD.size, read))
    if magic != _MAGIC or count > _MAX_FIELDS:
        raise WireError("expected a message of kcache")
    sizes = struct.unpack(f"<{count}Q", _exactly(8 * count, read))
    if sum(sizes) > _MAX_BYTES:
        raise WireError("the message is too long")
    data, ends = _exactly(sum(sizes), read), accumulate(sizes)
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def number_in(field: bytes) -> int:
    """Return the number that a field holds as decimal text; raises WireError."""
    if not field.isdigit() or len(field) > 9:
        raise WireError(f"expected a number, got {field[:20]!r}")
    return int(field)


def join_texts(texts: Iterable[str]) -> bytes:
    """Return texts without NUL characters as one field."""
    return b"".join(text.encode("utf-8", "surrogateescape") + b"\0" for text in texts)


def split_texts(field: bytes) -> list[str]:
    """Return the texts that `join_texts` joined."""
    return field.decode("utf-8", "surrogateescape").split("\0")[:-1]


def _exactly(size: int, read: Callable[[int], bytes]) -> bytes:
    parts: list[bytes] = []
    while size:
        part = read(min(size, _CHUNK))
        if not part:
            raise WireError("the other side has closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)  # a single part is not copied
