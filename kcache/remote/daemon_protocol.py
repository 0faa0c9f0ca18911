"""Daemon protocol: a program's questions to the daemon, and the answers, as fields of messages.

The fields of a question are its kind, the process group of the program, and the arguments. The
fields of an answer are `DONE`, the warnings for the user (one per line), and the result. A number
is sent as decimal text, and a time as a number of milliseconds.
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

#: The largest number of keys in a question. A source without headers has two keys: one that covers
#: the name of the source, and one that does not.
MOST_KEYS = 2

GET, PUT, LEASE, RELEASE, FLUSH = b"get", b"put", b"lease", b"release", b"flush"


class Setup(NamedTuple):
    """The configuration of a daemon. Programs with the same configuration share the daemon.

    Attributes:
        addresses: the addresses of the remotes, in the order in which they are asked.
        settings: the settings of kcache that the daemon needs; maps names to values.
        environment: the environment variables with credentials, proxies and certificates that the
            libraries for HTTP, Redis and object stores read; maps names to values.
    """

    addresses: tuple[Address, ...]
    settings: Mapping[str, str]
    environment: Mapping[str, str]

    def pack(self) -> bytes:
        """Return the setup as bytes.

        The bytes contain credentials, so they must not be written to a file or a log.
        """
        about = [self.addresses, dict(self.settings), dict(self.environment)]
        return json.dumps(about, sort_keys=True).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Setup:
        """Return the setup from which `pack` made the bytes `packed`."""
        addresses, settings, environment = json.loads(packed)
        return cls(tuple(map(_address, addresses)), settings, environment)

    def daemon(self) -> Daemon:
        """Return the description of the daemon that has this setup."""
        return Daemon("remotes", "kcache.remote.daemon", self.pack())

    def __repr__(self) -> str:
        """Return the setup without credentials."""
        return f"Setup({list(self.addresses)!r})"


def _address(fields: list[Any]) -> Address:
    *most, options = fields
    return Address(*most, tuple((name, value) for name, value in options))  # type: ignore[call-arg]


class GetReply(NamedTuple):
    """The daemon's reply to a question of the kind `GET`.

    Attributes:
        value: the envelope of the entry that was found, which the program has to check; None if no
            entry was found.
        remote: the index of the remote that has the entry; the number of remotes if none has it.
        wait: for how many seconds further questions are useless, because no remote can be asked.
        which: the index, among the keys in the question, of the key under which the entry was
            found.
        unanswered: how many of the remotes did not answer.
    """

    value: bytes | None
    remote: int
    wait: float
    which: int = 0
    unanswered: int = 0

    def pack(self) -> list[bytes]:
        """Return the reply as the fields of a message."""
        numbers = (self.wait * 1000, self.remote, self.which, self.unanswered)
        head = [b"%d" % number for number in numbers]
        return head if self.value is None else [*head, self.value]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> GetReply:
        """Return the reply from which `pack` made `fields`. Raises WireError for other fields."""
        if len(fields) not in (4, 5):
            raise WireError(f"expected an answer of 4 or 5 fields, got {len(fields)}")
        value = fields[4] if len(fields) == 5 else None
        wait, remote, which, unanswered = map(number_in, fields[:4])
        return cls(value, remote, wait / 1000, which, unanswered)


class Upload(NamedTuple):
    """The entries of one compile, which are stored in remotes.

    Attributes:
        kernel: the key and the envelope of the kernel, or None if the remotes have the kernel.
        manifest: the key and the envelope of a manifest, which is merged into the one that a remote
            has; or None.
        lease: the key and the token of a lease, which is released after the upload; or None.
    """

    kernel: tuple[str, bytes] | None
    manifest: tuple[str, bytes] | None = None
    lease: tuple[str, bytes] | None = None

    @property
    def size(self) -> int:
        """The number of bytes in the envelopes."""
        return sum(len(entry[1]) for entry in (self.kernel, self.manifest) if entry is not None)

    def pack(self) -> list[bytes]:
        """Return the upload as the fields of a message."""
        pairs = (pair or ("", b"") for pair in self)
        return [field for key, value in pairs for field in (key.encode(), value)]

    @classmethod
    def unpack(cls, fields: Sequence[bytes]) -> Upload:
        """Return the upload from which `pack` made `fields`. Raises WireError for other fields."""
        if len(fields) != 6:
            raise WireError(f"expected an upload of 6 fields, got {len(fields)}")
        pairs = zip(fields[::2], fields[1::2], strict=True)
        return cls(*((key_in(key), value) if key else None for key, value in pairs))


#: Maps the name of each count to what is counted.
COUNTS = {
    "hits": "questions that the remote answered with a sound value",
    "misses": "questions that the remote answered without a value that can be used",
    "errors": "operations that failed, except for time-outs",
    "timeouts": "operations that exceeded their time limit",
    "skipped": "questions that were not sent because the remote had failed",
    "damaged": "values from the remote that failed their check",
    "unsigned": "values from the remote without a valid signature, if there are signing keys",
    "uploads": "values that were stored in the remote",
    "dropped": "values not stored: too long, queue full, or the remote had failed",
    "bytes_in": "bytes of the values that were received from the remote",
    "bytes_out": "bytes of the values that were stored in the remote",
}


class Counts:
    """The counts of one remote, in memory. Threads: Several threads may use one object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Add `amount` to the count that is called `name`."""
        with self._lock:
            self._counts[name] += amount

    def as_dict(self) -> dict[str, int]:
        """Return a copy of all counts by their names."""
        with self._lock:
            return dict(self._counts)


def key_in(field: bytes) -> str:
    """Return the key that a field holds; raise WireError if the field holds no key."""
    text = field.decode("ascii", "replace")
    if not is_key(text):
        raise WireError(f"expected a key, got {text[:80]!r}")
    return text
