r"""Seal: what travels between machines, a checked and perhaps signed wrapper around an entry.

The entry's envelope (`kcache.entry`) is inside, and is checked again where it is used.

====================  ============================================================================
bytes                 what
====================  ============================================================================
8                     magic ``KCSEAL1\n``
1                     how it is signed: 0 not at all
32                    the key
8                     size of the value, little-endian
n                     the value
32                    SHA-256 over all of it
====================  ============================================================================
"""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

__all__ = ["DAMAGED", "UNSIGNED", "Sealer", "PlainSealer", "SealError", "make_sealer"]

#: Why a seal is refused: it is damaged or of another key; it has no signature, or a wrong one.
DAMAGED, UNSIGNED = "damaged", "unsigned"

_MAGIC = b"KCSEAL1\n"
_HEAD = struct.Struct("<8sB32sQ")
_CHECKSUM = 32


class SealError(Exception):
    """What a remote returned is not used. `reason` is `DAMAGED` or `UNSIGNED`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Sealer(Protocol):
    """Seals and unseals. Threads: safe to share."""

    def seal(self, key: str, value: bytes) -> bytes:
        """Return what travels for `value` under `key`."""
        ...

    def unseal(self, key: str, sealed: bytes) -> bytes:
        """Return the value; raises SealError."""
        ...


class PlainSealer:
    """Checks, and signs nothing."""

    def seal(self, key: str, value: bytes) -> bytes:
        """Return what travels for `value` under `key`."""
        body = _HEAD.pack(_MAGIC, 0, bytes.fromhex(key), len(value)) + value
        return body + hashlib.sha256(body, usedforsecurity=False).digest()

    def unseal(self, key: str, sealed: bytes) -> bytes:
        """Return the value.

        Raises:
            SealError: it is damaged, or of another key.
        """
        if len(sealed) < _HEAD.size + _CHECKSUM:
            raise SealError(DAMAGED, f"{len(sealed)} bytes are too short")
        body = memoryview(sealed)[:-_CHECKSUM]
        if hashlib.sha256(body, usedforsecurity=False).digest() != sealed[-_CHECKSUM:]:
            raise SealError(DAMAGED, "wrong checksum")
        magic, how, stored_key, size = _HEAD.unpack_from(sealed)
        if magic != _MAGIC or how != 0 or size != len(body) - _HEAD.size:
            raise SealError(DAMAGED, "not a seal of this version")
        if stored_key.hex() != key:
            raise SealError(DAMAGED, f"the value of another key: {stored_key.hex()}")
        return bytes(body[_HEAD.size :])


def make_sealer() -> Sealer:
    """Return what seals and unseals here."""
    return PlainSealer()
