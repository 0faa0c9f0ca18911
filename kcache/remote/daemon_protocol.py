"""Daemon protocol: a program's questions to the daemon, and the answers, as fields of messages.

A question has its kind, the process group of the program, and its arguments. An answer begins with
the warnings for the user, one in each line. Numbers are decimal text, and times milliseconds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kcache.backend import is_key
from kcache.daemons.spawn import Daemon
from kcache.remote.address import Address
from kcache.util.wire import WireError, number_in

#: A source without headers has two keys: one with its name, and one without.
MOST_KEYS = 2

GET, PUT, LEASE, RELEASE, FLUSH = b"get", b"put", b"lease", b"release", b"flush"


class Setup(NamedTuple):
    """The configuration of a daemon. Programs with the same configuration share the daemon.

    Attributes:
        addresses: the addresses of the remotes, in order.
        settings: settings of kcache that the daemon follows, name -> value.
        environment: variables that clients of protocols read (credentials, proxies, certificates).
    """

    addresses: tuple[Address, ...]
    settings: Mapping[str, str]
    environment: Mapping[str, str]

    def pack(self) -> bytes:
        """Return the setup as bytes, which must not get into files or logs: it has credentials."""
        about = [self.addresses, dict(self.settings), dict(self.environment)]
        return json.dumps(about, sort_keys=True).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Setup:
        """Return the setup that `pack` packed."""
        addresses, settings, environment = json.loads(packed)
        return cls(tuple(map(_address, addresses)), settings, environment)

    def daemon(self) -> Daemon:
        """Return the daemon with this setup."""
        return Daemon("remotes", "kcache.remote.daemon", self.pack())

    def __repr__(self) -> str:
        """Return the setup without credentials."""
        return f"Setup({list(self.addresses)!r})"


def _address(fields: list[Any]) -> Address:
    *most, options = fields
    return Address(*most, tuple((name, value) for name, value in options))  # type: ignore[call-arg]


class GetReply(NamedTuple):
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
        numbers = (self.wait * 1000, self.remote, self.which, self.unanswered)
        head = [b"%d" % number for number in numbers]
        return head if self.value is None else [*head, self.value]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> GetReply:
        """Return the object that `pack` packed; raises WireError."""
        if len(fields) not in (4, 5):
            raise WireError(f"an answer of {len(fields)} fields")
        value = fields[4] if len(fields) == 5 else None
        wait, remote, which, unanswered = map(number_in, fields[:4])
        return cls(value, remote, wait / 1000, which, unanswered)


class Upload(NamedTuple):
    """The entries of a compile, to be put in this order.

    Attributes:
        kernel: key and envelope, or None if the remotes have it.
        manifest: key and envelope of a manifest, to be merged into the stored one, or None.
        lease: key and token of a lease to release afterwards, or None.
    """

    kernel: tuple[str, bytes] | None
    manifest: tuple[str, bytes] | None = None
    lease: tuple[str, bytes] | None = None

    @property
    def size(self) -> int:
        """Its bytes in memory."""
        return sum(len(entry[1]) for entry in (self.kernel, self.manifest) if entry is not None)

    def pack(self) -> list[bytes]:
        """Return the fields."""
        pairs = (pair or ("", b"") for pair in self)
        return [field for key, value in pairs for field in (key.encode(), value)]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Upload:
        """Return the object that `pack` packed; raises WireError."""
        if len(fields) != 6:
            raise WireError(f"an upload of {len(fields)} fields")
        pairs = zip(fields[::2], fields[1::2], strict=True)
        return cls(*((key_in(key), value) if key else None for key, value in pairs))


#: Name -> what is counted.
COUNTS = {
    "hits": "questions that the remote answered with a sound value",
    "misses": "questions that it answered with nothing, or with a value longer than `max_entry`",
    "errors": "operations that failed",
    "timeouts": "operations that took too long",
    "skipped": "questions that were not asked while its breaker was open",
    "damaged": "values that failed their check",
    "unsigned": "values without a valid signature, though there are signing keys",
    "uploads": "values stored there",
    "dropped": "values not stored there: too long, queue full, or the remote had failed",
    "bytes_in": "bytes of the values that were received",
    "bytes_out": "bytes of the values that were stored",
}


class Counts:
    """Counts of one remote, in memory. Threads: may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one count."""
        with self._lock:
            self._counts[name] += amount

    def as_dict(self) -> dict[str, int]:
        """Return all counts as they are now."""
        with self._lock:
            return dict(self._counts)


def key_in(field: bytes) -> str:
    """Return a field as a key: 64 hexadecimal digits. Raises WireError."""
    text = field.decode("ascii", "replace")
    if not is_key(text):
        raise WireError(f"expected a key, got {text[:80]!r}")
    return text
