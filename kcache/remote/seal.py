r"""Seal: the checked, perhaps signed wrapper around an entry that travels between machines.

The entry's envelope (`kcache.entry`) is inside, and is checked again before its use.

====================  ============================================================================
bytes                 what
====================  ============================================================================
8                     magic ``KCSEAL1\n``
1                     how it is signed: 0 not at all, 1 HMAC-SHA256, 2 Ed25519
8                     which key signed it; zeros if none did
32                    the key of the value
8                     size of the value, little-endian
n                     the value
16                    XXH3-128 over all of the above
0, 32 or 64           the signature, of SHA-256 over all but the checksum
====================  ============================================================================

The checksum finds accidents. It does not prove who made the value: only a signature does. A reader
without a signing key only checks the checksum, with or without a signature.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

import xxhash

from kcache.remote.keys import Keys, read_keys

__all__ = [
    "DAMAGED",
    "FORGED",
    "OTHER_KEY",
    "OTHER_SIGNER",
    "UNSIGNED",
    "PlainSealer",
    "SealError",
    "Sealer",
    "SignedSealer",
    "make_sealer",
]

#: Why a seal is refused: it is damaged, or it belongs to another key (swapped, replayed).
DAMAGED, OTHER_KEY = "damaged", "other key"
#: With a signing key: it has no signature, one by an unknown key, or a wrong one.
UNSIGNED, OTHER_SIGNER, FORGED = "unsigned", "other signer", "forged"

_MAGIC = b"KCSEAL1\n"
_HEAD = struct.Struct("<8sB8s32sQ")
_CHECKSUM = 16
_NOBODY = bytes(8)
#: How it is signed -> bytes of the signature.
_SIGNATURES = {0: 0, 1: 32, 2: 64}


class SealError(Exception):
    """A sealed value is refused. `reason` is one of the constants of this module."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Sealer(Protocol):
    """Seals and unseals. Threads: safe to share."""

    #: Whether others accept what this object seals. Without a private key, it should not be sent.
    can_seal: bool

    def seal(self, key: str, value: bytes) -> bytes:
        """Return the seal around `value` under `key`; raises SealError without `can_seal`."""
        ...

    def unseal(self, key: str, sealed: bytes) -> bytes:
        """Return the value; raises SealError."""
        ...


class _Opened:
    """The parts of a seal, whose bounds, checksum and key were checked."""

    __slots__ = ("how", "sealed", "signature", "signer", "value_end")

    def __init__(self, key: str, sealed: bytes) -> None:
        if len(sealed) < _HEAD.size + _CHECKSUM:
            raise SealError(DAMAGED, f"{len(sealed)} bytes are too short")
        magic, self.how, self.signer, stored_key, size = _HEAD.unpack_from(sealed)
        if magic != _MAGIC or self.how not in _SIGNATURES:
            raise SealError(DAMAGED, "it is no seal of this version")
        self.value_end = _HEAD.size + size
        signed_at = self.value_end + _CHECKSUM
        if signed_at + _SIGNATURES[self.how] != len(sealed):
            raise SealError(DAMAGED, f"it says {size} bytes, and there are {len(sealed)} in all")
        self.sealed = sealed
        if xxhash.xxh3_128_digest(self.body()) != sealed[self.value_end : signed_at]:
            raise SealError(DAMAGED, "its checksum is wrong")
        if stored_key.hex() != key:
            raise SealError(OTHER_KEY, f"it is the value of {stored_key.hex()}")
        self.signature = sealed[signed_at:]

    def body(self) -> memoryview:
        """Return the bytes that the checksum and the signature cover."""
        return memoryview(self.sealed)[: self.value_end]

    def value(self) -> bytes:
        return self.sealed[_HEAD.size : self.value_end]


def _head(how: int, signer: bytes, key: str, size: int) -> bytes:
    return _HEAD.pack(_MAGIC, how, signer, bytes.fromhex(key), size)


class PlainSealer:
    """Finds accidental damage, and signs nothing."""

    can_seal = True

    def seal(self, key: str, value: bytes) -> bytes:
        """Return the seal of `value` under `key`."""
        body = _head(0, _NOBODY, key, len(value)) + value
        return body + xxhash.xxh3_128_digest(body)

    def unseal(self, key: str, sealed: bytes) -> bytes:
        """Return the value.

        Raises:
            SealError: it is damaged, or of another key.
        """
        return _Opened(key, sealed).value()


class SignedSealer:
    """Signs with the private key, and only accepts what one of the keys has signed.

    Args:
        keys: the keys of the file.
    """

    def __init__(self, keys: Keys) -> None:
        self._signer = keys.signer
        self._verifiers = {(each.how, each.id): each for each in keys.verifiers}
        self.can_seal = keys.signer is not None

    def seal(self, key: str, value: bytes) -> bytes:
        """Return the signed seal of `value` under `key`.

        Raises:
            SealError: there is no private key.
        """
        signer = self._signer
        if signer is None:
            raise SealError(UNSIGNED, "the key file has no private key to sign with")
        body = _head(signer.how, signer.id, key, len(value)) + value
        return b"".join((body, xxhash.xxh3_128_digest(body), signer.sign(_digest(body))))

    def unseal(self, key: str, sealed: bytes) -> bytes:
        """Return the value.

        Raises:
            SealError: it is damaged, of another key, or not signed by a known key.
        """
        opened = _Opened(key, sealed)
        if opened.how == 0:
            raise SealError(UNSIGNED, "it is not signed")
        # Found by kind and id, so that an id of one kind never leads to a key of the other.
        verifier = self._verifiers.get((opened.how, opened.signer))
        if verifier is None:
            raise SealError(OTHER_SIGNER, f"it is signed by an unknown key, {opened.signer.hex()}")
        if not verifier.verifies(opened.signature, _digest(opened.body())):
            raise SealError(FORGED, "its signature is wrong")
        return opened.value()


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.sha256(body).digest()


def make_sealer(key_file: str | None = None) -> Sealer:
    """Return the sealer: a signing one if there is a file of keys.

    Raises:
        ConfigError: the file can't be used.
    """
    return PlainSealer() if key_file is None else SignedSealer(read_keys(key_file))
