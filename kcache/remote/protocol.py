"""Protocol: the messages between a program and its agent. Each is the fields of a wire frame.

A question has its kind, the process group of the program, and its arguments. An answer has the
warnings for the user, one in each line, and the result. Numbers are decimal text. If a side does
not understand a message, it closes the connection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kcache.backend import is_key

__all__ = [
    "FLUSH",
    "GET",
    "LEASE",
    "MAX_MESSAGE",
    "MOST_KEYS",
    "PUT",
    "RELEASE",
    "STATS",
    "STOP",
    "VERSION",
    "Found",
    "ProtocolError",
    "Upload",
    "key_in",
    "number_in",
    "seconds_in",
]

VERSION = b"kcache-agent/3"
#: Far more than any kernel and its manifest have.
MAX_MESSAGE = 1 << 30

#: A source without headers has two keys: one with its name, and one without.
MOST_KEYS = 2

GET, PUT, LEASE, RELEASE = b"get", b"put", b"lease", b"release"
STATS, FLUSH, STOP = b"stats", b"flush", b"stop"
#: No program waits longer than this for anything.
_MOST_SECONDS = 1e6


class ProtocolError(Exception):
    """The other side sent a message that does not exist in this version."""


class Found(NamedTuple):
    """The result of a `GET`.

    Attributes:
        value: the entry's envelope, not checked; None if no remote that was asked has it.
        remote: index of the remote that has it, or the number of remotes.
        wait: seconds for which any other question is useless, because no remote can be asked.
        which: index of the found key among those that were asked for.
        unanswered: how many remotes did not answer.
    """

    value: bytes | None
    remote: int
    wait: float
    which: int = 0
    unanswered: int = 0

    def pack(self) -> list[bytes]:
        """Return the fields."""
        numbers = (self.remote, self.which, self.unanswered)
        head = [b"%.3f" % self.wait, *(b"%d" % number for number in numbers)]
        return head if self.value is None else [*head, self.value]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Found:
        """Return what the fields say; raises ProtocolError."""
        if len(fields) not in (4, 5):
            raise ProtocolError(f"an answer of {len(fields)} fields")
        value = fields[4] if len(fields) == 5 else None
        remote, which, unanswered = map(number_in, fields[1:4])
        return cls(value, remote, seconds_in(fields[0]), which, unanswered)


class Upload(NamedTuple):
    """The entries of a compile, to be put in this order.

    Attributes:
        kernel: key and envelope, or None if the remotes have it.
        manifest: key and envelope of the header set, to be merged into the manifest there, or None.
        lease: key and token of a lease to release afterwards, or None.
    """

    kernel: tuple[str, bytes] | None
    manifest: tuple[str, bytes] | None = None
    lease: tuple[str, str] | None = None

    @property
    def size(self) -> int:
        """Its bytes in memory."""
        return sum(len(entry[1]) for entry in (self.kernel, self.manifest) if entry is not None)

    def pack(self) -> list[bytes]:
        """Return the fields."""
        kernel = self.kernel or ("", b"")
        fields = [kernel[0].encode(), kernel[1]]
        manifest = self.manifest or ("", b"")
        lease = self.lease or ("", "")
        return [*fields, manifest[0].encode(), manifest[1], lease[0].encode(), lease[1].encode()]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Upload:
        """Return what the fields say; raises ProtocolError."""
        if len(fields) != 6:
            raise ProtocolError(f"an upload of {len(fields)} fields")
        return cls(
            (key_in(fields[0]), fields[1]) if fields[0] else None,
            (key_in(fields[2]), fields[3]) if fields[2] else None,
            (key_in(fields[4]), key_in(fields[5])) if fields[4] else None,
        )


def key_in(field: bytes) -> str:
    """Return a field as a key, or a token: 64 hexadecimal digits. Raises ProtocolError."""
    text = field.decode("ascii", "replace")
    if not is_key(text):
        raise ProtocolError("no key")
    return text


def number_in(field: bytes) -> int:
    """Return a field as a small number; raises ProtocolError."""
    if not field.isdigit() or len(field) > 9:
        raise ProtocolError("no number")
    return int(field)


def seconds_in(field: bytes) -> float:
    """Return a field as seconds; raises ProtocolError."""
    try:
        seconds = float(field)
    except ValueError:
        raise ProtocolError("no seconds") from None
    if not math.isfinite(seconds) or not 0 <= seconds <= _MOST_SECONDS:
        raise ProtocolError("no seconds")
    return seconds
