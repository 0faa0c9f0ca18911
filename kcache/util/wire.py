"""Wire: messages between programs and processes of kcache. A message is a list of byte strings.

A message is sent as the magic `KCW1`, the number of byte strings (u32), the length of each (u64),
and then the byte strings, called fields. Integers are little-endian. Nothing in a message is run as
code, and the lengths are checked before memory is allocated. If a reader receives anything else, it
raises `WireError`, and the connection is closed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

_MAGIC = b"KCW1"
_HEAD = struct.Struct("<4sI")
#: The most fields in a message. A request with 4,096 in-memory headers has fewer.
_MAX_FIELDS = 1 << 20
#: The most bytes in a message. A CUBIN with debug information may have hundreds of megabytes.
_MAX_BYTES = 4 << 30
_CHUNK = 1 << 20


class WireError(Exception):
    """Either the received data is not a message, or the other side has closed the connection."""


def heading(fields: Sequence[bytes]) -> bytes:
    """Return the bytes that come before the fields in the message with `fields`."""
    return struct.pack(f"<4sI{len(fields)}Q", _MAGIC, len(fields), *map(len, fields))


def send(write: Callable[[memoryview], int], fields: Sequence[bytes]) -> None:
    """Send one message with `fields`, by calling `write` until all bytes are written.

    Raises:
        OSError: `write` failed.
    """
    data = memoryview(b"".join((heading(fields), *fields)))
    while data:
        data = data[write(data) :]


def receive(read: Callable[[int], bytes]) -> list[bytes]:
    """Receive one message, by calling `read` with numbers of bytes; return its fields.

    Raises:
        WireError: the other side has closed the connection, or has not sent a message.
        OSError: `read` failed.
    """
    magic, count = _HEAD.unpack(_exactly(_HEAD.size, read))
    if magic != _MAGIC or count > _MAX_FIELDS:
        raise WireError("the received data is not a message of kcache")
    sizes = struct.unpack(f"<{count}Q", _exactly(8 * count, read))
    if sum(sizes) > _MAX_BYTES:
        raise WireError("the received message is too long")
    data, ends = _exactly(sum(sizes), read), accumulate(sizes)
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def number_in(field: bytes) -> int:
    """Return the number that `field` has as decimal text, of at most nine digits.

    Raises:
        WireError: `field` is not such a text.
    """
    if not field.isdigit() or len(field) > 9:
        raise WireError(f"expected a field with a number, got {field[:20]!r}")
    return int(field)


def join_texts(texts: Iterable[str]) -> bytes:
    """Return `texts`, which must not have NUL characters, joined into one field."""
    return b"".join(text.encode("utf-8", "surrogateescape") + b"\0" for text in texts)


def split_texts(field: bytes) -> list[str]:
    """Return the texts that `join_texts` has joined into `field`."""
    return field.decode("utf-8", "surrogateescape").split("\0")[:-1]


def _exactly(size: int, read: Callable[[int], bytes]) -> bytes:
    parts: list[bytes] = []
    while size:
        part = read(min(size, _CHUNK))
        if not part:
            raise WireError("the other side has closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)  # a single part is not copied
