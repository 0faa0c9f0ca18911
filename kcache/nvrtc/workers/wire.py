"""Messages between a program and its workers: lists of byte strings, framed and bounded.

A frame is the magic `KCW1`, a u32 count, one u64 length per field, then the fields, little-endian.
Nothing in it can run code, and nothing is allocated before its length was checked. A reader that
meets anything else raises `WireError`; the other side is then ended, not argued with.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence

__all__ = ["WireError", "join_texts", "receive", "send", "split_texts"]

_MAGIC = b"KCW1"
#: More fields than a request with 4,096 in-memory headers has.
_MAX_FIELDS = 1 << 20
#: A CUBIN with debug information may have hundreds of megabytes.
_MAX_BYTES = 4 << 30
_CHUNK = 1 << 20


class WireError(Exception):
    """What was read is no message, or the other side has closed."""


def send(fd: int, fields: Sequence[bytes]) -> None:
    """Write one message to a descriptor; raises OSError."""
    head = struct.pack(f"<4sI{len(fields)}Q", _MAGIC, len(fields), *map(len, fields))
    data = memoryview(b"".join((head, *fields)))
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> list[bytes]:
    """Read one message from a descriptor.

    Raises:
        WireError: the other side has closed, or sent something else; OSError: reading failed.
    """
    magic, count = struct.unpack("<4sI", _exactly(fd, 8))
    if magic != _MAGIC or count > _MAX_FIELDS:
        raise WireError("this is no message")
    sizes = struct.unpack(f"<{count}Q", _exactly(fd, 8 * count))
    if sum(sizes) > _MAX_BYTES:
        raise WireError("the message is too long")
    data = memoryview(_exactly(fd, sum(sizes)))
    fields: list[bytes] = []
    at = 0
    for size in sizes:
        fields.append(bytes(data[at : at + size]))
        at += size
    return fields


def join_texts(texts: Iterable[str]) -> bytes:
    """Return texts without NUL characters as one field."""
    return b"".join(text.encode("utf-8", "surrogateescape") + b"\0" for text in texts)


def split_texts(field: bytes) -> list[str]:
    """Return the texts that `join_texts` joined."""
    return field.decode("utf-8", "surrogateescape").split("\0")[:-1]


def _exactly(fd: int, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = os.read(fd, min(size - len(found), _CHUNK))
        if not part:
            raise WireError("the other side has closed")
        found += part
    return bytes(found)
